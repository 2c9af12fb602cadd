"""`longspan bench collectives`: latency and bus bandwidth of collectives between these ranks.

Sizes, algorithm bandwidth (size / time) and bus bandwidth (algorithm bandwidth × a factor of the
collective and the number of ranks) are those of NVIDIA's nccl-tests. A time is the median over
BLOCKS blocks of calls that follow each other without a pause; a block takes as long as on its
slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.benchmarks.chart import charts_svg
from longspan.benchmarks.measure import Rows, machine, open_console, unwritable, write_result
from longspan.config import Layout
from longspan.errors import UserError
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning.network import (
    BUS_FACTORS,
    GB,
    CollectiveFit,
    fit_collective,
    ring_bound_s,
)

FIRST, STEP = 1024, 4
"""The smallest size in bytes, and the ratio of one size to the one before."""
MAX_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
BLOCKS = 5
BLOCK_S = 0.02
"""How long a block of calls lasts, about."""
MAX_CALLS = 100
"""Of a block."""
ELEMENT = torch.float32
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One collective of one size. `ring_bound_ms`: of all_reduce only, with the highest bandwidth
    of send_recv that was measured.
    """

    collective: str
    ranks: int
    bytes: int
    time_ms: float
    algbw_gb_s: float
    busbw_gb_s: float
    ring_bound_ms: float | None = None


@dataclass(frozen=True)
class Unsupported:
    """A collective that the backend does not have."""

    collective: str
    reason: str


def bench_collectives(
    world: World,
    device: torch.device,
    max_bytes: int | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure on all ranks; rank 0 prints the tables and writes the files."""
    if world.size < 2:
        raise UserError("bench collectives needs at least 2 processes: give --nproc 2 or more")
    sizes = sizes_up_to(MAX_BYTES[device.type] if max_bytes is None else max_bytes)
    if problem := unwritable([plot_file] if world.is_main and plot_file else []):
        raise UserError(problem)
    console = open_console(json_file if world.is_main else Path("-"))
    where = machine(device.type)
    rows, missing, fits = list[Row](), list[Unsupported](), list[CollectiveFit]()
    with open_mesh(Layout(), world, device, TIMEOUT_S):
        backend = "nccl" if device.type == "cuda" else "gloo"
        console.print(f"{where}; {world.size} ranks, {backend}, float32; up to {sizes[-1]:,} bytes")
        if max_bytes is None and device.type == "cpu":
            console.print("sizes end early on CPUs: --max-bytes 1G measures up to 1 GiB")
        table = Rows(console, COLUMNS)
        for found in measure_all(sizes, device):
            if isinstance(found, Unsupported):
                missing.append(found)
                table.add(found.collective, f"{backend} does not have it: {found.reason}")
                continue
            rows.append(found)
            table.add(*_cells(found))
    if not world.is_main:
        return
    for name in BUS_FACTORS:
        own = [row for row in rows if row.collective == name]
        fit = fit_collective(
            name, world.size, [row.bytes for row in own], [row.time_ms / 1e3 for row in own]
        )
        if fit is not None:
            fits.append(fit)
    console.print("\nfit: time = alpha + bus bytes / bandwidth")
    table = Rows(console, {"collective": -14, "alpha us": 10, "GB/s": 9, "median error": 8})
    for fit in fits:
        table.add(
            fit.collective,
            f"{fit.alpha_s * 1e6:,.1f}",
            f"{fit.bandwidth / GB:.3f}",
            f"{fit.error:.0%}",
        )
    setting = {"ranks": world.size, "backend": backend, "dtype": "float32", "max_bytes": sizes[-1]}
    result: dict[str, Any] = {"machine": where, "setting": setting}
    result |= {"rows": [asdict(row) for row in rows], "fits": [fit.as_dict() for fit in fits]}
    result["unsupported"] = [asdict(each) for each in missing]
    write_result(json_file, result)
    if plot_file is not None:
        plot_file.write_text(draw(rows, f"{where}; {world.size} ranks, {backend}"))


def sizes_up_to(most: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB, … in bytes, and `most` itself."""
    if most < FIRST:
        raise UserError(f"--max-bytes must be at least {FIRST}, got {most}")
    sizes = [FIRST]
    while sizes[-1] * STEP <= most:
        sizes.append(sizes[-1] * STEP)
    return sizes if sizes[-1] == most else [*sizes, most]


def measure_all(sizes: Sequence[int], device: torch.device) -> Iterator[Row | Unsupported]:
    """Every collective at every size; send_recv first, whose bandwidth bounds the all-reduce."""
    ranks, bandwidth = dist.get_world_size(), 0.0
    for name in BUS_FACTORS:
        for size in sizes:
            elements = max(1, size // ELEMENT.itemsize // ranks) * ranks
            call = call_of(name, elements, device)
            try:
                call()
            except RuntimeError as error:
                if "support" not in str(error) and "implement" not in str(error):
                    raise
                yield Unsupported(name, str(error).splitlines()[0])
                break
            seconds, actual = seconds_per_call(call, device), elements * ELEMENT.itemsize
            rate = actual / seconds
            bus = BUS_FACTORS[name](ranks) * rate
            bandwidth = max(bandwidth, bus) if name == "send_recv" else bandwidth
            bound = None
            if name == "all_reduce" and bandwidth:
                bound = 1e3 * ring_bound_s(actual, ranks, bandwidth)
            yield Row(name, ranks, actual, 1e3 * seconds, rate / GB, bus / GB, bound)


def call_of(name: str, elements: int, device: torch.device) -> Callable[[], Tensor]:
    """One collective on new tensors; `elements`: a multiple of the ranks, of the larger tensor.

    The function returns its result: rank r sends r + 1, and of an all-to-all r + 1 + 100 × the
    receiver.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    large = torch.full((elements,), rank + 1.0, dtype=ELEMENT, device=device)
    small = torch.full((elements // ranks,), rank + 1.0, dtype=ELEMENT, device=device)

    def send_recv() -> Tensor:
        """Around the ring: each rank sends to the next while it receives from the one before."""
        operations = [
            dist.P2POp(dist.isend, large, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def broadcast() -> Tensor:
        dist.broadcast(large, src=0)
        return large

    def all_gather() -> Tensor:
        _all_gather(large, small)
        return large

    def reduce_scatter() -> Tensor:
        _reduce_scatter(small, large)
        return small

    def all_to_all() -> Tensor:
        dist.all_to_all_single(received, large)
        return received

    def all_reduce() -> Tensor:
        dist.all_reduce(large)
        return large

    if name in ("send_recv", "all_to_all"):
        received = torch.empty_like(large)
    if name == "all_to_all":
        large += 100 * torch.arange(ranks, device=device).repeat_interleave(elements // ranks)
    calls = (send_recv, broadcast, all_gather, reduce_scatter, all_to_all, all_reduce)
    return {call.__name__: call for call in calls}[name]


# Torch 2.13 has other names for these two, and warns at every call of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def seconds_per_call(call: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds per call, after one that has warmed up: the median over blocks."""
    first = _block(call, 2, device) / 2
    calls = min(MAX_CALLS, max(1, int(BLOCK_S / max(first, 1e-9))))  # the same on all ranks
    return statistics.median(_block(call, calls, device) for _ in range(BLOCKS)) / calls


def _block(call: Callable[[], Tensor], calls: int, device: torch.device) -> float:
    """Seconds of several calls on the slowest rank, the same value on every rank."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)  # over the CPU, by Gloo
    return float(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


COLUMNS = {
    "collective": -14, "bytes": 13, "time ms": 11, "algbw GB/s": 10, "busbw GB/s": 10,
    "ring bound ms": 11,
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    bound = "" if row.ring_bound_ms is None else f"{row.ring_bound_ms:.4f}"
    rates = f"{row.algbw_gb_s:.3g}", f"{row.busbw_gb_s:.3g}"
    return row.collective, f"{row.bytes:,}", f"{row.time_ms:.4f}", *rates, bound


def draw(rows: Sequence[Row], caption: str) -> str:
    """Time and bus bandwidth over the size, as SVG."""
    times: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        times.setdefault(row.collective, []).append((row.bytes, row.time_ms))
        rates.setdefault(row.collective, []).append((row.bytes, row.busbw_gb_s))
        if row.ring_bound_ms is not None:
            times.setdefault("ring bound", []).append((row.bytes, row.ring_bound_ms))
    charts = {"Time, ms": times, "Bus bandwidth, GB/s": rates}
    return charts_svg(charts, caption, axis="bytes")
