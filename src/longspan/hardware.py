"""What is known of devices. Plain data; an unknown device is unknown, never another's peak."""

from __future__ import annotations

# Dense bf16 (V100: fp16) matrix FLOP/s by the vendors' data sheets, by a part of the device's name.
PEAK_FLOPS: dict[str, float] = {
    "V100": 125e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1300e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak 16-bit matrix FLOP/s of a device, or None where it is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)
