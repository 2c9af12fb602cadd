"""How the benches time functions and weigh their memory, and how they name the machine."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

WARM_UP_S = 0.2


def times_of(functions: Sequence[Callable[[], None]], device: str) -> list[tuple[float, float]]:
    """Of each, median milliseconds and (slowest − fastest) / median, of 5 to 50 repetitions.

    They take turns, so that what slows the machine down for a while hits all alike. Clocks, caches
    and threads are warm: each has run for WARM_UP_S before.
    """
    mean_s = statistics.mean(_warmed(function, device) for function in functions)
    repetitions = min(50, max(5, int(0.5 / mean_s)))
    found = (_gpu_times if device == "cuda" else _cpu_times)(functions, repetitions)
    medians = [statistics.median(times) for times in found]
    return [(m, (max(times) - min(times)) / m) for m, times in zip(medians, found, strict=True)]


def _warmed(function: Callable[[], None], device: str) -> float:
    """Seconds of a call, roughly."""
    function()
    begin, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begin < WARM_UP_S:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - begin) / calls


def _cpu_times(functions: Sequence[Callable[[], None]], repetitions: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(1e3 * (time.perf_counter() - start))
    return times


def _gpu_times(functions: Sequence[Callable[[], None]], repetitions: int) -> list[list[float]]:
    """Queued one after another, as in training, between events on the device."""
    cache = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # larger than any L2
    events = [
        [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            for _ in range(repetitions)
        ]
        for _ in functions
    ]
    for turn in range(repetitions):
        for function, own in zip(functions, events, strict=True):
            before, after = own[turn]
            cache.zero_()  # no input is left in the cache by the last repetition
            before.record()
            function()
            after.record()
    torch.cuda.synchronize()
    return [[before.elapsed_time(after) for before, after in own] for own in events]


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What `function` does on the device, to be replayed without the host; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def extra_mib(function: Callable[[], None], must: int) -> float:
    """The peak of the device's memory during a call, beyond what was there and `must` bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return max(0, torch.cuda.max_memory_allocated() - before - must) / 2**20


def unwritable(files: Sequence[Path]) -> str | None:
    """What is wrong with the files to write: told at once, not after minutes of measuring."""
    for file in files:
        try:
            file.open("a").close()
        except OSError as error:
            return f"cannot write {file}: {error.strerror}"
    return None


def machine(device: str) -> str:
    """The device, the version of torch and the commit."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"CPU, {torch.get_num_threads()} threads"
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    commit = f", commit {git.stdout.strip()}" if git.returncode == 0 else ""
    return f"{name}, torch {torch.__version__}{commit}"
