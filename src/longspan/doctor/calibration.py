"""`longspan doctor --calibrate`: this machine's device as a table that the planner reads.

The planner multiplies the rates of a data sheet by the efficiencies that it was fitted to. The
table has the rates that give what was measured at these efficiencies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longspan.doctor.rates import copy_rate, matmul_rate
from longspan.hardware import cpu_device
from longspan.planning.network import Network
from longspan.planning.rates import rates_from_name

GIB, TERA, GIGA = 2**30, 1e12, 1e9
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ASSUMED_LINK = 25e9
"""Bytes/s between GPUs where none was measured: PCIe 4.0 x16."""


@dataclass(frozen=True)
class Measured:
    """What a device was measured to reach, in FLOP/s and bytes/s."""

    title: str
    is_cpu: bool
    memory: int
    matmul: Mapping[str, float]
    bandwidth: float


def measure(device: torch.device) -> Measured:
    """Measure matrix products by precision, and copies within memory."""
    is_cpu = device.type == "cpu"
    dtypes = dict(DTYPES)
    if is_cpu:  # the planner plans CPU processes in float32
        dtypes = {"fp32": torch.float32}
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        del dtypes["bf16"]
    return Measured(
        title="CPU process" if is_cpu else torch.cuda.get_device_name(device),
        is_cpu=is_cpu,
        memory=(
            cpu_device(1).memory
            if is_cpu
            else torch.cuda.get_device_properties(device).total_memory
        ),
        matmul={name: matmul_rate(device, dtype) for name, dtype in dtypes.items()},
        bandwidth=copy_rate(device),
    )


def device_table(found: Measured, processes: int, network: Network | None = None) -> str:
    """The table in TOML, as `longspan plan --gpu FILE.toml` reads it.

    `processes`: how many share a CPU, or devices in a node. `network`: of `bench collectives`.
    """
    rates = rates_from_name("cpu" if found.is_cpu else "gpu")
    share = processes if found.is_cpu else 1
    link = cpu_device(processes).link if found.is_cpu else ASSUMED_LINK
    source = "assumed, as no result of bench collectives was given: set yours"
    if network is not None and "all_reduce" in network.fits:
        link = network.fits["all_reduce"].bandwidth / rates.link
        source = f"from bench collectives on {network.ranks} ranks, {network.backend}"
    name = "cpu" if found.is_cpu else re.sub(r"[^a-z0-9]+", "-", found.title.lower()).strip("-")
    flops = ", ".join(
        f"{key} = {rate / rates.matmul / share / TERA:.4g}" for key, rate in found.matmul.items()
    )
    return "\n".join(
        [
            "# Written by longspan doctor --calibrate. Rates are those of a data sheet that, at",
            f"# the planner's efficiencies (matrix products {rates.matmul:.3g}, memory "
            f"{rates.bandwidth:.3g}, links {rates.link:.3g}), give",
            "# what was measured.",
            f"[{json.dumps(name)}]",
            f"title = {json.dumps(found.title)}",
            f"match = {json.dumps(re.escape(found.title))}",
            f"gib = {found.memory / share / GIB:.2f}",
            f"tflops = {{ {flops} }}",
            f"tb_s = {found.bandwidth / rates.bandwidth / share / TERA:.4g}",
            f"link_gb_s = {link / GIGA:.4g}  # {source}",
            f"net_gb_s = {link / GIGA:.4g}  # the same: set yours",
            f"gpus_per_node = {processes}",
            "",
        ]
    )


def processes_of(device: torch.device, nproc: int | None) -> int:
    """How many processes the table is for: those asked for, else GPUs or one."""
    if nproc is not None:
        return nproc
    return max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
