"""The GPU of a rank: is there one, its links, clocks and memory errors, and measured rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high
from typing import Any

import torch

from longspan.doctor.finding import Finding, ranks_text
from longspan.doctor.rates import copy_rate, matmul_rate
from longspan.hardware import peak_bandwidth, peak_flops
from longspan.tracking.nvml import open_nvml
from longspan.wording import counted

SLOW = 0.7
"""A rank is slow if its rate is below this fraction of the median's."""
OF_PEAK = 0.4
"""Fraction of the data sheet's rate that a large product or copy exceeds on a healthy GPU."""
SLOWDOWNS = {
    "HwSlowdown": "hardware slowdown (heat or power)",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake of the machine",
    "SwThermalSlowdown": "software thermal slowdown",
}
"""NVML's reasons for low clocks that are a fault; a power cap and an idle GPU are not."""


def measured_rates(device: torch.device) -> dict[str, float]:
    """The rates of this rank's device, by name."""
    if device.type != "cuda":
        return {"matmul": matmul_rate(device), "copy": copy_rate(device)}
    with torch.cuda.device(device):
        found = {"matmul": matmul_rate(device), "copy": copy_rate(device)}
        torch.cuda.empty_cache()
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def describe_device(device: torch.device) -> Iterator[Finding]:
    """Say which device this rank has."""
    if device.type != "cuda":
        yield Finding("device", "ok", f"CPU, {counted(torch.get_num_threads(), 'thread')}")
        return
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:,.0f} GiB"
    count = counted(torch.cuda.device_count(), "GPU")
    yield Finding("device", "ok", f"{properties.name}, {memory}; {count} on the machine")


def check_gpu(device: torch.device) -> Iterator[Finding]:
    """What NVML says of the rank's GPU; best after some load, when a fault slows its clocks."""
    if device.type != "cuda":
        return
    opened = open_nvml(str(torch.cuda.get_device_properties(device).uuid))
    if opened is None:
        advice = 'pip install "longspan[nvml]"; in a container, let it use the driver\'s utilities'
        seen = "links, clocks and memory errors are not known without NVML"
        yield Finding("GPU health", "warning", seen, advice)
        return
    yield from check_health(*opened)


def check_health(nvml: Any, handle: Any) -> Iterator[Finding]:
    """Links, clocks and memory errors of one GPU; what it does not have is left out."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    links = [state for state in links if state is not None]
    up = sum(map(bool, links))
    if 0 < up < len(links):
        seen = f"{len(links) - up} of {len(links)} NVLinks are down"
        advice = (
            "unless bridges are missing by design, look at `nvidia-smi nvlink --status` and at "
        )
        advice += "dmesg for Xid errors, and reset the GPU"
        yield Finding("GPU links", "warning", seen, advice)
    else:
        yield Finding("GPU links", "ok", f"{up} NVLinks are up" if up else "no NVLink: PCIe")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    slowed = [
        text
        for name, text in SLOWDOWNS.items()
        if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)
    ]
    clock = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    most = ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    seen = f"SM clock {clock} MHz of {most}"
    if slowed:
        advice = "check cooling and power supply; leave the machine out until it is repaired"
        yield Finding("GPU clocks", "warning", f"{seen}: {', '.join(slowed)}", advice)
    else:
        yield Finding("GPU clocks", "ok", seen)
    errors = ask(
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    remapped = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    is_pending, has_failed = (bool(x) for x in (remapped or (0, 0, 0, 0))[2:4])
    if errors or is_pending or has_failed:
        parts = [f"{errors} uncorrected ECC errors since the driver was loaded"] if errors else []
        parts += ["rows of memory wait to be remapped"] if is_pending else []
        parts += ["remapping rows of memory has failed"] if has_failed else []
        advice = "replace the GPU" if has_failed else "reset the GPU (nvidia-smi --gpu-reset)"
        yield Finding("GPU memory", "error", "; ".join(parts), advice)
    elif errors is None:
        yield Finding("GPU memory", "ok", "without ECC")
    else:
        yield Finding("GPU memory", "ok", "no uncorrected ECC errors")


TITLES = {"matmul": ("matrix product", "FLOP/s"), "copy": ("memory copy", "B/s")}


def judge_rates(
    rates: Mapping[int, Mapping[str, float]], names: Mapping[int, str]
) -> Iterator[Finding]:
    """Compare the measured rates of all ranks with each other and with the table of devices.

    `names`: the device of each rank.
    """
    peaks = {"matmul": peak_flops, "copy": peak_bandwidth}
    for kind, (title, symbol) in TITLES.items():
        found = {rank: by_kind[kind] for rank, by_kind in rates.items() if kind in by_kind}
        if not found:
            continue
        low, high, middle = min(found.values()), max(found.values()), median_high(found.values())
        power, letter = next((p, x) for p, x in ((12, "T"), (9, "G"), (0, "")) if high >= 10**p)

        def text(rate: float, unit: float = 10.0**power) -> str:
            return f"{rate / unit:,.1f}"

        span = text(low) if text(low) == text(high) else f"{text(low)} to {text(high)}"
        seen = f"{span} {letter}{symbol}"
        peak = peaks[kind](names[min(found, key=lambda rank: found[rank])])
        if peak is not None:
            seen += f", {low / peak:.0%} of the data sheet's {text(peak)}"
        slow = [rank for rank, rate in found.items() if rate < SLOW * middle]
        if slow:
            yield Finding(
                title,
                "warning",
                f"{seen}: {ranks_text(slow)} below {SLOW:.0%} of the median {text(middle)}",
                "all ranks wait for the slowest one: look for other processes, low clocks and heat "
                "on its machine, or leave it out",
            )
        elif peak is not None and low < OF_PEAK * peak:
            advice = "look for other processes on the GPU (nvidia-smi), low clocks and a power cap"
            yield Finding(title, "warning", seen, advice)
        else:
            yield Finding(title, "ok", seen)
