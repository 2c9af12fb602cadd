"""`longspan bench attention`: dilated attention against dense and plain dilated attention.

Times are medians of causal attention on random inputs; the spread is (slowest − fastest) / median.
FLOPs are the pattern's: 4·head_dim per pair and head, each pair as often as it is seen, and 3.5
times that with the backward pass. "extra" is the peak memory beyond inputs, output and gradients.
"graph" is the time of forward and backward replayed as a CUDA graph: the device time without the
launch overhead that dominates short lengths. Both are measured on CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longspan.attention import BlockSparse, Dense, Dilated, Mask, Pattern, attend, choose_backend
from longspan.benchmarks.chart import charts_svg
from longspan.benchmarks.measure import (
    Rows,
    captured,
    extra_mib,
    machine,
    open_console,
    times_of,
    unwritable,
    write_result,
)
from longspan.benchmarks.plain import plain_dilated
from longspan.checks import branch_problems
from longspan.errors import UserError
from longspan.progress import measuring

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
DENSE, DILATED, PLAIN = "dense", "dilated", "plain dilated"


@dataclass(frozen=True)
class Setting:
    """What is measured, and on which device."""

    device: str
    heads: int
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    lengths: tuple[int, ...]
    block_size: int
    max_seconds: float  # of one repetition; longer ones are skipped

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


GPU = Setting(
    device="cuda",
    heads=12,
    head_dim=64,
    segment_lengths=(2048, 4096, 8192, 16384, 32768),
    dilation_rates=(1, 2, 4, 8, 16),
    lengths=tuple(2**n for n in range(11, 21)),
    block_size=128,
    max_seconds=1.5,
)
CPU = Setting(
    device="cpu",
    heads=4,
    head_dim=32,
    segment_lengths=(256, 1024, 4096),
    dilation_rates=(1, 4, 16),
    lengths=tuple(2**n for n in range(11, 16)),
    block_size=128,
    max_seconds=10.0,
)


@dataclass(frozen=True)
class Row:
    """One attention at one length."""

    attention: str
    backend: str
    tokens: int
    forward_ms: float
    both_ms: float
    both_spread: float
    graph_ms: float | None
    tflops: float
    extra_mib: float | None


def bench_attention(setting: Setting, json_file: Path | None, plot: Path | None) -> None:
    """Measure, print the tables, and write the JSON and SVG files."""
    if problem := _problem(setting, [file for file in (json_file, plot) if file]):
        raise UserError(problem)
    console = open_console(json_file)
    where = machine(setting.device)
    console.print(
        f"{where}; {setting.heads} heads × {setting.head_dim}, {setting.dtype}, causal; segments "
        f"{setting.segment_lengths}, rates {setting.dilation_rates}"
    )
    table = Rows(console, COLUMNS)
    rows = _lengths(setting, table)
    console.print(_crossover(rows))
    blocks = _block_sparse(setting, rows, table)
    if blocks:
        console.print(_shares(blocks))
    result = {
        "machine": where,
        "setting": asdict(setting),
        "lengths": [asdict(row) for row in rows],
        "block_sparse": [asdict(row) for row in blocks],
    }
    write_result(json_file, result)
    if plot is not None:
        plot.write_text(_plot(rows, where))


def _problem(setting: Setting, files: Sequence[Path]) -> str | None:
    for name, values in (
        ("--heads", [setting.heads]),
        ("--head-dim", [setting.head_dim]),
        ("--lengths", setting.lengths),
    ):
        if min(values) < 1:
            return f"{name} must be at least 1, got {min(values)}"
    if problems := branch_problems(setting.segment_lengths, setting.dilation_rates):
        return problems[0]
    for w in setting.segment_lengths:
        broken = [n for n in setting.lengths if n % min(w, n)]
        if broken:
            return f"--lengths must be multiples of the segment length {w}, got {broken[0]}"
    for r in setting.dilation_rates:
        broken = [n for n in setting.lengths if n % r]
        if broken:
            return f"--lengths must be multiples of the dilation rate {r}, got {broken[0]}"
    return unwritable(files)


def _lengths(setting: Setting, table: Rows) -> list[Row]:
    dilated = Dilated(setting.segment_lengths, setting.dilation_rates)
    candidates: list[tuple[str, Pattern, Attention]] = [
        (DILATED, dilated, lambda q, k, v: attend(q, k, v, dilated)),
        (PLAIN, dilated, lambda q, k, v: plain_dilated(q, k, v, dilated)),
        (DENSE, Dense(), lambda q, k, v: attend(q, k, v, Dense())),
    ]
    rows = []
    for name, pattern, attention in candidates:
        last = 0.0
        for tokens in setting.lengths:
            growth = 4 if name == DENSE else 2
            if last * growth > 1e3 * setting.max_seconds:
                break
            row = _measure(name, pattern, attention, tokens, setting)
            if row is None:
                break
            rows.append(row)
            table.add(*_cells(row))
            last = row.both_ms
    return rows


def _block_sparse(setting: Setting, rows: Sequence[Row], table: Rows) -> list[Row]:
    """Dense, then all, half and a tenth of the blocks, at 32,768 tokens or dense's longest."""
    if setting.device == "cpu":
        return []
    tokens = min(32768, max(row.tokens for row in rows if row.attention == DENSE))
    candidates: list[tuple[str, Pattern]] = [(DENSE, Dense())]
    for density in (1.0, 0.5, 0.1):
        sparse = BlockSparse(setting.block_size, density=density)
        candidates.append((f"{density:.0%} of blocks", sparse))
    found = []
    for name, pattern in candidates:
        row = _measure(name, pattern, partial(attend, pattern=pattern), tokens, setting)
        if row is not None:
            found.append(row)
            table.add(*_cells(row))
    return found


def _measure(
    name: str, pattern: Pattern, attention: Attention, tokens: int, setting: Setting
) -> Row | None:
    """None if it runs out of memory."""
    with measuring(f"measuring: {name}, {tokens:,} tokens"):
        return _measured(name, pattern, attention, tokens, setting)


def _measured(
    name: str, pattern: Pattern, attention: Attention, tokens: int, setting: Setting
) -> Row | None:
    shape = (1, tokens, setting.heads, setting.head_dim)
    try:
        q, k, v, grad = (
            torch.randn(shape, device=setting.device, dtype=setting.dtype) for _ in range(4)
        )
        inputs = tuple(x.requires_grad_() for x in (q, k, v))

        def forward() -> None:
            with torch.no_grad():
                attention(*inputs)

        def both() -> None:
            torch.autograd.grad(attention(*inputs), inputs, grad)

        [(forward_ms, _)] = times_of([forward], setting.device)
        [(both_ms, spread)] = times_of([both], setting.device)
        extra, graph_ms = None, None
        if setting.device == "cuda":
            extra = extra_mib(both, must=4 * q.nbytes)  # the output and the gradients
            [(graph_ms, _)] = times_of([captured(both).replay], "cuda")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    flops = 3.5 * pattern.flops(tokens, setting.heads, setting.head_dim, is_causal=True)
    backend = "" if name == PLAIN else choose_backend(q, k, Mask(pattern)).name
    tflops = flops / both_ms / 1e9
    return Row(name, backend, tokens, forward_ms, both_ms, spread, graph_ms, tflops, extra)


COLUMNS = {
    "attention": -14, "backend": -9, "tokens": 9, "forward ms": 10, "fwd+bwd ms": 10, "spread": 7,
    "graph ms": 9, "µs/token": 9, "TFLOP/s": 8, "extra MiB": 9,
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.attention,
        row.backend,
        f"{row.tokens:,}",
        f"{row.forward_ms:.3f}",
        f"{row.both_ms:.3f}",
        f"{row.both_spread:.1%}",
        "–" if row.graph_ms is None else f"{row.graph_ms:.3f}",
        f"{1e3 * row.both_ms / row.tokens:.4f}",
        f"{row.tflops:.3g}",
        "–" if row.extra_mib is None else f"{row.extra_mib:,.0f}",
    )


def _crossover(rows: Sequence[Row]) -> str:
    times = {(row.attention, row.tokens): row.both_ms for row in rows}
    both = sorted(n for name, n in times if name == DENSE and (DILATED, n) in times)
    slower = [n for n in both if times[DENSE, n] > times[DILATED, n]]
    if not slower:
        return (
            f"dense attention is faster than dilated at every length measured, up to {both[-1]:,}"
        )
    ratio = times[DENSE, both[-1]] / times[DILATED, both[-1]]
    return (
        f"dense attention is slower than dilated from {slower[0]:,} tokens, "
        f"{ratio:.1f} times at {both[-1]:,}"
    )


def _shares(rows: Sequence[Row]) -> str:
    dense = rows[0].both_ms
    shares = ", ".join(f"{row.attention} {row.both_ms / dense:.0%}" for row in rows[1:])
    return f"relative to the dense time: {shares}"


def _plot(rows: Sequence[Row], where: str) -> str:
    def lines(value: Callable[[Row], float | None]) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            y = value(row)
            found.setdefault(row.attention, [])
            if y:
                found[row.attention].append((row.tokens, y))
        return found

    charts = {"forward + backward, ms": lines(lambda row: row.both_ms)}
    if any(row.extra_mib for row in rows):
        charts["extra memory, MiB"] = lines(lambda row: row.extra_mib)
    return charts_svg(charts, where)
