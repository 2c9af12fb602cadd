"""`longspan bench linear`: compare nn.Linear, LowRankLinear and SKLinear.

Square layers without bias; parameters and inputs have one dtype, and inputs are random. A fraction
is that of nn.Linear's parameters; a sketched layer has one term. "fwd+bwd" computes the gradients
of the input and of the parameters. Times are medians over repetitions in which the layers of a size
take turns. A ratio is a layer's time over nn.Linear's: lower is faster. On CUDA the passes are
captured in CUDA graphs, so host overhead does not count. FLOPs are those of the layer itself, so
TFLOP/s show how well it uses the machine. "spread" is (slowest − fastest) / median of fwd+bwd;
"extra" is the peak memory beyond inputs, parameters, output and gradients, on CUDA only.

Before it is timed, a layer's output is compared with a float64 product: its error may be at most
twice that of nn.Linear with the same weight and dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.benchmarks.measure import (
    Rows,
    captured,
    extra_mib,
    machine,
    open_console,
    times_of,
    write_json,
)
from longspan.costs import Cost, rank_for
from longspan.errors import UserError
from longspan.progress import measuring
from longspan.sketching import LowRankLinear, SKLinear
from longspan.torch_internals import raise_recompile_limit

DENSE = "nn.Linear"
CHECKED_ROWS = 256
MAX_GRAPHS = 1024  # torch.compile makes two graphs of one function per layer and size


@dataclass(frozen=True)
class Setting:
    """Sizes and device of a benchmark."""

    device: str
    sizes: tuple[int, ...]
    tokens: int
    compiled: bool  # also SKLinear under torch.compile
    fractions: tuple[float, ...] = (0.5, 0.25, 0.125)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


GPU = Setting(device="cuda", sizes=(1024, 2048, 4096, 8192), tokens=8192, compiled=True)
CPU = Setting(device="cpu", sizes=(256, 512, 1024, 2048), tokens=512, compiled=False)


@dataclass(frozen=True)
class Row:
    """One layer of one size."""

    size: int
    layer: str
    rank: int | None
    parameter_ratio: float
    flops_ratio: float
    forward_ms: float
    forward_ratio: float
    both_ms: float
    both_ratio: float
    both_spread: float
    tflops: float
    extra_mib: float | None


@dataclass(frozen=True)
class Candidate:
    """A layer, and how to call it: eager or compiled."""

    name: str
    rank: int | None
    cost: Cost
    layer: nn.Module
    call: Callable[[Tensor], Tensor]

    @property
    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.layer.parameters())


def bench_linear(setting: Setting, json_file: Path | None) -> None:
    """Measure, print a table and write JSON."""
    if problem := _problem(setting):
        raise UserError(problem)
    console = open_console(json_file)
    where = machine(setting.device)
    console.print(
        f"{where}; {setting.tokens:,} tokens, parameters and inputs in {setting.dtype}, no bias; "
        "ratios are to the time of nn.Linear, lower is faster"
    )
    rows: list[Row] = []
    table = Rows(console, COLUMNS)
    for size in setting.sizes:
        try:
            with measuring(f"measuring: {size:,} × {size:,}"):
                found = _measure(size, setting)
            rows += found
            for row in found:
                table.add(*_cells(row))
        except torch.OutOfMemoryError:
            console.print(f"out of memory at size {size:,}: it and larger sizes are skipped")
            break
    described = asdict(setting) | {"dtype": str(setting.dtype)}
    write_json(json_file, where, described, [asdict(row) for row in rows])


def _problem(setting: Setting) -> str | None:
    for name, smallest in (("--sizes", min(setting.sizes)), ("--tokens", setting.tokens)):
        if smallest < 1:
            return f"{name} must be at least 1, got {smallest}"
    for fraction in setting.fractions:
        if not 0 < fraction <= 1:
            return f"--fractions must be above 0 and at most 1, got {fraction}"
        if rank_for(size := min(setting.sizes), size, fraction) < 1:
            return f"--fractions {fraction} gives rank 0 for a layer of {size} × {size}"
    return None


def _candidates(size: int, setting: Setting) -> list[Candidate]:
    factory_kwargs: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    dense = nn.Linear(size, size, bias=False, **factory_kwargs)
    found = [Candidate(DENSE, None, Cost.dense(size, size), dense, dense)]
    for fraction in setting.fractions:
        rank = rank_for(size, size, fraction)
        low_rank = LowRankLinear(size, size, rank, bias=False, **factory_kwargs)
        found.append(Candidate("LowRankLinear", rank, low_rank.cost, low_rank, low_rank))
        sketched = SKLinear(size, size, 1, rank, bias=False, **factory_kwargs)
        found.append(Candidate("SKLinear", rank, sketched.cost, sketched, sketched))
        if setting.compiled:
            compiled = torch.compile(sketched, fullgraph=True, dynamic=False)
            found.append(Candidate("SKLinear compiled", rank, sketched.cost, sketched, compiled))
    return found


def _measure(size: int, setting: Setting) -> list[Row]:
    torch.compiler.reset()
    candidates, shape = _candidates(size, setting), (setting.tokens, size)
    x, grad = (torch.randn(shape, device=setting.device, dtype=setting.dtype) for _ in range(2))
    x.requires_grad_()
    extras: list[float | None] = [None] * len(candidates)
    raise_recompile_limit(MAX_GRAPHS)
    for each in candidates:
        _check(each, x)
    passes = [_passes(each, x, grad) for each in candidates]
    if setting.device == "cuda":
        for _, both in passes:
            both()  # warm up before the peak is measured: it compiles and allocates workspaces
        musts = [2 * x.nbytes + each.parameter_bytes for each in candidates]
        extras = [extra_mib(both, must) for (_, both), must in zip(passes, musts, strict=True)]
        passes = [(captured(forward).replay, captured(both).replay) for forward, both in passes]
    forwards, boths = (times_of(each, setting.device) for each in zip(*passes, strict=True))
    rows, dense = [], candidates[0].cost
    for each, (forward_ms, _), (both_ms, spread), extra in zip(
        candidates, forwards, boths, extras, strict=True
    ):
        flops = each.cost.forward + each.cost.backward
        row = Row(
            size=size,
            layer=each.name,
            rank=each.rank,
            parameter_ratio=each.cost.stored / dense.stored,
            flops_ratio=flops / (dense.forward + dense.backward),
            forward_ms=forward_ms,
            forward_ratio=forward_ms / forwards[0][0],
            both_ms=both_ms,
            both_ratio=both_ms / boths[0][0],
            both_spread=spread,
            tflops=setting.tokens * flops / both_ms / 1e9,
            extra_mib=extra,
        )
        rows.append(row)
    return rows


def _passes(each: Candidate, x: Tensor, grad: Tensor) -> tuple[Callable[[], None], ...]:
    """The forward pass, and the forward and backward pass."""
    inputs = x, *each.layer.parameters()

    def forward() -> None:
        with torch.no_grad():
            each.call(x)

    def both() -> None:
        torch.autograd.grad(each.call(x), inputs, grad)

    return forward, both


@torch.no_grad()
def _check(each: Candidate, x: Tensor) -> None:
    rows = x[:CHECKED_ROWS]
    weight: Tensor = copy.deepcopy(each.layer).double().weight  # type: ignore[assignment]
    exact = rows.double() @ weight.T
    outputs = each.call(x)[:CHECKED_ROWS], nn.functional.linear(rows, weight.to(x.dtype))
    error, baseline = (float((y - exact).norm() / exact.norm()) for y in outputs)
    # The eps allows for a baseline that is exact by chance.
    limit = 2 * baseline + 4 * torch.finfo(x.dtype).eps
    assert error <= limit, f"{each.name} of {len(weight)}: {error:.1e}, nn.Linear {baseline:.1e}"


COLUMNS = {
    "size": 6, "layer": -17, "rank": 5, "parameters": 7, "FLOPs": 7, "forward ms": 9,
    "fwd ratio": 5, "fwd+bwd ms": 9, "ratio": 5, "spread": 6, "TFLOP/s": 7, "extra MiB": 9,
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.size:,}" if row.layer == DENSE else "",
        row.layer,
        "–" if row.rank is None else f"{row.rank:,}",
        f"{row.parameter_ratio:.1%}",
        f"{row.flops_ratio:.1%}",
        f"{row.forward_ms:.3f}",
        f"{row.forward_ratio:.2f}",
        f"{row.both_ms:.3f}",
        f"{row.both_ratio:.2f}",
        f"{row.both_spread:.0%}",
        f"{row.tflops:.3g}",
        "–" if row.extra_mib is None else f"{row.extra_mib:,.0f}",
    )
