"""Convert trained nn.Linear layers to the factored layers of `longspan.sketching`, and back.

`sketch(model)` replaces layers in place and returns a `Report`. `to_dense(model)` replaces them by
nn.Linear again; it does not restore the original weights. Methods for a weight W (in, out):

- "svd": truncated SVD, the product A B of that rank nearest to W (LowRankLinear).
- "least_squares": the S1, S2 nearest to W, given the fixed signs of an SKLinear.
- "sketch": S1 = W U1ᵀ, S2 = U2ᵀ W, an unbiased estimate of W with a large error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from longspan.costs import Cost, rank_for
from longspan.nn.mode import eval_mode
from longspan.sketching.fitting import fit_low_rank, fit_sketched, random_sketch
from longspan.sketching.layers import FactoredLinear, LowRankLinear, SKLinear, seed_of
from longspan.torch_internals import has_forward_hooks
from longspan.wording import counted

Method = Literal["svd", "least_squares", "sketch"]


@dataclass(frozen=True)
class Row:
    """One layer; costs exclude the bias."""

    name: str
    kind: str
    """'dense', 'low rank 32' or '2 terms of rank 16'."""
    before: Cost
    """Cost of the nn.Linear of the same size."""
    after: Cost
    weight_error: float | None
    """‖W − Ŵ‖ / ‖W‖."""
    activation_error: float | None
    """‖X (W − Ŵ)‖ / ‖X W‖ on the calibration inputs."""
    note: str
    """Why the layer was left dense, or what costs more than in nn.Linear."""


@dataclass(frozen=True)
class Report:
    """Parameters, FLOPs and errors per layer. `str()` gives a table."""

    rows: tuple[Row, ...]

    @property
    def before(self) -> Cost:
        return sum((row.before for row in self.rows), start=Cost(0, 0, 0))

    @property
    def after(self) -> Cost:
        return sum((row.after for row in self.rows), start=Cost(0, 0, 0))

    def as_dict(self) -> dict[str, Any]:
        totals = {"before": asdict(self.before), "after": asdict(self.after)}
        return {"rows": [asdict(row) for row in self.rows], "totals": totals}

    def __str__(self) -> str:
        costs = ["parameters", "ratio", "FLOPs per token", "ratio"]
        lines = [["layer", "kind", *costs, "weight error", "activation error", "note"]]
        for row in self.rows:
            errors = (row.weight_error, row.activation_error)
            texts = ["-" if error is None else f"{error:.4f}" for error in errors]
            lines.append([row.name, row.kind, *_change(row.before, row.after), *texts, row.note])
        count = counted(len(self.rows), "layer")
        lines.append(["total", count, *_change(self.before, self.after), "", "", ""])
        for column in range(8):
            width = max(len(line[column]) for line in lines)
            for line in lines:
                cell = line[column]
                line[column] = cell.ljust(width) if column < 2 else cell.rjust(width)
        return "\n".join("  ".join(line).rstrip() for line in lines)


def _change(before: Cost, after: Cost) -> list[str]:
    pairs = (before.stored, after.stored), (before.forward, after.forward)
    return [text for a, b in pairs for text in (f"{a:,} -> {b:,}", f"{b / a:.1%}" if a else "-")]


def report(model: nn.Module) -> Report:
    """Report on each nn.Linear, LowRankLinear and SKLinear of `model`."""
    types = nn.Linear, FactoredLinear
    return Report(tuple(_row(n, m) for n, m in model.named_modules() if isinstance(m, types)))


def _row(
    name: str,
    layer: nn.Linear | FactoredLinear,
    weight_error: float | None = None,
    activation_error: float | None = None,
    note: str = "",
) -> Row:
    kind, dense = "dense", Cost.dense(layer.in_features, layer.out_features)
    cost = layer.cost if isinstance(layer, FactoredLinear) else dense
    if isinstance(layer, LowRankLinear):
        kind = f"low rank {layer.rank}"
    elif isinstance(layer, SKLinear):
        kind = f"{layer.num_terms} term{'s'[: layer.num_terms > 1]} of rank {layer.low_rank}"
    if not note and cost.excess_over(dense):
        what = "parameters" if cost.stored > dense.stored else "FLOPs"
        note = f"more {what} than nn.Linear"
    return Row(name, kind, dense, cost, weight_error, activation_error, note)


@torch.no_grad()
def sketch(
    model: nn.Module,
    keep: float = 0.5,
    method: Method = "svd",
    layers: str | Sequence[str] = "*",
    *,
    num_terms: int = 1,
    rank: int | Mapping[str, int] | None = None,
    seed: int = 0,
    calibration: Iterable[Tensor | tuple[Any, ...]] | None = None,
) -> Report:
    """Replace the nn.Linear layers whose names match a glob of `layers`, in place.

    `keep` is the fraction of the dense layer's parameters that a layer may have. `rank` overrides
    it: one rank for all layers, or a mapping from globs to ranks whose first match counts. For an
    SKLinear it is the rank of all terms together. A layer stays dense, and its row says why, if it
    would not become smaller, if it shares its weight with another module, or if `calibration` never
    runs it. The bias (the same Parameter), device, dtype, requires_grad and training mode stay.
    Create a new optimizer afterwards.

    `calibration`: batches to run the model on in eval mode; a tuple is passed as arguments. The fit
    then minimises the error of each layer's output, and needs a float64 (in, in) matrix per layer.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"expected 0 < keep <= 1, got {keep}")
    if method not in get_args(Method):
        raise ValueError(f"expected method to be one of {get_args(Method)}, got {method!r}")
    if num_terms < 1 or (method == "svd" and num_terms > 1):
        raise ValueError(f"expected num_terms >= 1, and 1 with method='svd', got {num_terms}")
    linears = {n: m for n, m in model.named_modules() if n and isinstance(m, nn.Linear)}
    globs = [layers] if isinstance(layers, str) else list(layers)
    ranks = {"*": rank} if isinstance(rank, int) else dict(rank or {})
    if min(ranks.values(), default=0) < 0:
        raise ValueError(f"expected ranks >= 0, got {rank}")
    for glob in [*globs, *ranks]:
        if not any(fnmatchcase(name, glob) for name in linears):
            found = ", ".join(list(linears)[:8]) or "none"
            raise ValueError(
                f"expected a glob that matches an nn.Linear in the model, got {glob!r}; "
                f"the first of {len(linears)} are: {found}"
            )

    chosen = {n: m for n, m in linears.items() if any(fnmatchcase(n, glob) for glob in globs)}
    layer_ranks: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name, linear in chosen.items():
        default = rank_for(linear.in_features, linear.out_features, keep)
        given = next((r for glob, r in ranks.items() if fnmatchcase(name, glob)), default)
        layer_ranks[name] = given // num_terms * num_terms
        reasons[name] = _reason_to_skip(model, name, linear, layer_ranks[name])
    moments: dict[str, Tensor] = {}
    if calibration is not None:
        to_fit = {name: linear for name, linear in chosen.items() if not reasons[name]}
        moments = input_moments(model, to_fit, calibration)
        reasons |= {name: "calibration never ran it" for name in to_fit.keys() - moments.keys()}

    rows, fitted = [], {}
    for name, linear in chosen.items():
        if reasons[name]:
            rows.append(_row(name, linear, note=f"left dense: {reasons[name]}"))
            continue
        moment, layer_seed = moments.get(name), seed_of(seed, name)
        layer = fit_layer(linear, method, num_terms, layer_ranks[name], layer_seed, moment)
        fitted[name] = layer
        w = linear.weight.T.double()
        residual = w - layer.weight.T.double()
        activation_error = None if moment is None else _relative_norm(residual, w, moment)
        rows.append(_row(name, layer, _relative_norm(residual, w), activation_error))
    for name, layer in fitted.items():  # last, so that an error above leaves the model unchanged
        _replace(model, name, layer)
    return Report(tuple(rows))


def _reason_to_skip(model: nn.Module, name: str, linear: nn.Linear, rank: int) -> str:
    """Why a layer cannot be converted to this rank; empty if it can."""
    parameters = model.named_parameters(remove_duplicate=False)
    others = [n for n, p in parameters if p is linear.weight and n != f"{name}.weight"]
    dense = Cost.dense(linear.in_features, linear.out_features).stored
    stored = Cost.low_rank(linear.in_features, linear.out_features, rank).stored
    if others:
        return f"its weight is shared with {', '.join(others)}"
    if has_forward_hooks(linear):
        return "it has hooks"
    if type(linear) is not nn.Linear:
        return f"its type is {type(linear).__name__}, a subclass of nn.Linear"
    if rank == 0:
        return "its rank is 0"
    if stored >= dense:
        return f"rank {rank} has {stored:,} parameters, nn.Linear has {dense:,}"
    return ""


def input_moments(
    model: nn.Module, linears: Mapping[str, nn.Linear], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """C = XᵀX / n of all inputs X (n, in) of each layer while the model runs on `batches`."""
    sums: dict[nn.Module, Tensor] = {}
    counts: dict[nn.Module, int] = {}

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        x = x.reshape(-1, x.shape[-1]).double()
        sums[module] = sums.get(module, 0) + x.T @ x
        counts[module] = counts.get(module, 0) + len(x)

    hooks = [m.register_forward_pre_hook(add, with_kwargs=True) for m in linears.values()]
    batch_count = 0
    try:
        with eval_mode(model):
            for batch in batches:
                model(*batch) if isinstance(batch, tuple) else model(batch)
                batch_count += 1
    finally:
        for hook in hooks:
            hook.remove()
    if batch_count == 0:
        raise ValueError("expected at least one calibration batch, got none")
    return {n: sums[m] / counts[m] for n, m in linears.items() if counts.get(m)}


def fit_layer(
    linear: nn.Linear, method: str, num_terms: int, rank: int, seed: int, moment: Tensor | None
) -> FactoredLinear:
    """Fit a layer without bias to `linear`; created on meta, which uses no random state."""
    weight, sizes = linear.weight, (linear.in_features, linear.out_features)
    kwargs: dict[str, Any] = {"bias": False, "device": "meta", "dtype": weight.dtype}
    if method == "svd":
        layer = LowRankLinear(*sizes, rank, **kwargs).to_empty(device=weight.device)
        a, b = fit_low_rank(weight, rank, moment)
        layer.s1.copy_(a)
        layer.s2.copy_(b)
        return layer.requires_grad_(weight.requires_grad)
    with warnings.catch_warnings():  # about its costs, which are in the report
        warnings.simplefilter("ignore", UserWarning)
        sketched = SKLinear(*sizes, num_terms, rank // num_terms, seed=seed, **kwargs)
    sketched = sketched.to_empty(device=weight.device)
    if method == "sketch":
        random_sketch(weight, sketched)
    else:
        fit_sketched(weight, sketched, moment)
    return sketched.requires_grad_(weight.requires_grad)


def _relative_norm(residual: Tensor, w: Tensor, moment: Tensor | None = None) -> float | None:
    """‖residual‖ / ‖w‖, or ‖X residual‖ / ‖X w‖ given the moment of X; None if w is 0."""
    a, b = (float((x * (x if moment is None else moment @ x)).sum()) for x in (residual, w))
    return (max(a, 0) / b) ** 0.5 if b > 0 else None


def _replace(model: nn.Module, name: str, new: nn.Linear | FactoredLinear) -> None:
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear | FactoredLinear)
    new.train(old.training)
    new.bias = old.bias
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def to_dense(model: nn.Module) -> None:
    """Replace each factored layer of `model` by the equivalent nn.Linear, in place."""
    if isinstance(model, FactoredLinear):
        raise ValueError("expected a model that contains layers, got a layer: use its weight")
    dense: dict[FactoredLinear, nn.Linear] = {}  # keyed by layer: a shared layer stays shared
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, FactoredLinear):
            continue
        if layer not in dense:
            dense[layer] = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
            weight = layer.weight.detach().contiguous()
            dense[layer].weight = nn.Parameter(weight, layer.s1.requires_grad)
        _replace(model, name, dense[layer])
