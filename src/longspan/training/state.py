"""What a run is between two steps, to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan import checkpoint
from longspan.checkpoint import Checkpoint
from longspan.config import Run
from longspan.errors import UserError
from longspan.models import Decoder, build_decoder
from longspan.runfile import load_run
from longspan.training.device import choose_device, resolve
from longspan.training.folder import CHECKPOINTS, saved_run_file


@dataclass
class State:
    """Everything a step reads and changes."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0
    samples: int = 0
    """Position in the data: how many samples of the endless order have been used."""

    def save(self, folder: Path, order: dict[str, Any], *, keep: int) -> Path:
        """Write a checkpoint; `order` is what, with `samples`, fixes the place in the data."""
        groups = {
            "model": dict(self.model.state_dict()),
            "optimizer": self._optimizer_tensors(),
            "rng": _rng(),
        }
        scalars = {
            "samples": self.samples,
            "order": order,
            "scaler": self.scaler.state_dict(),
        }
        path = checkpoint.save(folder, self.step, groups, scalars)
        checkpoint.prune(folder, keep)
        return path

    def restore(self, saved: Checkpoint, order: dict[str, Any]) -> None:
        """Take over a checkpoint, which must be of the same model and order of samples."""
        for key, was in saved.state["order"].items():
            if order[key] != was:
                raise UserError(
                    f"the data is not what {saved.path} was trained on: its {key} is "
                    f"{order[key]}, was {was}; set it back, or start a new run"
                )
        load_weights(self.model, saved)
        self._load_optimizer(saved.groups["optimizer"])
        self.scaler.load_state_dict(saved.state["scaler"])
        _set_rng(saved.groups["rng"])
        self.step, self.samples = saved.step, saved.state["samples"]

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for full_name, value in tensors.items():
            name, key = full_name.rsplit(".", 1)
            parameter = parameters[name]
            # A fused optimizer keeps its step counter beside the parameter too.
            self.optimizer.state[parameter][key] = value.to(parameter.device)


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
    model.load_state_dict(found)


def load_trained(run_dir: Path) -> tuple[Run, Decoder, int]:
    """The run file, the model at its newest checkpoint, and that checkpoint's step."""
    run = load_run(saved_run_file(run_dir), ["train.device=auto"])
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
