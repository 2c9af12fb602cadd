"""Trained nn.Linear layers into the factored ones of `longspan.sketching.layers`, and back.

`sketch(model)` replaces layers in place and returns a `Report`; `to_dense(model)` undoes the form,
not the loss. Three methods, for a weight W (in, out) with y = x W + b:

- "svd": the A B nearest to W of all products of that rank (LowRankLinear).
- "least_squares": the S1, S2 nearest to W, given an SKLinear's fixed signs.
- "sketch": S1 = W U1ᵀ, S2 = U2ᵀ W, which give W on average over signs, but are not near it.
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
from longspan.sketching.fitting import fit_low_rank, fit_sketched, random_sketch
from longspan.sketching.layers import FactoredLinear, LowRankLinear, SKLinear, seed_of

Method = Literal["svd", "least_squares", "sketch"]


@dataclass(frozen=True)
class Row:
    """One layer; its costs leave the bias out."""

    name: str
    form: str
    """'dense', 'low rank 32' or '2 terms of rank 16'."""
    before: Cost
    """Of the nn.Linear of the same features."""
    after: Cost
    weight_error: float | None
    """‖W − Ŵ‖ / ‖W‖."""
    activation_error: float | None
    """‖X (W − Ŵ)‖ / ‖X W‖ on the calibration inputs."""
    remark: str
    """Why the layer was left dense, or in what it exceeds nn.Linear."""


@dataclass(frozen=True)
class Report:
    """What layers store, compute and lose. Print it for a table."""

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
        heads = "layer, form, stored, share, FLOPs per token, share, weight error, activation error"
        lines = [[*heads.split(", "), "remark"]]
        for row in self.rows:
            errors = (row.weight_error, row.activation_error)
            texts = ["-" if error is None else f"{error:.4f}" for error in errors]
            lines.append([row.name, row.form, *_change(row.before, row.after), *texts, row.remark])
        count = f"{len(self.rows)} layers"
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
    """A row for each nn.Linear, LowRankLinear and SKLinear of `model`."""
    kinds = nn.Linear, FactoredLinear
    return Report(tuple(_row(n, m) for n, m in model.named_modules() if isinstance(m, kinds)))


def _row(
    name: str,
    layer: nn.Linear | FactoredLinear,
    weight_error: float | None = None,
    activation_error: float | None = None,
    remark: str = "",
) -> Row:
    form, dense = "dense", Cost.dense(layer.in_features, layer.out_features)
    cost = layer.cost if isinstance(layer, FactoredLinear) else dense
    if isinstance(layer, LowRankLinear):
        form = f"low rank {layer.rank}"
    elif isinstance(layer, SKLinear):
        form = f"{layer.num_terms} term{'s'[: layer.num_terms > 1]} of rank {layer.low_rank}"
    if not remark and cost.excess_over(dense):
        what = "stores" if cost.stored > dense.stored else "computes"
        remark = f"{what} more than nn.Linear"
    return Row(name, form, dense, cost, weight_error, activation_error, remark)


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
    """Replace, in place, the nn.Linear layers whose names match a glob of `layers`.

    A layer keeps at most `keep` of its numbers, or has the `rank` given for all, or by the first
    glob of a mapping that matches its name; of an SKLinear this is the rank of all terms together.
    It is left dense, and its row says why, where it would not get smaller, where its weight is
    another module's too, or where `calibration` never runs it. Bias (the same Parameter), device,
    dtype, requires_grad and mode are kept. An optimizer must be made anew.

    `calibration`: batches the model is run on, in eval mode; a tuple is its arguments. Layers are
    then fitted to their inputs, for which each takes (in, in) float64 numbers meanwhile.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"expected keep above 0 and at most 1, got {keep}")
    if method not in get_args(Method):
        raise ValueError(f"expected method to be one of {get_args(Method)}, got {method!r}")
    if num_terms < 1 or (method == "svd" and num_terms > 1):
        raise ValueError(f"expected num_terms >= 1, and 1 with method='svd', got {num_terms}")
    linears = {n: m for n, m in model.named_modules() if n and isinstance(m, nn.Linear)}
    globs = [layers] if isinstance(layers, str) else list(layers)
    ranks = {"*": rank} if isinstance(rank, int) else dict(rank or {})
    if min(ranks.values(), default=0) < 0:
        raise ValueError(f"expected ranks of at least 0, got {rank}")
    for glob in [*globs, *ranks]:
        if not any(fnmatchcase(name, glob) for name in linears):
            found = ", ".join(list(linears)[:8]) or "none"
            raise ValueError(
                f"expected a glob that matches an nn.Linear in the model, got {glob!r}; "
                f"of {len(linears)} the first are: {found}"
            )

    chosen = {n: m for n, m in linears.items() if any(fnmatchcase(n, glob) for glob in globs)}
    own: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name, linear in chosen.items():
        by_keep = rank_for(linear.in_features, linear.out_features, keep)
        given = next((r for glob, r in ranks.items() if fnmatchcase(name, glob)), by_keep)
        own[name] = given // num_terms * num_terms
        reasons[name] = _reason(model, name, linear, own[name])
    moments: dict[str, Tensor] = {}
    if calibration is not None:
        wanted = {name: linear for name, linear in chosen.items() if not reasons[name]}
        moments = input_moments(model, wanted, calibration)
        reasons |= {name: "calibration never ran it" for name in wanted.keys() - moments.keys()}

    rows, made = [], {}
    for name, linear in chosen.items():
        if reasons[name]:
            rows.append(_row(name, linear, remark=f"left dense: {reasons[name]}"))
            continue
        moment, own_seed = moments.get(name), seed_of(seed, name)
        layer = made[name] = fitted(linear, method, num_terms, own[name], own_seed, moment)
        w = linear.weight.T.double()
        rest = w - layer.weight.T.double()
        on_inputs = None if moment is None else _relative(rest, w, moment)
        rows.append(_row(name, layer, _relative(rest, w), on_inputs))
    for name, layer in made.items():  # only now: after an error above the model is as it was
        _replace(model, name, layer)
    return Report(tuple(rows))


def _reason(model: nn.Module, name: str, linear: nn.Linear, rank: int) -> str:
    """Why not to convert a layer to this rank."""
    parameters = model.named_parameters(remove_duplicate=False)
    others = [n for n, p in parameters if p is linear.weight and n != f"{name}.weight"]
    dense = Cost.dense(linear.in_features, linear.out_features).stored
    stored = Cost.low_rank(linear.in_features, linear.out_features, rank).stored
    if others:
        return f"its weight is also {', '.join(others)}"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks"
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__} may be more than an nn.Linear"
    if rank == 0:
        return "its rank is 0"
    if stored >= dense:
        return f"of rank {rank} it stores {stored:,} numbers where nn.Linear has {dense:,}"
    return ""


def input_moments(
    model: nn.Module, linears: Mapping[str, nn.Linear], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """C = XᵀX / n of all inputs X (n, in) that each layer gets as the model runs on `batches`."""
    sums: dict[nn.Module, Tensor] = {}
    counts: dict[nn.Module, int] = {}

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        x = x.reshape(-1, x.shape[-1]).double()
        sums[module] = sums.get(module, 0) + x.T @ x
        counts[module] = counts.get(module, 0) + len(x)

    modes = {module: module.training for module in model.modules()}
    hooks = [m.register_forward_pre_hook(add, with_kwargs=True) for m in linears.values()]
    number = 0
    try:
        model.eval()
        for batch in batches:
            model(*batch) if isinstance(batch, tuple) else model(batch)
            number += 1
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if number == 0:
        raise ValueError("expected at least one calibration batch, got none")
    return {n: sums[m] / counts[m] for n, m in linears.items() if counts.get(m)}


def fitted(
    linear: nn.Linear, method: str, num_terms: int, rank: int, seed: int, moment: Tensor | None
) -> FactoredLinear:
    """In place of `linear`, without its bias. On the meta device no random numbers are drawn."""
    weight, sizes = linear.weight, (linear.in_features, linear.out_features)
    place: dict[str, Any] = {"bias": False, "device": "meta", "dtype": weight.dtype}
    if method == "svd":
        layer = LowRankLinear(*sizes, rank, **place).to_empty(device=weight.device)
        a, b = fit_low_rank(weight, rank, moment)
        layer.s1.copy_(a)
        layer.s2.copy_(b)
        return layer.requires_grad_(weight.requires_grad)
    with warnings.catch_warnings():  # of its costs, which the report says
        warnings.simplefilter("ignore", UserWarning)
        terms = SKLinear(*sizes, num_terms, rank // num_terms, seed=seed, **place)
    terms = terms.to_empty(device=weight.device)
    if method == "sketch":
        random_sketch(weight, terms)
    else:
        fit_sketched(weight, terms, moment)
    return terms.requires_grad_(weight.requires_grad)


def _relative(rest: Tensor, whole: Tensor, moment: Tensor | None = None) -> float | None:
    """‖rest‖ / ‖whole‖, or ‖X rest‖ / ‖X whole‖ by the moment of X; None where whole is 0."""
    a, b = (float((x * (x if moment is None else moment @ x)).sum()) for x in (rest, whole))
    return (max(a, 0) / b) ** 0.5 if b > 0 else None


def _replace(model: nn.Module, name: str, new: nn.Linear | FactoredLinear) -> None:
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear | FactoredLinear)
    new.train(old.training)
    new.bias = old.bias
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def to_dense(model: nn.Module) -> None:
    """Replace, in place, each factored layer of `model` by the nn.Linear that computes the same."""
    if isinstance(model, FactoredLinear):
        raise ValueError("expected a model that holds layers, got a layer; use its weight")
    made: dict[FactoredLinear, nn.Linear] = {}  # by layer: one that is used twice stays one
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(layer, FactoredLinear):
            continue
        if layer not in made:
            made[layer] = nn.Linear(layer.in_features, layer.out_features, False, device="meta")
            weight = layer.weight.detach().contiguous()
            made[layer].weight = nn.Parameter(weight, layer.s1.requires_grad)
        _replace(model, name, made[layer])
