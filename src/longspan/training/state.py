"""What a run is between two steps, to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from longspan import checkpoint
from longspan.checkpoint import Checkpoint
from longspan.config import Run
from longspan.data import Source
from longspan.errors import Diverged, UserError, first_problem
from longspan.models import Decoder, build_decoder
from longspan.parallel.placement import like, whole
from longspan.runfile import ONE_PROCESS, load_run, saved_run_file
from longspan.training.device import choose_device, resolve
from longspan.training.folder import CHECKPOINTS


class Scalars(BaseModel):
    """What a checkpoint holds beside tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    samples: Annotated[int, Field(ge=0)]
    scaler: dict[str, int | float]
    trained_with: dict[str, Any]


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
        "data SHA-256": source.fingerprint,
    }


@dataclass
class State:
    """Everything a step reads and changes."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    samples: int = 0
    """Position in the data: how many samples of the endless order have been used."""

    def save(
        self, folder: Path, trained_with: dict[str, Any], *, keep: int, is_main: bool = True
    ) -> None:
        """Write a checkpoint that can be resumed under the same `trained_with`.

        Every rank must call it; the main one writes.
        """
        weights = {name: whole(x) for name, x in self.model.state_dict().items()}
        if not all(torch.isfinite(weight).all() for weight in weights.values()):
            raise Diverged(f"weights are not finite after step {self.step}: lower train.lr")
        groups = {"model": weights, "optimizer": self._optimizer_tensors(), "rng": _rng()}
        if not is_main:
            return
        scalars = Scalars(
            samples=self.samples, scaler=self.scaler.state_dict(), trained_with=trained_with
        )
        checkpoint.save(folder, self.step, groups, scalars.model_dump())
        checkpoint.prune(folder, keep)

    def restore(self, saved: Checkpoint, trained_with: dict[str, Any]) -> None:
        """Take over a checkpoint, which must be of the same model and order of samples."""
        try:
            scalars = Scalars.model_validate(saved.state)
        except ValidationError as error:
            raise UserError(f"the state in {saved.path}: {first_problem(error)}") from error
        for key, was in scalars.trained_with.items():
            if trained_with.get(key) != was:
                raise UserError(
                    f"{saved.path} was trained with {key} = {was}, and the run has "
                    f"{trained_with.get(key)}: set it back, or start a new run"
                )
        load_weights(self.model, saved)
        self._load_optimizer(saved.groups["optimizer"])
        if scalars.scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict(scalars.scaler)
        _set_rng(saved.groups["rng"])
        self.step, self.samples = saved.step, scalars.samples

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": whole(value)
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for full_name, value in tensors.items():
            name, key = full_name.rsplit(".", 1)
            parameter = parameters[name]
            # A fused optimizer keeps its step counter beside the parameter too.
            placed = like(value, parameter) if value.dim() else value.to(parameter.device)
            self.optimizer.state[parameter][key] = placed


def load_weights(model: Decoder, saved: Checkpoint) -> None:
    """Put a checkpoint's weights into `model`, or say which tensor does not fit."""
    own, found = model.state_dict(), saved.groups["model"]
    for name in sorted(own.keys() | found.keys()):
        shapes = [tuple(t[name].shape) if name in t else None for t in (own, found)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"the run's model and {saved.path} differ at {name}: the run has {shapes[0]}, the "
                f"checkpoint {shapes[1]}; resume with the [model] it was trained with"
            )
    model.load_state_dict({name: like(found[name], own[name]) for name in own})


def load_trained(run_dir: Path) -> tuple[Run, Decoder, int]:
    """The run file, the model at its newest checkpoint, and that checkpoint's step."""
    overrides = ["train.device=auto", "train.precision=auto", *ONE_PROCESS]
    run = load_run(saved_run_file(run_dir), overrides)
    device = choose_device(run)
    run = resolve(run, device)
    path = checkpoint.latest(run_dir / CHECKPOINTS)
    if path is None:
        raise UserError(f"{run_dir} holds no checkpoint yet")
    saved = checkpoint.load(path, groups=("model",))
    model = build_decoder(run, device)
    load_weights(model, saved)
    return run, model, saved.step


def _rng() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
