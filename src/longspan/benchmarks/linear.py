"""`longspan bench linear`: nn.Linear, LowRankLinear and SKLinear against each other.

Square layers without bias, their parameters and inputs of one type, on random inputs. A share is
that of nn.Linear's numbers which a layer stores; a sketched layer has one term. "fwd+bwd" has the
gradients of the input and of what is trained. Times are medians over repetitions, in which the
layers of a size take turns; a ratio is a layer's time over that of nn.Linear, and lower is faster.
On CUDA they are of CUDA graphs: what the device needs when the host does not hold it up. FLOPs are
those of a layer itself, so TFLOP/s say how well it uses the machine. "spread" is slowest less
fastest, over the median, of fwd+bwd; "extra" the peak of memory beyond the inputs, the parameters,
the output and the gradients, on CUDA alone.

Before it is timed, a layer's output is held against a float64 product: it may be at most twice as
far off as nn.Linear's of the same weight and type.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from longspan.benchmarks.measure import captured, extra_mib, machine, times_of, unwritable
from longspan.costs import Cost, rank_for
from longspan.errors import UserError
from longspan.sketching import LowRankLinear, SKLinear
from longspan.torch_internals import recompile_limit

DENSE = "nn.Linear"
CHECKED_ROWS = 256
MOST_GRAPHS = 1024  # that torch.compile may make of one function: two for each layer of a size


@dataclass(frozen=True)
class Setting:
    """What is measured, on what."""

    device: str
    sizes: tuple[int, ...]
    tokens: int
    compiled: bool  # SKLinear under torch.compile too
    shares: tuple[float, ...] = (0.5, 0.25, 0.125)

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
    stored_share: float
    flops_share: float
    forward_ms: float
    forward_ratio: float
    both_ms: float
    both_ratio: float
    both_spread: float
    tflops: float
    extra_mib: float | None


@dataclass(frozen=True)
class Contender:
    """A layer, and how it is called: as it is or compiled."""

    name: str
    rank: int | None
    cost: Cost
    layer: nn.Module
    call: Callable[[Tensor], Tensor]

    @property
    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.layer.parameters())


def bench_linear(setting: Setting, json_file: Path | None) -> None:
    """Measure, print the table, and write what is asked for."""
    if problem := _problem(setting) or unwritable([json_file] if json_file else []):
        raise UserError(problem)
    console = Console() if Console().is_terminal else Console(width=120)
    where = machine(setting.device)
    console.print(
        f"{where}; {setting.tokens:,} tokens, parameters and inputs in {setting.dtype}, no bias; "
        "a ratio is to the time of nn.Linear, lower is faster",
        soft_wrap=True,
    )
    rows: list[Row] = []
    for size in setting.sizes:
        try:
            rows += _measure(size, setting)
        except torch.OutOfMemoryError:
            console.print(f"{size:,} and what is larger is left out: the memory does not reach")
            break
    console.print(_table(rows))
    if json_file is not None:
        result = {
            "machine": where,
            "setting": asdict(setting) | {"dtype": str(setting.dtype)},
            "rows": [asdict(row) for row in rows],
        }
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _problem(setting: Setting) -> str | None:
    for name, smallest in (("--sizes", min(setting.sizes)), ("--tokens", setting.tokens)):
        if smallest < 1:
            return f"{name} must be at least 1, got {smallest}"
    for share in setting.shares:
        if not 0 < share <= 1:
            return f"--shares must be above 0 and at most 1, got {share}"
        if rank_for(size := min(setting.sizes), size, share) < 1:
            return f"a share of {share} leaves no rank to a layer of {size} × {size}"
    return None


def _contenders(size: int, setting: Setting) -> list[Contender]:
    place: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    dense = nn.Linear(size, size, bias=False, **place)
    found = [Contender(DENSE, None, Cost.dense(size, size), dense, dense)]
    for share in setting.shares:
        rank = rank_for(size, size, share)
        low_rank = LowRankLinear(size, size, rank, bias=False, **place)
        found.append(Contender("LowRankLinear", rank, low_rank.cost, low_rank, low_rank))
        sketched = SKLinear(size, size, 1, rank, bias=False, **place)
        found.append(Contender("SKLinear", rank, sketched.cost, sketched, sketched))
        if setting.compiled:
            compiled = torch.compile(sketched, fullgraph=True, dynamic=False)
            found.append(Contender("SKLinear compiled", rank, sketched.cost, sketched, compiled))
    return found


def _measure(size: int, setting: Setting) -> list[Row]:
    torch.compiler.reset()
    contenders, shape = _contenders(size, setting), (setting.tokens, size)
    x, grad = (torch.randn(shape, device=setting.device, dtype=setting.dtype) for _ in range(2))
    x.requires_grad_()
    extras: list[float | None] = [None] * len(contenders)
    with recompile_limit(MOST_GRAPHS):
        for each in contenders:
            _check(each, x)
        passes = [_passes(each, x, grad) for each in contenders]
        if setting.device == "cuda":
            for _, both in passes:
                both()  # once before a peak is looked at: it compiles, and takes workspaces
            musts = [2 * x.nbytes + each.parameter_bytes for each in contenders]
            extras = [extra_mib(both, must) for (_, both), must in zip(passes, musts, strict=True)]
            passes = [(captured(forward).replay, captured(both).replay) for forward, both in passes]
        forwards, boths = (times_of(each, setting.device) for each in zip(*passes, strict=True))
    rows, whole = [], contenders[0].cost
    for each, (forward_ms, _), (both_ms, spread), extra in zip(
        contenders, forwards, boths, extras, strict=True
    ):
        flops = each.cost.forward + each.cost.backward
        row = Row(
            size=size,
            layer=each.name,
            rank=each.rank,
            stored_share=each.cost.stored / whole.stored,
            flops_share=flops / (whole.forward + whole.backward),
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


def _passes(each: Contender, x: Tensor, grad: Tensor) -> tuple[Callable[[], None], ...]:
    """Forward alone, and forward and backward."""
    wanted = x, *each.layer.parameters()

    def forward() -> None:
        with torch.no_grad():
            each.call(x)

    def both() -> None:
        torch.autograd.grad(each.call(x), wanted, grad)

    return forward, both


@torch.no_grad()
def _check(each: Contender, x: Tensor) -> None:
    rows = x[:CHECKED_ROWS]
    weight: Tensor = copy.deepcopy(each.layer).double().weight  # type: ignore[assignment]
    exact = rows.double() @ weight.T
    outputs = each.call(x)[:CHECKED_ROWS], nn.functional.linear(rows, weight.to(x.dtype))
    error, its = (float((y - exact).norm() / exact.norm()) for y in outputs)
    most = 2 * its + 4 * torch.finfo(x.dtype).eps  # a few numbers may be right by chance
    assert error <= most, f"{each.name} of {len(weight)}: {error:.1e}, nn.Linear {its:.1e}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("size", justify="right")
    table.add_column("layer")
    for column in (
        "rank", "stored", "FLOPs", "forward ms", "ratio", "fwd+bwd ms", "ratio", "spread",
        "TFLOP/s", "extra MiB",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.size:,}" if row.layer == DENSE else "",
            row.layer,
            "–" if row.rank is None else f"{row.rank:,}",
            f"{row.stored_share:.1%}",
            f"{row.flops_share:.1%}",
            f"{row.forward_ms:.3f}",
            f"{row.forward_ratio:.2f}",
            f"{row.both_ms:.3f}",
            f"{row.both_ratio:.2f}",
            f"{row.both_spread:.0%}",
            f"{row.tflops:.3g}",
            "–" if row.extra_mib is None else f"{row.extra_mib:,.0f}",
        )
    return table
