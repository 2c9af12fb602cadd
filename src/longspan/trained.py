"""Load a run's model from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longspan.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    check_shapes,
    latest,
    open_checkpoint,
    read_key,
)
from longspan.config import Run
from longspan.device import choose_device, resolve
from longspan.errors import UserError
from longspan.models import Decoder, build_decoder, parameter_shapes
from longspan.runfile import ONE_PROCESS, load_run, saved_run_file


def load_weights(
    run_dir: str | Path, group: str = "model", *, key_file: str = ""
) -> dict[str, Tensor]:
    """The tensors of a run's newest checkpoint, by name: whole, in host memory, verified.

    `group`: "model", "optimizer" (names end in their kind, as in `head.weight.exp_avg`) or
    "buffers". With `key_file` the checkpoint must be signed with the key in it.
    """
    saved = _newest(Path(run_dir), key_file)
    saved.check(saved.files_of(group))
    return {name: saved.read(f"{group}/{name}") for name in saved.shapes(group)}


def _newest(run_dir: Path, key_file: str) -> Checkpoint:
    path = latest(run_dir / CHECKPOINTS)
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint")
    return open_checkpoint(path, read_key(key_file))


def load_trained(run_dir: Path, key_file: str = "") -> tuple[Run, Decoder, int]:
    """Load the run file and the model of the newest checkpoint, and return them with its step.

    The checkpoint must be signed with the key in `key_file`, or else in the run's.
    """
    overrides = ["train.device=auto", "train.precision=auto", *ONE_PROCESS]
    run = load_run(saved_run_file(run_dir), overrides)
    device = choose_device(run)
    run = resolve(run, device)
    model = build_decoder(run, device)
    saved = _newest(run_dir, key_file or run.checkpoint.key_file)
    saved.check(saved.files_of("model"))
    check_shapes(parameter_shapes(model), saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.read(f"model/{name}"))
    return run, model, saved.step
