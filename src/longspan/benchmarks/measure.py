"""Helpers that the benchmarks share: time, memory, the machine's name, output as table and JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from longspan.errors import UserError
from longspan.tracking.nvml import Clocks, ClockSampler
from longspan.wording import counted

WARM_UP_S = 0.2
WARM_UP = 4
"""Steps before those that are timed: the fourth captures CUDA graphs at the latest."""
STDOUT = Path("-")


def times_of(functions: Sequence[Callable[[], None]], device: str) -> list[tuple[float, float]]:
    """Median milliseconds of each function, and the spread (slowest − fastest) / median.

    5 to 50 repetitions, in which the functions take turns, so that a temporary slowdown of the
    machine affects all of them. Each runs for WARM_UP_S first.
    """
    mean_s = statistics.mean(_warm_up(function, device) for function in functions)
    repetitions = min(50, max(5, int(0.5 / mean_s)))
    found = (_gpu_times if device == "cuda" else _cpu_times)(functions, repetitions)
    medians = [statistics.median(times) for times in found]
    return [(m, (max(times) - min(times)) / m) for m, times in zip(medians, found, strict=True)]


def _warm_up(function: Callable[[], None], device: str) -> float:
    """Run for WARM_UP_S; returns the approximate seconds per call."""
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
        for function, samples in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            samples.append(1e3 * (time.perf_counter() - start))
    return times


def _gpu_times(functions: Sequence[Callable[[], None]], repetitions: int) -> list[list[float]]:
    """Time between CUDA events; launches are queued as in training."""
    cache = torch.empty(64 << 20, dtype=torch.int32, device="cuda")  # larger than any L2
    events = [
        [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            for _ in range(repetitions)
        ]
        for _ in functions
    ]
    for turn in range(repetitions):
        for function, pairs in zip(functions, events, strict=True):
            before, after = pairs[turn]
            cache.zero_()  # evicts the inputs from the L2 cache
            before.record()
            function()
            after.record()
    torch.cuda.synchronize()
    return [[before.elapsed_time(after) for before, after in pairs] for pairs in events]


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture `function`, which must have run before, in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def extra_mib(function: Callable[[], None], must: int) -> float:
    """Peak CUDA memory of a call, beyond what was allocated before it and `must` bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return max(0, torch.cuda.max_memory_allocated() - before - must) / 2**20


def require_cuda(verb: str) -> None:
    if not torch.cuda.is_available():
        raise UserError(f"longspan bench {verb} needs a CUDA device, and there is none")


def open_console(json_file: Path | None) -> Console:
    """A console for the tables, silent if JSON goes to stdout; refuses an unwritable JSON file."""
    if problem := unwritable([json_file] if json_file else []):
        raise UserError(problem)
    return Console(highlight=False, soft_wrap=True, quiet=json_file == STDOUT)


class Rows:
    """A table that prints each row as it is measured.

    `columns` maps titles to widths; a negative width aligns to the left.
    """

    def __init__(self, console: Console, columns: Mapping[str, int]) -> None:
        self._console = console
        self._widths = [
            max(width, len(title)) if width > 0 else min(width, -len(title))
            for title, width in columns.items()
        ]
        console.print(self._line(columns), style="bold", markup=False)

    def add(self, *cells: str) -> None:
        self._console.print(self._line(cells), markup=False)

    def _line(self, cells: Iterable[str]) -> str:
        aligned = (
            cell.rjust(width) if width > 0 else cell.ljust(-width)
            for cell, width in zip(cells, self._widths, strict=False)
        )
        return "  ".join(aligned).rstrip()


def write_json(file: Path | None, where: str, setting: dict[str, Any], rows: Sequence[Any]) -> None:
    write_result(file, {"machine": where, "setting": setting, "rows": rows})


def write_result(file: Path | None, result: dict[str, Any]) -> None:
    """Write figures as JSON to a file, or to stdout if it is "-"."""
    text = json.dumps(result, indent=1) + "\n"
    if file == STDOUT:
        print(text, end="")
    elif file is not None:
        file.write_text(text)


def unwritable(files: Sequence[Path]) -> str | None:
    """Why a file cannot be written; checked before minutes of measuring, not after."""
    for file in files:
        try:
            if file == STDOUT:
                continue
            file.open("a").close()
        except OSError as error:
            return f"cannot write {file}: {error.strerror}"
    return None


def machine(device: str) -> str:
    """The device, the torch version and the commit."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    commit = f", commit {git.stdout.strip()}" if git.returncode == 0 else ""
    return f"{name}, torch {torch.__version__}{commit}"


class Steps(NamedTuple):
    """What was measured of training steps."""

    seconds: list[float]
    """Of each."""
    memory_bytes: int
    """The peak on the device, 0 on a CPU."""
    clocks: Clocks | None
    """Of the GPU meanwhile; None without NVML."""


class StepClock:
    """Times steps on a device without having the host wait for it, as training does not either.

    A context, in which a GPU's clock and power are sampled. The peak memory counts from the second
    step on, so that it includes the capture of CUDA graphs, whose memory is allocated only then.
    """

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._is_gpu, self._warm_up = device.type == "cuda", warm_up
        self._sampler = None
        if self._is_gpu:
            properties = torch.cuda.get_device_properties(device)
            self._sampler = ClockSampler(str(getattr(properties, "uuid", "")))
        self._ticks: list[Any] = []

    def __enter__(self) -> StepClock:
        self.tick()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def tick(self) -> None:
        """A step ends."""
        if self._is_gpu:
            if len(self._ticks) == min(1, self._warm_up):
                torch.cuda.reset_peak_memory_stats()
            self._ticks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._ticks[-1].record()
        else:
            self._ticks.append(time.perf_counter())

    def steps(self) -> Steps:
        """The steps after the warm-up."""
        if self._sampler is None:
            return Steps([b - a for a, b in pairwise(self._ticks[self._warm_up :])], 0, None)
        torch.cuda.synchronize()
        end = time.monotonic()
        self._sampler.stop()
        timed = self._ticks[self._warm_up :]
        seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(timed)]
        clocks = self._sampler.since(end - sum(seconds))
        return Steps(seconds, torch.cuda.max_memory_allocated(), clocks)
