"""Search the rank of each layer, for a total number of parameters.

First a sensitivity analysis: each layer alone is converted at a few sizes, and the increase of the
validation loss is measured. If the increases of several layers add up, the best ranks for a budget
minimise Σ increase + λ Σ parameters for some λ. Such allocations are measured for several budgets,
beside uniform ones, which give every layer the same fraction of its parameters. Last, a local
search grows one layer and shrinks others within the budget asked for.

Each trial is a line of a file and is never measured twice, so an interrupted search resumes.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.costs import Cost, rank_for
from longspan.errors import UserError
from longspan.files import atomic_write_text
from longspan.sketching.conversion import Method, fit_layer, input_moments
from longspan.sketching.layers import seed_of
from longspan.tracking import MetricsFile, read_metrics
from longspan.tracking.scatter import scatter_svg

FRACTIONS = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Sizes to try for a layer, as fractions of its dense parameters, beside dense."""
TRIALS, PLOT, SETTINGS = "trials.jsonl", "pareto.svg", "search.json"

Ranks = tuple[int, ...]
"""The rank of all terms together for each layer; 0 is dense."""


@dataclass(frozen=True)
class Trial:
    kind: str
    """'dense', 'single layer', 'uniform', 'allocated' or 'swapped'."""
    ranks: Ranks
    stored: int
    """Parameters of all layers."""
    loss: float


@dataclass(frozen=True)
class SearchResult:
    names: list[str]
    dense: Trial
    best: Trial
    """The trial of least loss within the budget."""
    pareto_front: list[Trial]
    """Trials that no other beats in both size and loss, from the smallest on."""
    uniform: list[Trial]
    folder: Path

    @property
    def ranks(self) -> dict[str, int]:
        return dict(zip(self.names, self.best.ranks, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "best": {**asdict(self.best), "ranks": self.ranks},
            "pareto_front": [asdict(trial) for trial in self.pareto_front],
            "uniform": [asdict(trial) for trial in self.uniform],
            "folder": str(self.folder),
        }

    def __str__(self) -> str:
        lines = [f"{'parameters':>10}  {'validation loss':>15}  {'increase':>8}  kind"]
        shown = {*self.pareto_front, *self.uniform, self.best}
        for trial in sorted(shown, key=lambda t: (t.stored, t.loss)):
            mark = "  <- chosen" if trial.ranks == self.best.ranks else ""
            lines.append(
                f"{trial.stored / self.dense.stored:>10.1%}  {trial.loss:>15.4f}  "
                f"{trial.loss - self.dense.loss:>+8.4f}  {trial.kind}{mark}"
            )
        return "\n".join([*lines, f"trials and plot: {self.folder}"])


class RankSearch:
    """Measures the loss of a model for ranks of its layers, and records every trial in `folder`.

    `settings` identifies the search: a folder with other settings is refused. `calibration` are
    batches to fit the layers to, as for `sketch`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        loss: Callable[[], float],
        folder: Path,
        *,
        settings: Mapping[str, Any],
        method: Method,
        terms: int = 1,
        calibration: Sequence[Any] = (),
        title: str = "",
    ) -> None:
        self._loss, self._folder, self._settings = loss, folder, dict(settings)
        self._method, self._terms, self._title = method, terms, title
        self.names = list(layers)
        self._linears: dict[str, nn.Linear] = {}
        for name in self.names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            self._linears[name] = linear
        self._dense = {name: x.weight.detach().clone() for name, x in self._linears.items()}
        self._levels = [self._levels_of(x) for x in self._linears.values()]
        self._check_folder()
        self._moments: dict[str, Tensor] = {}
        if calibration:
            self._moments = input_moments(model, self._linears, calibration)
        self._fits: dict[tuple[str, int], Tensor] = {}
        self._trials: dict[Ranks, Trial] = {}
        for line in read_metrics(folder / TRIALS):
            try:
                ranks, measured = tuple(line["ranks"]), line["loss"]
                measured = math.inf if measured is None else float(measured)  # JSON has no infinity
                self._trials[ranks] = Trial(line["kind"], ranks, int(line["stored"]), measured)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{folder / TRIALS} is damaged: remove it") from error

    def _levels_of(self, linear: nn.Linear) -> list[int]:
        """The ranks to try in increasing order; 0, which is dense, comes last."""
        sizes = linear.in_features, linear.out_features
        ranks = {rank_for(*sizes, fraction) // self._terms * self._terms for fraction in FRACTIONS}
        return [*sorted(ranks - {0}), 0]

    def _check_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / SETTINGS
            saved = json.loads(file.read_text()) if file.exists() else self._settings
        except (OSError, ValueError) as error:
            raise UserError(f"cannot use {self._folder}: {error}") from error
        if not isinstance(saved, dict):
            raise UserError(f"{file} is damaged: remove it")
        if saved != self._settings:
            changed = [
                f"  {key} was {saved.get(key)}, now {value}"
                for key, value in self._settings.items()
                if saved.get(key) != value
            ]
            message = f"{self._folder} holds a search with other settings"
            advice = "remove the folder, or use the settings of that search"
            raise UserError("\n".join([message, *changed, advice]))
        atomic_write_text(file, json.dumps(self._settings, indent=1) + "\n")

    def run(self, keep: float, swaps: int) -> SearchResult:
        """Search for the ranks of least loss with at most `keep` of the dense parameters."""
        with MetricsFile(self._folder / TRIALS, step=sys.maxsize) as self._log:
            dense = self._measure("dense", (0,) * len(self.names))
            increases = self._loss_increases(dense)
            uniform = [self._measure("uniform", self._uniform(f)) for f in FRACTIONS]
            for fraction in sorted({*FRACTIONS, keep}):
                if ranks := self._allocate(increases, fraction * dense.stored):
                    self._measure("allocated", ranks)
            budget = keep * dense.stored
            # Swaps of an earlier search are repeated in order, at no cost.
            within = [
                t for t in self._trials.values() if t.stored <= budget and t.kind != "swapped"
            ]
            if not within:
                raise UserError(
                    f"no ranks fit in {keep:.1%} of {dense.stored:,} parameters: raise --keep"
                )
            best = self._local_search(min(within, key=lambda t: t.loss), budget, swaps)
        front = _pareto_front(self._trials.values())
        result = SearchResult(self.names, dense, best, front, uniform, self._folder)
        self._plot(result)
        return result

    def _loss_increases(self, dense: Trial) -> list[dict[int, float]]:
        """For each layer, by rank, the increase of the loss if only that layer is converted."""
        increases = []
        for index, levels in enumerate(self._levels):
            ranks = {
                rank: (*(0,) * index, rank, *(0,) * (len(self.names) - index - 1))
                for rank in levels
            }
            losses = {r: self._measure("single layer", all_).loss for r, all_ in ranks.items()}
            increases.append({rank: loss - dense.loss for rank, loss in losses.items()})
        return increases

    def _uniform(self, fraction: float) -> Ranks:
        ranks = []
        for linear, levels in zip(self._linears.values(), self._levels, strict=True):
            largest = rank_for(linear.in_features, linear.out_features, fraction)
            ranks.append(max((r for r in levels if 0 < r <= largest), default=levels[0]))
        return tuple(ranks)

    def _allocate(self, increases: list[dict[int, float]], budget: float) -> Ranks | None:
        """Minimise Σ increase + λ Σ parameters, for the smallest λ whose ranks fit the budget."""

        def minimiser(multiplier: float) -> Ranks:
            return tuple(
                min(by_rank, key=lambda rank: by_rank[rank] + multiplier * self._stored(i, rank))
                for i, by_rank in enumerate(increases)
            )

        low, high = 0.0, 1.0  # one nat per parameter: every layer at its smallest
        if self._total(minimiser(high)) > budget:
            return None
        for _ in range(60):
            middle = (low + high) / 2
            fits = self._total(minimiser(middle)) <= budget
            low, high = (low, middle) if fits else (middle, high)
        return minimiser(high)

    def _local_search(self, best: Trial, budget: float, swaps: int) -> Trial:
        """Grow one random layer and shrink others; accept if the loss falls."""
        rng = random.Random(0)
        for _ in range(swaps):
            ranks = list(best.ranks)
            grown = rng.randrange(len(ranks))
            self._change_level(ranks, grown, 1)
            others = [i for i in range(len(ranks)) if i != grown]
            while others and self._total(tuple(ranks)) > budget:
                shrunk = rng.choice(others)
                self._change_level(ranks, shrunk, -1)
                if ranks[shrunk] == self._levels[shrunk][0]:
                    others.remove(shrunk)
            if self._total(tuple(ranks)) <= budget:
                trial = self._measure("swapped", tuple(ranks))
                best = min(best, trial, key=lambda t: t.loss)
        return best

    def _change_level(self, ranks: list[int], index: int, by: int) -> None:
        levels = self._levels[index]
        level = levels.index(ranks[index]) + by
        ranks[index] = levels[min(max(level, 0), len(levels) - 1)]

    def _stored(self, index: int, rank: int) -> int:
        linear = self._linears[self.names[index]]
        sizes = linear.in_features, linear.out_features
        return (Cost.low_rank(*sizes, rank) if rank else Cost.dense(*sizes)).stored

    def _total(self, ranks: Ranks) -> int:
        return sum(self._stored(index, rank) for index, rank in enumerate(ranks))

    @torch.no_grad()
    def _measure(self, kind: str, ranks: Ranks) -> Trial:
        if ranks in self._trials:
            return self._trials[ranks]
        for name, rank in zip(self.names, ranks, strict=True):
            self._linears[name].weight.copy_(self._fit(name, rank))
        loss = self._loss()
        trial = Trial(kind, ranks, self._total(ranks), loss if math.isfinite(loss) else math.inf)
        for name, weight in self._dense.items():
            self._linears[name].weight.copy_(weight)
        self._trials[ranks] = trial
        self._log.write({"step": len(self._trials), **asdict(trial)})
        print(
            f"trial {len(self._trials)}: {kind}, {trial.stored:,} parameters, "
            f"loss {trial.loss:.4f}",
            file=sys.stderr,
        )
        return trial

    def _fit(self, name: str, rank: int) -> Tensor:
        if rank == 0:
            return self._dense[name]
        if (name, rank) not in self._fits:
            moment, seed = self._moments.get(name), seed_of(0, name)
            linear = self._linears[name]  # still dense: its fit is copied in afterwards
            layer = fit_layer(linear, self._method, self._terms, rank, seed, moment)
            self._fits[name, rank] = layer.weight.detach()
        return self._fits[name, rank]

    def _plot(self, result: SearchResult) -> None:
        def points(trials: Iterable[Trial]) -> list[tuple[float, float]]:
            finite = [t for t in trials if math.isfinite(t.loss)]
            return [(100 * t.stored / result.dense.stored, t.loss) for t in finite]

        svg = scatter_svg(
            "parameters, % of the dense layers",
            "validation loss, nats per token",
            points=points(self._trials.values()),
            lines={
                "Pareto front": points(result.pareto_front),
                "uniform": points(result.uniform),
            },
            caption=f"{self._title}, {self._method}, {len(self._trials)} trials",
        )
        atomic_write_text(self._folder / PLOT, svg)


def _pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """Trials in order of size, each better than all smaller ones."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.stored, t.loss)):
        if not front or trial.loss < front[-1].loss:
            front.append(trial)
    return front
