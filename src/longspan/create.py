"""`create_model`: the run's model for your own training loop, whole or laid out over ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import overload

import torch
import torch.distributed as dist
from torch import nn

from longspan.checks import layout_problems
from longspan.config import Run
from longspan.device import autocast, check_fp8, choose_device, resolve
from longspan.errors import UserError
from longspan.models import Decoder, build_decoder, new_decoder
from longspan.parallel.apply import apply_to_blocks, materialize, parallelize
from longspan.parallel.mesh import (
    choose_backend,
    device_type_of,
    init_lone_process_group,
    open_mesh,
)
from longspan.parallel.world import World, world_of_environment
from longspan.runfile import load_run
from longspan.wording import toml_value

OF_MODEL = (
    *("model.", "attention.", "data.source", "data.mix", "data.context", "data.documents"),
    *("train.seed", "train.activation_checkpointing", "train.recompute_layers"),
    *("train.compile", "train.fp8", "train.mlp_tile_tokens"),
)
"""Keys of a run that decide its model."""
OF_LAYOUT = (
    *("layout.", "train.device", "train.precision"),
    *("train.micro_batch", "train.global_batch"),
)
"""Keys that decide how it is laid out."""


@overload
def create_model(*items: str | Path, device: torch.device | str | None = None) -> Decoder: ...


@overload
def create_model(
    *items: str | Path,
    device: torch.device | str | None = None,
    layout: Mapping[str, int | bool | str] | None,
) -> nn.Module: ...


def create_model(
    *items: str | Path,
    device: torch.device | str | None = None,
    layout: Mapping[str, int | bool | str] | None = None,
) -> nn.Module:
    """A model for your own training loop, from what `longspan train` takes: run file and overrides.

    `create_model("run.toml", "model.hidden=256")(tokens, targets)`, both (batch, tokens), returns
    the summed cross-entropy; targets of −100 are ignored. Without targets it returns the logits
    (batch, tokens, vocab). The whole model is on `device`, by default the CPU. The run's
    `train.fp8`, `train.mlp_tile_tokens`, `train.activation_checkpointing`, `train.recompute_layers`
    and `train.compile = true` apply to its blocks.

    With `layout`, keys of [layout] that override the run's (`layout={"tensor": 2}`; `{}` takes the
    run's), each process of an initialised process group gets its share of the model: DDP, FSDP2,
    tensor, sequence (context) and pipeline parallelism as in `longspan train`, by default on the
    GPU of its local rank, or on the CPU if the group has no NCCL. A single process needs no group.

    - Gradients are averaged over the ranks that read different tokens: divide each rank's loss by
      the number of its own targets.
    - With a sequence axis a rank passes its tokens of each sample: `tokens[:, model.positions]`.
    - With a pipeline axis a step is `model.backward(tokens, targets, scale)` over all its
      micro-batches, instead of a forward and a backward pass.
    - `train.precision = "auto"` is fp32 here. With "bf16" and "fp16" sharded blocks are gathered
      in 16 bits: call the model under `torch.autocast`.
    """
    files = [item for item in map(str, items) if "=" not in item]
    if len(files) > 1:
        raise UserError(f"expected one run file, got {', '.join(files)}")
    file = Path(files[0]) if files else None
    overrides = [item for item in map(str, items) if "=" in item]
    own = [] if file else ["train.device=auto"]  # the built-in run is on the CPU
    run = load_run(file, [*own, *overrides], world=None)
    _check_weights(run)
    _check_effect(overrides, has_layout=layout is not None)
    if layout is None:
        where = torch.device(device or "cpu")
        check_fp8(run.train, where)
        model = build_decoder(run, where)
        apply_to_blocks(model, run.train)
        return model
    world = _world()
    overrides = [*own, *overrides]
    overrides += [f"layout.{key}={toml_value(value)}" for key, value in layout.items()]
    run = load_run(file, _with_batch(file, overrides, world.size), world=world.size)
    _check_layout(run)
    if device is None and dist.is_initialized() and run.train.device == "auto":
        device = None if device_type_of() == "cuda" else "cpu"
    where = choose_device(run, world.local_rank) if device is None else torch.device(device)
    if run.train.precision == "auto":
        train = run.train.model_copy(update={"precision": "fp32"})
        run = run.model_copy(update={"train": train})
    check_fp8(run.train, where)
    run = resolve(run, where)
    decoder = new_decoder(run)
    if run.layout.offload and not dist.is_initialized():
        init_lone_process_group(choose_backend(run.layout, 1, where))
    with open_mesh(run.layout, world, where) as mesh:  # which leaves the process group open
        module = parallelize(decoder, mesh, run.layout, run.train, partial(autocast, run.train))
        return materialize(module, decoder, mesh, run.layout, run.train, where)


def _world() -> World:
    """This process among those of the process group."""
    if not dist.is_initialized():
        world = world_of_environment()
        if world.size > 1:
            raise UserError(
                f"create_model(layout=…) needs the process group of its {world.size} processes: "
                "call torch.distributed.init_process_group() first"
            )
        return world
    rank = dist.get_rank()
    local_rank = os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count()))
    return World(rank, dist.get_world_size(), int(local_rank))


def _with_batch(file: Path | None, overrides: list[str], world: int) -> list[str]:
    """The overrides with a global batch that fits `world` processes.

    Only a pipeline, whose schedule depends on the number of micro-batches, uses the run's.
    """
    run = load_run(file, overrides, world=None)
    if run.layout.pipeline != 1 or layout_problems(run.layout.ranks(), world):
        return overrides
    ranks = run.layout.resolve(world)
    batch = run.train.micro_batch * ranks["replicate"] * ranks["shard"]
    return [*overrides, f"train.global_batch={batch}"]


def _check_effect(overrides: list[str], *, has_layout: bool) -> None:
    """Refuse overrides that change nothing of the model; a run file may have them."""
    for item in overrides:
        key, _, value = item.partition("=")
        if key.startswith(OF_MODEL) or (has_layout and key.startswith(OF_LAYOUT)):
            continue
        if not key.startswith(OF_LAYOUT):
            raise UserError(f"{item} has no effect on a model: leave it out")
        name = key.removeprefix("layout.")
        layout = f"{{{name!r}: {value}}}" if name != key else "{}"
        raise UserError(f"{item} has no effect without layout: pass layout={layout}")


def _check_weights(run: Run) -> None:
    if run.train.init_from:
        raise UserError(
            f"create_model initialises a model from train.seed, but train.init_from is "
            f"{run.train.init_from}: leave it out and load the weights yourself, or use "
            "`longspan train`, which loads them"
        )


def _check_layout(run: Run) -> None:
    if run.engine.name != "native":
        raise UserError(
            f"create_model(layout=…) lays the model out by PyTorch, but engine.name is "
            f"{run.engine.name!r}: leave layout out and pass the model to that engine, or use "
            "`longspan train`"
        )
    if run.train.chunk_tokens:
        raise UserError(
            f"create_model(layout=…) does not support train.chunk_tokens = "
            f"{run.train.chunk_tokens}: set 0, or use `longspan train`"
        )
    if run.train.offload_activations:
        raise UserError(
            "create_model(layout=…) does not support train.offload_activations = true: set false "
            "and use torch.autograd.graph.save_on_cpu in your loop, or use `longspan train`"
        )
