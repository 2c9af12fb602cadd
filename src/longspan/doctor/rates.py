"""Measured rates of a device: matrix products and copies, each a function of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REPEATS = 5
"""Measurements of which the best counts: anything else that runs makes one slower, never faster."""


def matmul_rate(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """FLOP/s of a square matrix product: by default 16-bit on GPUs, float32 on CPUs."""
    on_gpu = device.type == "cuda"
    if dtype is None and not on_gpu:
        dtype = torch.float32
    elif dtype is None:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if has_bf16 else torch.float16
    n, times = (8192, 10) if on_gpu else (768, 1)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return 2 * n**3 * times / best_time(multiply, device)


def copy_rate(device: torch.device) -> float:
    """Bytes/s that a copy within the device's memory reads and writes."""
    size = 1 << (30 if device.type == "cuda" else 25)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_time(lambda: target.copy_(source), device)


def best_time(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    function()
    best = float("inf")
    for _ in range(REPEATS):
        wait()
        started = time.perf_counter()
        function()
        wait()
        best = min(best, time.perf_counter() - started)
    return best
