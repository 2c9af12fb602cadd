"""What is known of devices without torch: the table `devices.toml`, and whether there may be a GPU.

A device that is not in the table is unknown: no other one's rates are taken for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from longspan.errors import UserError, first_problem
from longspan.files import read_bounded
from longspan.toml import tomllib

MAX_BYTES = 1 << 16
NAME = r"[\w.-]{1,64}"
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
Words = Annotated[str, Field(max_length=100, pattern=r"^[^\p{C}]*$")]
"""A text without control characters."""
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


class _Table(BaseModel):
    """A device in `devices.toml`, which explains the keys, or in a file of the user's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    title: Words
    match: Words
    gib: Rate
    tflops: dict[Precision, Rate]
    tb_s: Rate
    link_gb_s: Rate
    net_gb_s: Rate
    host_gb_s: Rate = 32.0
    gpus_per_node: Annotated[int, Field(ge=1, le=1 << 16)]
    watts: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    usd_per_h: Rate | None = None
    priced: Words = ""

    @field_validator("tflops")
    @classmethod
    def _has_one_that_trains(cls, tflops: dict[Precision, float]) -> dict[Precision, float]:
        if not tflops.keys() & {"fp32", "fp16", "bf16"}:
            raise ValueError("expected the rate of bf16, fp16 or fp32, in which runs compute")
        return tflops


@dataclass(frozen=True)
class Device:
    """A GPU and the nodes that usually have it, in bytes, bytes/s and FLOP/s."""

    name: str
    """As `--hardware` takes it."""
    title: str
    match: str
    """A regular expression that finds the driver's name of the device."""
    memory: int
    flops: Mapping[str, float]
    """Dense matrix products, by precision."""
    bandwidth: float
    """Of the memory."""
    link: float
    """One way, to the other GPUs of the node."""
    network: float
    """One way, to other nodes, of one GPU."""
    host_link: float
    """One way, to the memory of its host."""
    gpus_per_node: int
    watts: float
    usd_per_h: float | None
    priced: str
    """The month of the price."""

    @property
    def half_flops(self) -> float | None:
        """FLOP/s of 16-bit matrix products."""
        return self.peak("bf16") or self.peak("fp16")

    def peak(self, precision: str) -> float | None:
        """FLOP/s of matrix products in a precision; None if the device has no units for it."""
        return self.flops.get(precision)


@cache
def devices() -> dict[str, Device]:
    """The devices of the table by name; a name that contains another's comes first."""
    text = (resources.files("longspan") / "devices.toml").read_text(encoding="utf-8")
    return {name: _device(name, row) for name, row in tomllib.loads(text).items()}


def device_of(hardware: str) -> Device:
    """The device of a name in the table, or of a TOML file with one table of the same keys."""
    if (name := hardware.lower()) in devices():
        return devices()[name]
    if not hardware.endswith(".toml"):
        known = ", ".join(devices())
        raise UserError(
            f"hardware {hardware!r} is unknown: expected {known}, or a TOML file with a table of "
            "the same keys as in src/longspan/devices.toml"
        )
    content = read_bounded(Path(hardware), MAX_BYTES)
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{hardware} is not TOML: {error}") from error
    if len(tables) != 1:
        raise UserError(f"{hardware} must have one table, of one GPU, got {len(tables)}")
    ((name, row),) = tables.items()
    if not re.fullmatch(NAME, name):
        raise UserError(f"{hardware}: the table must have a name like h100-80gb, got {name!r}")
    try:
        return _device(name, row)
    except ValidationError as error:
        raise UserError(f"{hardware}: {first_problem(error)}") from error


def _device(name: str, row: Any) -> Device:
    table = _Table.model_validate(row)
    return Device(
        name=name,
        title=table.title,
        match=table.match,
        memory=int(table.gib * 2**30),
        flops={key: 1e12 * rate for key, rate in table.tflops.items()},
        bandwidth=1e12 * table.tb_s,
        link=1e9 * table.link_gb_s,
        network=1e9 * table.net_gb_s,
        host_link=1e9 * table.host_gb_s,
        gpus_per_node=table.gpus_per_node,
        watts=table.watts,
        usd_per_h=table.usd_per_h,
        priced=table.priced,
    )


CORE_FLOPS, CPU_BANDWIDTH, LOOPBACK = 48e9, 20e9, 2e9
"""Of a core in float32, and of a machine's memory and loopback in bytes/s, in round terms: enough
to compare layouts on one machine, which all use the same."""


def cpu_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_device(processes: int) -> Device:
    """What one of `processes` on this machine has of its CPU, in round terms."""
    mine = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if mine else os.cpu_count() or 1
    return Device(
        name="cpu",
        title="CPU process",
        match="",
        memory=cpu_memory() // processes,
        flops={"fp32": CORE_FLOPS * cores / processes},
        bandwidth=CPU_BANDWIDTH / processes,
        link=LOOPBACK / processes,
        network=LOOPBACK / processes,
        host_link=CPU_BANDWIDTH / processes,
        gpus_per_node=processes,
        watts=0.0,
        usd_per_h=None,
        priced="",
    )


def find_device(driver_name: str) -> Device | None:
    """The device of a name such as "NVIDIA H100 80GB HBM3"; None if it is unknown."""
    return next((d for d in devices().values() if re.search(d.match, driver_name)), None)


def known_device(gpu: str, driver_name: str) -> Device | None:
    """The device of `train.gpu`, or without that the one of its driver's name, if it is known."""
    return device_of(gpu) if gpu else find_device(driver_name)


def peak_bandwidth(driver_name: str) -> float | None:
    """The peak memory bandwidth of a device in bytes/s, or None if it is unknown."""
    found = find_device(driver_name)
    return None if found is None else found.bandwidth


def peak_flops(driver_name: str) -> float | None:
    """The peak FLOP/s of 16-bit matrix products of a device, or None if it is unknown."""
    found = find_device(driver_name)
    return None if found is None else found.half_flops


def may_have_gpu() -> bool:
    """Whether Linux has a device file of a GPU driver; without one, torch finds no GPU either.

    This spares commands that need no torch the seconds of its import on machines without a GPU.
    """
    drivers = ("nvidia*", "nvhost*", "dxg", "kfd")  # NVIDIA, Jetson, WSL, ROCm
    return any(any(Path("/dev").glob(pattern)) for pattern in drivers)
