"""What each rank measures of itself, gathered over all ranks: time, memory, and the slowest rank.

Ranks wait for each other in every step, so all of them take as long as the slowest: the time of a
step does not tell which one that is. What does is time that a rank spends on its own, without a
collective in it: waiting for data; the forward pass where each rank has the whole model (DDP); and,
in every layout, a small matrix product that is timed now and then, which a throttled or shared
device computes more slowly.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from longspan.device import memory_in_use, peak_memory
from longspan.parallel.collectives import all_gather_floats
from longspan.parallel.mesh import ParallelMesh
from longspan.tracking.nvml import SENSORS, GpuSensors

SLOW = 0.15
"""A rank is named if it alone makes steps longer by this share."""
PROBE_SHARE = 0.001
"""The share of time that timing a matrix product may take."""
MEMORY = (
    "memory_bytes",
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_parameters_bytes",
    "memory_optimizer_bytes",
)
"""Of these a line has the largest over ranks, of the others the mean."""
OWN_TIMES = {"data_wait_s": "data", "forward_time_s": "forward pass", "matmul_time_s": "device"}
"""Times that a rank spends on its own, and what it is slow in where they are long."""
NAMES = ("step_time_s", *OWN_TIMES, *MEMORY, *SENSORS)
"""What ranks exchange, in this order; NaN for what a rank does not have."""


class RankStats:
    """Collects what this rank measures between two lines of metrics."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._waited = self._forward = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._matmul, self._matmul_cost, self._probed = math.nan, 0.0, -math.inf
        self._sensors = GpuSensors(_uuid(device))

    def forward_context(
        self, make: Callable[[], AbstractContextManager[object]]
    ) -> Callable[[], AbstractContextManager[object]]:
        """The context of a forward pass, timed if there are no collectives in it."""
        if not self._mesh.is_ddp:
            return make

        @contextmanager
        def timed() -> Iterator[None]:
            if self._device.type == "cuda":
                begin, end = _event(), _event()
                begin.record()
                with make():
                    yield
                end.record()
                self._events.append((begin, end))
                return
            start = time.perf_counter()
            with make():
                yield
            self._forward += time.perf_counter() - start

        return timed

    def gather(
        self, steps: int, seconds: float, waited_s: float, held: Mapping[str, int]
    ) -> dict[str, Any]:
        """Fields of a line of metrics over `steps` steps, which took `seconds` on this rank.

        `waited_s`: how long it has waited for data since its start; `held`: bytes by class. Every
        rank calls this, with the device idle.
        """
        steps = max(1, steps)
        forward = self._forward + sum(a.elapsed_time(b) / 1000 for a, b in self._events)
        local = {
            "step_time_s": seconds / steps,
            "data_wait_s": (waited_s - self._waited) / steps,
            "memory_bytes": peak_memory(self._device),
            **memory_in_use(self._device),
            **held,
            **self._sensors.read(),
        }
        if self._mesh.is_ddp:
            local["forward_time_s"] = forward / steps
        if self._mesh.device_mesh is not None:
            self._probe()
            local["matmul_time_s"] = self._matmul
        gathered = all_gather_floats(self._mesh, *(local.get(name, math.nan) for name in NAMES))
        self._waited, self._forward, self._events = waited_s, 0.0, []
        return combine(gathered)

    def _probe(self) -> None:
        """Time a matrix product, if the last time is long enough ago."""
        if time.perf_counter() - self._probed < self._matmul_cost / PROBE_SHARE:
            return
        start = time.perf_counter()
        self._matmul = time_matmul(self._device)
        self._probed = time.perf_counter()
        self._matmul_cost = self._probed - start


def time_matmul(device: torch.device) -> float:
    """Seconds of a fixed matrix product, the least of three: well under a millisecond on a GPU."""
    is_cuda = device.type == "cuda"
    size, dtype = (2048, torch.bfloat16) if is_cuda else (128, torch.float32)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.ones(size, size, dtype=dtype, device=device)
        y = torch.empty_like(x)
        times = []
        for _ in range(4):  # the first one warms up
            if is_cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(4):
                torch.mm(x, x, out=y)
            if is_cuda:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    return min(times[1:])


def combine(ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Combine the values of all ranks, each in the order of NAMES, into fields of a line.

    With several ranks there are a minimum and a maximum, too, and the slowest rank if one of them
    makes steps much longer.
    """
    line: dict[str, Any] = {}
    columns = dict(zip(NAMES, zip(*ranks, strict=True), strict=True))
    for name, values in columns.items():
        known = [value for value in values if not math.isnan(value)]
        if not known:
            continue
        line[name] = int(max(known)) if name in MEMORY else statistics.fmean(known)
        if len(ranks) > 1:
            kind = int if name in MEMORY else float
            line |= {f"{name}_min": kind(min(known)), f"{name}_max": kind(max(known))}
    return line | _slowest(columns)


def _slowest(columns: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The rank that costs steps the most time, and in what; empty if all are about equal."""
    step_time = statistics.fmean(columns["step_time_s"])
    costs = []
    for name, cause in OWN_TIMES.items():
        values = columns[name]
        if len(values) < 2 or any(map(math.isnan, values)):
            continue
        usual, longest = statistics.median_low(values), max(values)
        # A device that takes twice as long for a matrix product doubles the step.
        scale = step_time / usual if name == "matmul_time_s" and usual else 1.0
        costs.append(((longest - usual) * scale, values.index(longest), cause))
    if not costs or max(costs)[0] < SLOW * step_time:
        return {}
    _, rank, cause = max(costs)
    return {"slowest_rank": rank, "slowest_in": cause}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _uuid(device: torch.device) -> str | None:
    """The UUID of a GPU, which NVML knows it by whatever CUDA_VISIBLE_DEVICES says."""
    if device.type != "cuda":
        return None
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None
