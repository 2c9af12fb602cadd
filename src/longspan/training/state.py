"""The state of a run between two steps, to and from a checkpoint."""

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
    TensorShard,
    check_shapes,
    checkpoint_path,
    latest,
    open_checkpoint,
    quarantine,
    step_of,
)
from longspan.config import Run
from longspan.data import Source
from longspan.engines import Engine
from longspan.errors import Damaged, Diverged, UserError, first_problem
from longspan.parallel.collectives import all_reduce_max
from longspan.parallel.mesh import ParallelMesh
from longspan.training.guard import Guard, NormAverage
from longspan.wording import counted


class SavedState(BaseModel):
    """What a checkpoint holds besides tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    samples: Annotated[int, Field(ge=0)]
    scaler: dict[str, int | float]
    norm_average: NormAverage = NormAverage()
    skips: list[Annotated[list[int], Field(min_length=2, max_length=2)]] = []
    resume_key: dict[str, Any]


DATA = "data"


def resume_key(run: Run, source: Source) -> dict[str, Any]:
    """What fixes the model's function and the sample order, and so may not change on resume."""
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
class TrainState:
    """Everything that a step reads and changes."""

    engine: Engine
    mesh: ParallelMesh
    guard: Guard
    resume_key: dict[str, Any] = field(default_factory=dict)
    accepts_other_data: bool = False
    """Whether a checkpoint that was trained on other data may be restored."""
    step: int = 0
    samples: int = 0
    """Position in the data: samples of the endless order that were consumed or skipped."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [a, b) of samples that are skipped, after steps on them failed repeatedly."""

    def next_samples(self, count: int) -> list[int]:
        """The next samples of the endless order that are not skipped."""
        ranges = (range(a, b) for a, b in self.skips)
        skipped = {index for each in ranges for index in each if index >= self.samples}
        remaining = (index for index in itertools.count(self.samples) if index not in skipped)
        return list(itertools.islice(remaining, count))

    def tensor_shards(self) -> dict[str, TensorShard]:
        """The tensors that this rank saves, by "group/name"."""
        shards = self.engine.tensor_shards()
        if self.mesh.world.is_main:
            shards |= {f"rng/{name}": TensorShard.full(x) for name, x in rng_states().items()}
        return {name: shard for name, shard in shards.items() if shard.values.numel()}

    def saved_state(self) -> dict[str, Any]:
        """What is saved besides tensors, as JSON values."""
        return SavedState(
            samples=self.samples,
            scaler=self.engine.scaler_state(),
            norm_average=self.guard.norm_average(),
            skips=[[a, b] for a, b in self.skips],
            resume_key=self.resume_key,
        ).model_dump(mode="json")

    def restore(self, saved: Checkpoint) -> None:
        """Load a checkpoint, which must be of the same model and sample order."""
        try:
            state = SavedState.model_validate(saved.state)
        except ValidationError as error:
            raise UserError(f"the state in {saved.path}: {first_problem(error)}") from error
        _check_unchanged(saved.path, state.resume_key, self.resume_key, self.accepts_other_data)
        check_shapes(self.engine.shapes, saved)
        self.engine.load_weights(lambda name, region: saved.read(f"model/{name}", region))
        self._load_optimizer(saved)
        self.engine.load_scaler_state(state.scaler)
        _set_rng_states({name: saved.read(f"rng/{name}") for name in saved.shapes("rng")})
        self.guard.load_norm_average(state.norm_average)
        saved.close()
        self.step, self.samples = saved.step, state.samples
        self.skips = [(a, b) for a, b in state.skips]

    def roll_back(
        self, folder: Path, skipped_steps: int, global_batch: int, max_rollbacks: int
    ) -> str:
        """Return to the newest checkpoint and skip the samples of the last `skipped_steps` steps.

        Returns a message; raises Diverged if there is no checkpoint, or after `max_rollbacks`.
        """
        last_step, end = self.step, self.samples
        begin = end - skipped_steps * global_batch
        skips = [*self.skips, (begin, end)]
        saved = newest_intact(folder, self.mesh)
        if saved is None or len(skips) > max_rollbacks:
            raise Diverged(
                f"{counted(skipped_steps, 'step')} in a row to step {last_step} had a non-finite "
                "loss or gradient, or a spike of the gradient norm, after "
                f"{counted(len(skips) - 1, 'rollback')}"
                f"{', and there is no checkpoint' * (saved is None)}: lower train.lr"
            )
        self.restore(saved)
        self.skips = skips
        return (
            f"{counted(skipped_steps, 'skipped step')} in a row: rolled back from step "
            f"{last_step} to {self.step}, skipping samples {begin:,} to {end - 1:,}"
        )

    def _load_optimizer(self, saved: Checkpoint) -> None:
        shapes, entries = saved.shapes("model"), []
        for full_name, shape in saved.shapes("optimizer").items():
            name, key = full_name.rsplit(".", 1)
            if name not in shapes or shape not in ((), shapes[name]):
                raise UserError(f"{saved.path} holds {name}.{key} of shape {shape}")
            entries.append((name, key, not shape))
        self.engine.load_optimizer(
            entries, lambda name, region: saved.read(f"optimizer/{name}", region)
        )


def _check_unchanged(
    path: Path, was: Mapping[str, Any], now: Mapping[str, Any], accepts_other_data: bool
) -> None:
    """Refuse a checkpoint that was trained with other settings, and list all that differ."""
    changed = {key for key, value in was.items() if now.get(key) != value}
    lines = [f"  {key} was {was[key]}\n  {key} is  {now.get(key)}" for key in sorted(changed)]
    if changed == {DATA} and accepts_other_data:
        print("\n".join(["longspan: continuing with other data", *lines]), file=sys.stderr)
    elif changed:
        accept = ", or continue with other data by data.accept_changed=true" * (changed == {DATA})
        raise UserError(
            "\n".join([f"{path} was trained with", *lines, "set it back, or start a new run"])
            + accept
        )


def newest_intact(folder: Path, mesh: ParallelMesh) -> Checkpoint | None:
    """The newest checkpoint whose files match their checksums; None if there is none at all.

    The ranks share the checking. A damaged checkpoint is quarantined, and the one before it is
    tried; one that cannot be read, on whichever rank, is an error on all ranks and stays in place.
    """
    world, quarantined = mesh.world, 0
    while True:
        newest = latest(folder) if world.is_main else None
        (step,) = all_reduce_max(mesh, -1 if newest is None else step_of(newest) or 0)
        if step < 0 and quarantined:
            raise UserError(f"no checkpoint in {folder} is intact; {quarantined} were quarantined")
        if step < 0:
            return None
        path, problem, kind = checkpoint_path(folder, step), None, 0
        try:
            saved = open_checkpoint(path)
            saved.check(saved.files[world.rank :: world.size])
        except UserError as error:
            problem, kind = error, 1 if isinstance(error, Damaged) else 2
        (worst,) = all_reduce_max(mesh, kind)
        if worst == 0:
            return saved
        if worst == 1 and world.is_main:
            try:
                quarantine(path)
            except OSError as error:
                problem, worst = UserError(f"cannot quarantine {path}: {error}"), 2
        (worst,) = all_reduce_max(mesh, worst)
        if worst == 2:
            raise problem or UserError(f"another rank could not read {path}")
        if problem is not None:
            print(f"longspan: {problem}; it is quarantined", file=sys.stderr)
        quarantined += 1


def rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
