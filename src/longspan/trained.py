"""Load trained models: a run's newest checkpoint, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longspan.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    Region,
    check_shapes,
    latest,
    open_checkpoint,
    read_key,
)
from longspan.config import Data, Run
from longspan.device import choose_device, resolve
from longspan.errors import UserError
from longspan.export.huggingface import weight_reader
from longspan.export.lora import base_reader, check_base
from longspan.hf_config import read_folder_config
from longspan.models import Decoder, new_decoder, stored_shapes
from longspan.models.initial import allocate
from longspan.parallel.dtensor import distribute_like
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.tensor import apply_tensor_parallel
from longspan.runfile import ONE_PROCESS, RUN_FILE, load_run, saved_run_file
from longspan.runfile.reading import parse_override
from longspan.wording import toml_value

HERE = [
    "train.device=auto",
    "train.precision=auto",
    "train.parameter_precision=fp32",
    "train.residual_precision=fp32",
    "train.fp8=false",
    "train.mlp_tile_tokens=0",
    "train.cuda_graphs=auto",
    *ONE_PROCESS,
]
"""Overrides with which a run's model is used on this machine, in one process."""


def load_weights(
    run_dir: str | Path, group: str = "model", *, key_file: str = ""
) -> dict[str, Tensor]:
    """The tensors of a run's newest checkpoint, by name: whole, in host memory, verified.

    `group`: "model", "optimizer" (names end in their kind, as in `head.weight.exp_avg`),
    "ema" or "buffers". With `key_file` the checkpoint must be signed with the key in it.
    """
    saved = _newest(Path(run_dir), key_file)
    saved.check(saved.files_of(group))
    return {name: saved.read(f"{group}/{name}") for name in saved.shapes(group)}


def _newest(run_dir: Path, key_file: str) -> Checkpoint:
    path = latest(run_dir / CHECKPOINTS)
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint")
    return open_checkpoint(path, read_key(key_file))


def is_huggingface_folder(folder: Path) -> bool:
    """Whether this is a folder of `transformers`, and not of a run."""
    return (folder / "config.json").is_file() and not (folder / RUN_FILE).exists()


def load_trained(
    run_dir: Path,
    key_file: str = "",
    overrides: Sequence[str] = (),
    mesh: ParallelMesh | None = None,
    *,
    ema: bool = False,
) -> tuple[Run, Decoder, int]:
    """Load the run file and the model of the newest checkpoint, and return them with its step.

    The checkpoint must be signed with the key in `key_file`, or else in the run's. The ranks of a
    `mesh` split the model by tensor parallelism. With `ema` its weights are the averages of
    `train.ema`.
    """
    file, world = saved_run_file(run_dir), mesh.world.size if mesh else 1
    trained = load_run(file, HERE)
    # A theta that follows from the context is that of training, whatever context it is used with.
    theta = f"model.rope_theta={trained.model.rope_theta_for(trained.data.context)}"
    if trained.data.mix is not None:  # which another source takes the place of
        overrides = [_instead_of_mix(override) for override in overrides]
    run = load_run(file, [*HERE, theta, *overrides], world=world) if overrides else trained
    run, model = _build(run, mesh)
    saved = _newest(run_dir, key_file or run.checkpoint.key_file)
    if ema:
        saved.read_averages()
    saved.check(saved.files_of("model"))
    stored = stored_shapes(model)
    check_shapes(stored, saved)
    base = None
    if run.model.lora.rank:
        check_base(run, saved)
        base = base_reader(run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in stored:
                parameter.copy_(distribute_like(saved.read(f"model/{name}"), parameter))
            elif base is not None:
                full = base(name, Region.full(tuple(parameter.shape)))
                parameter.copy_(distribute_like(full, parameter))
    return run, model, saved.step


def _instead_of_mix(override: str) -> str:
    """An override that sets data.source as one that sets the mixture."""
    keys, value = parse_override(override)
    is_source = keys == ("data", "source")
    return f"data.mix=[{{source={toml_value(value)}}}]" if is_source else override


def load_huggingface(
    folder: Path, overrides: Sequence[str] = (), mesh: ParallelMesh | None = None
) -> tuple[Run, Decoder]:
    """Load the model of a Hugging Face folder; the ranks of a `mesh` split it.

    Its context is what it was trained on, at most the default, unless `overrides` set data.context;
    RoPE is that of its config.json all the same, as in transformers.
    """
    context = min(Data().context, read_folder_config(folder).max_positions)
    own = [f"model.from={folder}", f"data.context={context}", "train.micro_batch=1"]
    own += ["train.global_batch=1", "model.extend_context=none"]
    world = mesh.world.size if mesh else 1
    run, model = _build(load_run(None, [*own, *HERE, *overrides], world=world), mesh)
    read = weight_reader(folder, run)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = read(name, Region.full(tuple(parameter.shape)))
            parameter.copy_(distribute_like(full, parameter))
    return run, model


def _build(run: Run, mesh: ParallelMesh | None) -> tuple[Run, Decoder]:
    """The run with what this machine's device decides, and its model there, uninitialised."""
    device = choose_device(run, mesh.world.local_rank if mesh else 0)
    run = resolve(run, device)
    model = new_decoder(run)
    if mesh and mesh.ranks["tensor"] > 1:
        apply_tensor_parallel(model, mesh["tensor"])
    allocate(model, device)
    return run, model
