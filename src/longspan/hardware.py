"""What is known of devices without torch: peak FLOP/s and memory bandwidth, and whether there may
be a GPU.

An unknown device has no peak; it is never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Dense bf16 (V100: fp16) matrix FLOP/s from the vendors' data sheets, by a part of the device name.
PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1300e12,
}


# Bytes/s of the memory from the same data sheets; of several memories of one name, the slowest.
PEAK_BANDWIDTH: dict[str, float] = {
    "V100": 0.9e12,
    "A100": 1.555e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "B200": 7.7e12,
    "MI300X": 5.3e12,
}


def peak_bandwidth(device_name: str) -> float | None:
    """Return the peak memory bandwidth of a device in bytes/s, or None if it is unknown."""
    return next((peak for part, peak in PEAK_BANDWIDTH.items() if part in device_name), None)


def peak_flops(device_name: str) -> float | None:
    """Return the peak 16-bit matrix FLOP/s of a device, or None if it is unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def may_have_gpu() -> bool:
    """Whether Linux has a device file of a GPU driver; without one, torch finds no GPU either.

    This spares commands that need no torch the seconds of its import on machines without a GPU.
    """
    drivers = ("nvidia*", "nvhost*", "dxg", "kfd")  # NVIDIA, Jetson, WSL, ROCm
    return any(any(Path("/dev").glob(pattern)) for pattern in drivers)


@dataclass(frozen=True)
class Node:
    """A usual machine with GPUs."""

    gpus: int
    gib: int
    """Memory of a GPU."""


NODES: dict[str, Node] = {
    "v100": Node(8, 32),
    "a100-40gb": Node(8, 40),
    "a100": Node(8, 80),
    "h100": Node(8, 80),
    "h200": Node(8, 141),
    "b200": Node(8, 180),
    "mi300x": Node(8, 192),
}
"""By the name of their GPUs, as `longspan launch --hardware` takes it."""
