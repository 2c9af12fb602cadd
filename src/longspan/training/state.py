"""The state of a run between two steps, to and from a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from torch.optim import Optimizer

from longspan.checkpoint import (
    Checkpoint,
    Region,
    TensorShard,
    check_shapes,
    checkpoint_path,
    latest,
    open_checkpoint,
    quarantine,
    step_of,
)
from longspan.config import Attention, Model, Run
from longspan.costs import is_adapter
from longspan.data import Source
from longspan.engines import Engine
from longspan.engines.average import EMA
from longspan.engines.protocol import ReadTensor
from longspan.errors import Damaged, Diverged, UserError, first_problem
from longspan.export.lora import base_key
from longspan.parallel.collectives import all_reduce_max
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import persistent_buffers
from longspan.training.guard import Guard, NormAverage
from longspan.training.optimizer_state import (
    check_averages,
    check_optimizer,
    check_own_optimizer,
    group_of_average,
    read_optimizer,
)
from longspan.wording import counted

MAX_SAMPLES, MAX_SKIPPED = 1 << 40, 1 << 32
"""More samples than a run can consume, and than it skips after steps that failed."""
Sample = Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
SCALER = {
    "scale": (2.0**-100, 2.0**100),
    "growth_factor": (1.0, 2.0**10),
    "backoff_factor": (2.0**-10, 1.0),
    "growth_interval": (1, 10**9),
    "_growth_tracker": (0, 10**9),
}
"""The state of fp16's loss scale, and what it may be."""
MERSENNE_TWISTER = slice(24, 24 + 624 * 8)
"""The words of the CPU's generator within the bytes of its state."""
GROUPS = {"model", "optimizer", "rng", "buffers", EMA}


class SavedState(BaseModel):
    """What a checkpoint holds besides tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    samples: Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
    scaler: dict[str, int | float]
    norm_average: NormAverage = NormAverage()
    skips: Annotated[list[tuple[Sample, Sample]], Field(max_length=1000)] = []
    resume_key: dict[str, Any]

    @model_validator(mode="after")
    def _is_plausible(self) -> SavedState:
        for a, b in self.skips:
            if not a < b <= min(self.samples, a) + MAX_SKIPPED:
                raise ValueError(
                    f"samples {a:,} to {b:,} cannot be skipped after {self.samples:,} samples"
                )
        for key, (low, high) in SCALER.items() if self.scaler else ():
            if not low <= self.scaler.get(key, -1) <= high:
                raise ValueError(f"scaler.{key} is {self.scaler.get(key)}, not {low} to {high}")
        if unknown := self.scaler.keys() - SCALER.keys():
            raise ValueError(f"scaler.{min(unknown)} is unknown")
        return self


DATA = "data"


def resume_key(run: Run, source: Source) -> dict[str, Any]:
    """What fixes the model's function and the sample order, and so may not change on resume."""
    return {
        **_sections(run.model, run.attention),
        "data.context": run.data.context,
        "data.documents": "isolate" if run.data.isolates else "join",
        "train.seed": run.train.seed,
        "train.freeze": list(run.train.freeze),
        "train.ema": run.train.ema,
        **base_key(run),
        DATA: f"{source.describe()}; SHA-256 {source.fingerprint}",
    }


def _sections(model: Model, attention: Attention) -> dict[str, Any]:
    left_out = {"preset", "factory", "from", "extend_context", "max_positions"}
    if model.head_dim * model.heads == model.hidden:  # the default, which follows from the others
        left_out.add("head_dim")
    return {
        f"{section}.{key}": value
        for section, keys in (("model", model), ("attention", attention))
        for key, value in keys.model_dump(mode="json").items()
        if key not in left_out
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
    key: bytes | None = None
    """The key that checkpoints must be signed with."""
    set_learning_rate: Callable[[Optimizer, int], None] | None = None
    """Sets the learning rate of the step after so many; by default that of [train]."""
    has_own_optimizer: bool = False
    """Whether the optimizer is the user's, with whatever state it keeps for some parameters."""
    frozen_weights: ReadTensor | None = None
    """Reads the weights that LoRA freezes, which checkpoints do not hold."""
    step: int = 0
    samples: int = 0
    """Position in the data: samples of the endless order that were consumed or skipped."""
    skips: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [a, b) of samples that are skipped, after steps on them failed repeatedly."""
    is_whole: bool = True
    """Whether all of it is of `step`: false while a step is applied or a checkpoint restored."""
    reported: int = 0
    """The newest step whose metrics, save and evaluation are done."""

    def next_samples(self, count: int) -> list[int]:
        """The next samples of the endless order that are not skipped."""
        samples: list[int] = []
        index = self.samples
        while len(samples) < count:
            end = max((b for a, b in self.skips if a <= index < b), default=None)
            if end is None:
                samples.append(index)
            index = index + 1 if end is None else end
        return samples

    def tensor_shards(self) -> dict[str, TensorShard]:
        """The tensors that this rank saves, by "group/name"."""
        shards = {group_of_average(n): x for n, x in self.engine.tensor_shards().items()}
        if self.mesh.world.is_main:
            shards |= {f"rng/{name}": TensorShard.full(x) for name, x in rng_states().items()}
            buffers = persistent_buffers(self.engine.model)
            shards |= {f"buffers/{name}": TensorShard.full(x) for name, x in buffers.items()}
        return {name: shard for name, shard in shards.items() if shard.values.numel()}

    def saved_state(self) -> dict[str, Any]:
        """What is saved besides tensors, as JSON values."""
        return SavedState(
            samples=self.samples,
            scaler=self.engine.scaler_state(),
            norm_average=self.guard.norm_average(),
            skips=self.skips,
            resume_key=self.resume_key,
        ).model_dump(mode="json")

    def restore(self, saved: Checkpoint) -> None:
        """Load a checkpoint, which must be of the same model and sample order."""
        state = read_saved_state(saved)
        _check_unchanged(saved.path, state.resume_key, self.resume_key, self.accepts_other_data)
        base = self.frozen_weights
        stored = {n: x for n, x in self.engine.shapes.items() if base is None or is_adapter(n)}
        check_shapes(stored, saved)
        _check_groups(saved)
        if self.has_own_optimizer:
            optimizer = check_own_optimizer(saved)
        else:
            has_stepped = state.norm_average.steps > 0
            optimizer = check_optimizer(saved, self.engine, has_stepped=has_stepped)
            optimizer += check_averages(saved, self.engine, has_stepped=has_stepped)
        buffers = _read_buffers(saved, persistent_buffers(self.engine.model))
        rng = _read_rng_states(saved)
        self.is_whole = False

        def read(name: str, region: Region) -> Tensor:
            if base is not None and name not in stored:
                return base(name, region)
            return saved.read(f"model/{name}", region)

        self.engine.load_weights(read)
        for buffer, values in buffers:
            buffer.copy_(values)
        self.engine.load_optimizer(optimizer, partial(read_optimizer, saved))
        self.engine.load_scaler_state(state.scaler)
        set_rng_states(rng, saved.path)
        self.guard.load_norm_average(state.norm_average)
        saved.close()
        self.step, self.samples = saved.step, state.samples
        self.skips = list(state.skips)
        self.is_whole, self.reported = True, self.step

    def roll_back(
        self, folder: Path, skipped_steps: int, global_batch: int, max_rollbacks: int
    ) -> str:
        """Return to the newest checkpoint and skip the samples of the last `skipped_steps` steps.

        Returns a message; raises Diverged if there is no checkpoint, or after `max_rollbacks`.
        """
        last_step, end = self.step, self.samples
        begin = end - skipped_steps * global_batch
        skips = [*self.skips, (begin, end)]
        saved = newest_intact(folder, self.mesh, self.key)
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


def read_saved_state(saved: Checkpoint) -> SavedState:
    """Read what a checkpoint holds besides tensors; what cannot be is a UserError."""
    try:
        # As JSON: strict validation does not take its lists for tuples.
        state = SavedState.model_validate_json(json.dumps(saved.state))
    except ValidationError as error:
        raise UserError(f"the state in {saved.path}: {first_problem(error)}") from error
    if state.samples < saved.step or state.norm_average.steps > saved.step:
        raise UserError(
            f"the state in {saved.path}: step {saved.step} does not fit {state.samples:,} samples "
            f"and {state.norm_average.steps:,} steps with a gradient norm"
        )
    return state


def _check_groups(saved: Checkpoint) -> None:
    if unknown := saved.groups - GROUPS:
        raise UserError(f"{saved.path} holds tensors of an unknown kind: {min(unknown)}")


def _read_buffers(saved: Checkpoint, buffers: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The model's buffers, each with its values in a checkpoint."""
    found = saved.shapes("buffers")
    buffers = {name: x for name, x in buffers.items() if x.numel()}  # as `tensor_shards` has them
    if found.keys() != buffers.keys():
        name = min(found.keys() ^ buffers.keys())
        where = "only in the checkpoint" if name in found else "not in the checkpoint"
        raise UserError(f"the buffer {name} of this model is {where} {saved.path}")
    pairs = []
    for name, buffer in buffers.items():
        values = saved.read(f"buffers/{name}")
        if values.shape != buffer.shape or values.dtype != buffer.dtype:
            raise UserError(
                f"the buffer {name} in {saved.path} is {values.dtype} of shape "
                f"{tuple(values.shape)}, expected {buffer.dtype} of shape {tuple(buffer.shape)}"
            )
        pairs.append((buffer, values))
    return pairs


def _check_unchanged(
    path: Path, was: Mapping[str, Any], now: Mapping[str, Any], accepts_other_data: bool
) -> None:
    """Refuse a checkpoint that was trained with other settings, and list all that differ.

    A key of [model], [attention] or [data] that it does not have is of a later version, and so had
    its default.
    """
    defaults = {
        **_sections(Model(), Attention()),
        "data.documents": "join",
        "train.freeze": [],
        "train.ema": 0.0,
    }
    was = {**{key: value for key, value in defaults.items() if key in now}, **was}
    changed = {key for key in was.keys() | now.keys() if now.get(key) != was.get(key)}
    lines = [f"  {key} was {was.get(key)}\n  {key} is  {now.get(key)}" for key in sorted(changed)]
    if changed == {DATA} and accepts_other_data:
        print("\n".join(["longspan: continuing with other data", *lines]), file=sys.stderr)
    elif changed:
        accept = ", or continue with other data by data.accept_changed=true" * (changed == {DATA})
        raise UserError(
            "\n".join([f"{path} was trained with", *lines, "set it back, or start a new run"])
            + accept
        )


def newest_intact(folder: Path, mesh: ParallelMesh, key: bytes | None = None) -> Checkpoint | None:
    """The newest checkpoint whose files match their checksums; None if there is none at all.

    With `key` it must be signed with that key; one that is not is an error and stays in place.
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
            saved = open_checkpoint(path, key)
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


def _read_rng_states(saved: Checkpoint) -> dict[str, Tensor]:
    """The generators' states in a checkpoint, if they can be those of this machine's generators."""
    expected = rng_states()
    found = saved.shapes("rng")
    if unknown := found.keys() - {"cpu", "cuda"}:
        raise UserError(f"{saved.path} holds the state of an unknown generator: {min(unknown)}")
    states = {}
    for name in {"cpu"} | (found.keys() & expected.keys()):
        shape = tuple(expected[name].shape)
        if found.get(name) != shape or saved.dtype(f"rng/{name}") != "U8":
            raise UserError(
                f"{saved.path}: the state of the {name} random number generator has shape "
                f"{found.get(name)}, expected {shape} bytes"
            )
        states[name] = saved.read(f"rng/{name}")
        if name == "cpu" and not states[name][MERSENNE_TWISTER].any():  # it would draw only zeros
            raise UserError(f"{saved.path}: the state of the {name} generator is all zeros")
    return states


def set_rng_states(states: Mapping[str, Tensor], path: Path) -> None:
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
    except RuntimeError as error:
        raise UserError(f"{path}: the state of a random number generator: {error}") from error
