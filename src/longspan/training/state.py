"""What a run is between two steps, to and from a checkpoint."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from longspan.checkpoint import (
    Checkpoint,
    Part,
    check_shapes,
    folder_of,
    latest,
    open_checkpoint,
    set_aside,
    step_of,
)
from longspan.config import Run
from longspan.data import Source
from longspan.engines import Engine
from longspan.errors import Damaged, Diverged, UserError, first_problem
from longspan.models import parameter_shapes
from longspan.parallel.placement import Placement
from longspan.training.guard import Guard, Usual


class Scalars(BaseModel):
    """What a checkpoint holds beside tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    samples: Annotated[int, Field(ge=0)]
    scaler: dict[str, int | float]
    usual: Usual = Usual()
    skips: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = []
    trained_with: dict[str, Any]


DATA = "data"


def resume_key(run: Run, source: Source) -> dict[str, Any]:
    """What fixes the function and the order of samples, and so may not change on resume."""
    sections = {
        f"{section}.{key}": value
        for section in ("model", "attention")
        for key, value in getattr(run, section).model_dump(mode="json").items()
        if key != "preset"
    }
    return {
        **sections,
        "data.context": run.data.context,
        "train.seed": run.train.seed,
        DATA: f"{source.describe()}; SHA-256 {source.fingerprint}",
    }


@dataclass
class State:
    """Everything a step reads and changes."""

    engine: Engine
    placed: Placement
    guard: Guard
    step: int = 0
    samples: int = 0
    """Position in the data: how many samples of the endless order have been used or left out."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Samples [a, b) that are left out: steps on them were bad, one after another."""

    def next_samples(self, count: int) -> list[int]:
        """The next samples of the endless order that are not left out."""
        left_out = (range(a, b) for a, b in self.skips)
        skipped = {index for each in left_out for index in each if index >= self.samples}
        found = (index for index in itertools.count(self.samples) if index not in skipped)
        return list(itertools.islice(found, count))

    def parts(self) -> dict[str, Part]:
        """What this rank has to save, by group and name."""
        parts = self.engine.parts()
        if self.placed.world.is_main:
            parts |= {f"rng/{name}": Part.whole(x) for name, x in rng_states().items()}
        return {name: part for name, part in parts.items() if part.values.numel()}

    def scalars(self, trained_with: dict[str, Any]) -> dict[str, Any]:
        """What there is to save beside tensors."""
        return Scalars(
            samples=self.samples,
            scaler=self.engine.scaler_state(),
            usual=self.guard.usual(),
            skips=[[a, b] for a, b in self.skips],
            trained_with=trained_with,
        ).model_dump(mode="json")

    def is_finite(self) -> bool:
        """Whether this rank's weights are."""
        return self.engine.is_finite()

    def restore(self, saved: Checkpoint, run: Run, trained_with: dict[str, Any]) -> None:
        """Take over a checkpoint, which must be of the same model and order of samples."""
        try:
            scalars = Scalars.model_validate(saved.state)
        except ValidationError as error:
            raise UserError(f"the state in {saved.path}: {first_problem(error)}") from error
        _check_unchanged(saved.path, scalars.trained_with, trained_with, run.data.accept_changed)
        check_shapes(parameter_shapes(run), saved)
        self.engine.load_weights(lambda name, box: saved.read(f"model/{name}", box))
        self._load_optimizer(saved)
        self.engine.load_scaler_state(scalars.scaler)
        _set_rng({name: saved.read(f"rng/{name}") for name in saved.shapes("rng")})
        self.guard.set_usual(scalars.usual)
        saved.close()
        self.step, self.samples = saved.step, scalars.samples
        self.skips = [(a, b) for a, b in scalars.skips]

    def roll_back(
        self, folder: Path, run: Run, trained_with: dict[str, Any], bad_steps: int
    ) -> str:
        """Go back to the newest checkpoint and leave out the samples of the last `bad_steps`.

        Says so; Diverged where there is none, or where it has been done too often.
        """
        end = self.samples
        begin, bad = end - bad_steps * run.train.global_batch, self.step
        skips = [*self.skips, (begin, end)]
        saved = newest_good(folder, self.placed)
        if saved is None or len(skips) > run.train.max_rollbacks:
            raise Diverged(
                f"{bad_steps} steps in a row to step {bad} had a loss or gradient that is no "
                f"number or stands out; after {len(skips) - 1} ways back"
                f"{', and no checkpoint to go back to' * (saved is None)}: lower train.lr"
            )
        self.restore(saved, run, trained_with)
        self.skips = skips
        return (
            f"{bad_steps} bad steps in a row: back from step {bad} to {self.step}, leaving out the "
            f"samples {begin:,} to {end - 1:,}"
        )

    def _load_optimizer(self, saved: Checkpoint) -> None:
        shapes, found = saved.shapes("model"), []
        for full_name, shape in saved.shapes("optimizer").items():
            name, key = full_name.rsplit(".", 1)
            if name not in shapes or shape not in ((), shapes[name]):
                raise UserError(f"{saved.path} holds {name}.{key} of shape {shape}")
            found.append((name, key, not shape))
        self.engine.load_moments(found, lambda name, box: saved.read(f"optimizer/{name}", box))


def _check_unchanged(
    path: Path, was: Mapping[str, Any], now: Mapping[str, Any], accepts_data: bool
) -> None:
    """Refuse a checkpoint that was trained with anything else, and show all that differs."""
    changed = {key for key, value in was.items() if now.get(key) != value}
    shown = [f"  {key} was {was[key]}\n  {key} is  {now.get(key)}" for key in sorted(changed)]
    if changed == {DATA} and accepts_data:
        print("\n".join(["longspan: going on with other data", *shown]), file=sys.stderr)
    elif changed:
        accept = ", or go on with other data by data.accept_changed=true" * (changed == {DATA})
        raise UserError(
            "\n".join([f"{path} was trained with", *shown, "set it back, or start a new run"])
            + accept
        )


def newest_good(folder: Path, placed: Placement) -> Checkpoint | None:
    """The newest checkpoint of which no byte has changed, or None where there is none at all.

    The ranks share the checking. A damaged one is set aside, and the one before it is tried; one
    that cannot be read, on whatever rank, ends it on all of them and stays where it is.
    """
    world, aside = placed.world, 0
    while True:
        newest = latest(folder) if world.is_main else None
        (step,) = placed.most(-1 if newest is None else step_of(newest) or 0)
        if step < 0 and aside:
            raise UserError(f"no checkpoint in {folder} is whole; {aside} were set aside")
        if step < 0:
            return None
        path, problem, kind = folder_of(folder, step), None, 0
        try:
            saved = open_checkpoint(path)
            saved.check(saved.files[world.rank :: world.size])
        except UserError as error:
            problem, kind = error, 1 if isinstance(error, Damaged) else 2
        (worst,) = placed.most(kind)
        if worst == 0:
            return saved
        if worst == 1 and world.is_main:
            try:
                set_aside(path)
            except OSError as error:
                problem, worst = UserError(f"cannot set aside {path}: {error}"), 2
        (worst,) = placed.most(worst)
        if worst == 2:
            raise problem or UserError(f"another rank could not read {path}")
        if problem is not None:
            print(f"longspan: {problem}; it is set aside", file=sys.stderr)
        aside += 1


def rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
