"""Which rank each layer should have, for a size of all of them together.

First every layer is measured alone at each of a few sizes: by how much the validation loss rises.
If the rises of several layers add up, the best ranks for a total are those that minimise
Σ rise + λ Σ numbers for some λ; so these are measured for several totals, beside the same share for
all layers. Last, single layers are made larger and others smaller in turn, for the total asked for.

Every trial is a line of a file, and is not measured again: a search that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspan.checkpoint import CHECKPOINTS, latest
from longspan.checkpoint.format import MANIFEST
from longspan.costs import Cost, rank_for
from longspan.errors import UserError
from longspan.files import replace_text, sha256_of
from longspan.sketch_run import Trained, layers_of
from longspan.sketching.conversion import Method, fitted, input_moments
from longspan.sketching.layers import seed_of
from longspan.tracking import MetricsFile, lines_of
from longspan.tracking.scatter import scatter_svg

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Of a dense layer's numbers, beside all of them."""
TRIALS, PICTURE, SETTINGS = "trials.jsonl", "pareto.svg", "search.json"

Ranks = tuple[int, ...]
"""Of all terms together, by layer; 0 is dense."""


@dataclass(frozen=True)
class Trial:
    kind: str
    """'dense', 'alone', 'same share', 'by rises' or 'swapped'."""
    ranks: Ranks
    stored: int
    loss: float


@dataclass(frozen=True)
class Found:
    """What a search has measured."""

    names: list[str]
    dense: Trial
    best: Trial
    """Of least loss within the size asked for."""
    front: list[Trial]
    """Those than which none is both smaller and better, from the smallest on."""
    same_share: list[Trial]
    folder: Path

    @property
    def ranks(self) -> dict[str, int]:
        return dict(zip(self.names, self.best.ranks, strict=True))

    def as_dict(self) -> dict[str, Any]:
        return {
            "best": {**asdict(self.best), "ranks": self.ranks},
            "front": [asdict(trial) for trial in self.front],
            "same_share": [asdict(trial) for trial in self.same_share],
            "folder": str(self.folder),
        }

    def __str__(self) -> str:
        lines = [f"{'stored':>8}  {'validation loss':>15}  {'rise':>8}  found"]
        shown = {*self.front, *self.same_share, self.best}
        for trial in sorted(shown, key=lambda t: (t.stored, t.loss)):
            mark = "  <- chosen" if trial.ranks == self.best.ranks else ""
            lines.append(
                f"{trial.stored / self.dense.stored:>8.1%}  {trial.loss:>15.4f}  "
                f"{trial.loss - self.dense.loss:>+8.4f}  {trial.kind}{mark}"
            )
        return "\n".join([*lines, f"trials and picture: {self.folder}"])


class Search:
    """Measures ranks of a trained run's layers, and remembers what it has measured."""

    def __init__(
        self,
        trained: Trained,
        folder: Path,
        *,
        method: Method,
        layers: str = "*",
        terms: int = 1,
        calibrate: int = 0,
    ) -> None:
        self._trained, self._folder, self._method, self._terms = trained, folder, method, terms
        self.names = layers_of(trained.model, layers)
        self._linears: dict[str, nn.Linear] = {}
        for name in self.names:
            linear = trained.model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            self._linears[name] = linear
        self._dense = {name: x.weight.detach().clone() for name, x in self._linears.items()}
        self._levels = [self._levels_of(x) for x in self._linears.values()]
        newest = latest(trained.run_dir / CHECKPOINTS)
        assert newest is not None
        self._settings = {
            "checkpoint": f"{newest.name}, SHA-256 {sha256_of(newest / MANIFEST)}",
            "method": method,
            "layers": layers,
            "terms": terms,
            "calibrate": calibrate,
            "validation_samples": len(trained.validation),
        }
        self._check_folder()
        self._moments: dict[str, Tensor] = {}
        if calibrate:
            batches = trained.batches(calibrate)
            self._moments = input_moments(trained.model, self._linears, batches)
        self._fits: dict[tuple[str, int], Tensor] = {}
        self._trials: dict[Ranks, Trial] = {}
        for line in lines_of(folder / TRIALS):
            try:
                ranks, loss = tuple(line["ranks"]), line["loss"]
                loss = math.inf if loss is None else float(loss)  # JSON has no word for it
                self._trials[ranks] = Trial(line["kind"], ranks, int(line["stored"]), loss)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{folder / TRIALS} is damaged: remove it") from error

    def _levels_of(self, linear: nn.Linear) -> list[int]:
        """The ranks to try, from the smallest on; 0, which is dense, at the end."""
        sizes = linear.in_features, linear.out_features
        ranks = {rank_for(*sizes, share) // self._terms * self._terms for share in SHARES}
        return [*sorted(ranks - {0}), 0]

    def _check_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / SETTINGS
            was = json.loads(file.read_text()) if file.exists() else self._settings
        except (OSError, ValueError) as error:
            raise UserError(f"cannot use {self._folder}: {error}") from error
        if not isinstance(was, dict):
            raise UserError(f"{file} is damaged: remove it")
        if was != self._settings:
            changed = [key for key, value in self._settings.items() if was.get(key) != value]
            shown = [f"  {key} was {was.get(key)} and is {self._settings[key]}" for key in changed]
            raise UserError(
                "\n".join(
                    [f"{self._folder} holds another search", *shown, "remove it or set it back"]
                )
            )
        replace_text(file, json.dumps(self._settings, indent=1) + "\n")

    def run(self, keep: float, swaps: int) -> Found:
        """Search for the ranks that store at most `keep` of the dense layers' numbers."""
        with MetricsFile(self._folder / TRIALS, step=sys.maxsize) as self._log:
            dense = self._measure("dense", (0,) * len(self.names))
            rises = self._rises(dense)
            same = [self._measure("same share", self._same(share)) for share in SHARES]
            for share in sorted({*SHARES, keep}):
                if ranks := self._by_rises(rises, share * dense.stored):
                    self._measure("by rises", ranks)
            # Swaps of an earlier search are found again in their turn, and cost nothing.
            within = [
                t
                for t in self._trials.values()
                if t.stored <= keep * dense.stored and t.kind != "swapped"
            ]
            if not within:
                raise UserError(
                    f"no ranks store {keep:.1%} of {dense.stored:,} numbers: raise --keep"
                )
            best = self._swap(min(within, key=lambda t: t.loss), keep * dense.stored, swaps)
        front = _front(self._trials.values())
        found = Found(self.names, dense, best, front, same, self._folder)
        self._draw(found)
        return found

    def _rises(self, dense: Trial) -> list[dict[int, float]]:
        """Of each layer, by rank, how much the loss rises with it alone."""
        rises = []
        for place, levels in enumerate(self._levels):
            ranks = {
                rank: (*(0,) * place, rank, *(0,) * (len(self.names) - place - 1))
                for rank in levels
            }
            losses = {rank: self._measure("alone", all_).loss for rank, all_ in ranks.items()}
            rises.append({rank: loss - dense.loss for rank, loss in losses.items()})
        return rises

    def _same(self, share: float) -> Ranks:
        ranks = []
        for linear, levels in zip(self._linears.values(), self._levels, strict=True):
            most = rank_for(linear.in_features, linear.out_features, share)
            ranks.append(max((r for r in levels if 0 < r <= most), default=levels[0]))
        return tuple(ranks)

    def _by_rises(self, rises: list[dict[int, float]], most: float) -> Ranks | None:
        """The ranks of least Σ rise + λ Σ numbers, for the smallest λ at which they fit."""

        def chosen(weight: float) -> Ranks:
            return tuple(
                min(of_rank, key=lambda rank: of_rank[rank] + weight * self._stored(i, rank))
                for i, of_rank in enumerate(rises)
            )

        low, high = 0.0, 1.0  # a whole nat for every number: the smallest of all
        if self._total(chosen(high)) > most:
            return None
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self._total(chosen(middle)) <= most else (middle, high)
        return chosen(high)

    def _swap(self, best: Trial, most: float, swaps: int) -> Trial:
        """Make one layer larger and others smaller, and keep what is better."""
        chance = random.Random(0)
        for _ in range(swaps):
            ranks = list(best.ranks)
            grown = chance.randrange(len(ranks))
            self._move(ranks, grown, 1)
            others = [i for i in range(len(ranks)) if i != grown]
            while others and self._total(tuple(ranks)) > most:
                shrunk = chance.choice(others)
                self._move(ranks, shrunk, -1)
                if ranks[shrunk] == self._levels[shrunk][0]:
                    others.remove(shrunk)
            if self._total(tuple(ranks)) <= most:
                trial = self._measure("swapped", tuple(ranks))
                best = min(best, trial, key=lambda t: t.loss)
        return best

    def _move(self, ranks: list[int], place: int, by: int) -> None:
        levels = self._levels[place]
        index = levels.index(ranks[place]) + by
        ranks[place] = levels[min(max(index, 0), len(levels) - 1)]

    def _stored(self, place: int, rank: int) -> int:
        linear = self._linears[self.names[place]]
        sizes = linear.in_features, linear.out_features
        return (Cost.low_rank(*sizes, rank) if rank else Cost.dense(*sizes)).stored

    def _total(self, ranks: Ranks) -> int:
        return sum(self._stored(place, rank) for place, rank in enumerate(ranks))

    @torch.no_grad()
    def _measure(self, kind: str, ranks: Ranks) -> Trial:
        if ranks in self._trials:
            return self._trials[ranks]
        for name, rank in zip(self.names, ranks, strict=True):
            self._linears[name].weight.copy_(self._fit(name, rank))
        loss = self._trained.loss()
        trial = Trial(kind, ranks, self._total(ranks), loss if math.isfinite(loss) else math.inf)
        for name, weight in self._dense.items():
            self._linears[name].weight.copy_(weight)
        self._trials[ranks] = trial
        self._log.write({"step": len(self._trials), **asdict(trial)})
        print(
            f"trial {len(self._trials)}: {kind}, {trial.stored:,} numbers, loss {trial.loss:.4f}",
            file=sys.stderr,
        )
        return trial

    def _fit(self, name: str, rank: int) -> Tensor:
        if rank == 0:
            return self._dense[name]
        if (name, rank) not in self._fits:
            moment, seed = self._moments.get(name), seed_of(0, name)
            linear = self._linears[name]  # which is dense until its fit is put in its place
            layer = fitted(linear, self._method, self._terms, rank, seed, moment)
            self._fits[name, rank] = layer.weight.detach()
        return self._fits[name, rank]

    def _draw(self, found: Found) -> None:
        def points(trials: list[Trial]) -> list[tuple[float, float]]:
            finite = [t for t in trials if math.isfinite(t.loss)]
            return [(100 * t.stored / found.dense.stored, t.loss) for t in finite]

        caption = f"{self._trained.run_dir.name}, {self._method}, {len(self._trials)} trials"
        picture = scatter_svg(
            "numbers stored, % of dense layers",
            "validation loss, nats per token",
            points=points(list(self._trials.values())),
            lines={"best found": points(found.front), "same share": points(found.same_share)},
            caption=caption,
        )
        replace_text(self._folder / PICTURE, picture)


def _front(trials: Iterable[Trial]) -> list[Trial]:
    """From the smallest on, each better than all before it."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.stored, t.loss)):
        if not front or trial.loss < front[-1].loss:
            front.append(trial)
    return front
