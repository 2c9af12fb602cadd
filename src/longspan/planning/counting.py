"""Which part of each parameter a rank holds, counted: the independent check of `parameters.py`.

The training code parallelizes the run's model on the meta device, as one rank of a world without
processes (torch's "fake" backend), and what it leaves on that rank is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.config import Run
from longspan.models import new_decoder
from longspan.parallel.apply import parallelize
from longspan.parallel.dtensor import to_local
from longspan.parallel.mesh import ParallelMesh, init_parameter_mesh
from longspan.parallel.parameters import named_parameters
from longspan.parallel.world import World
from longspan.planning.fake_world import fake_world
from longspan.planning.parameters import ModelSplit, RankParameter, parameters_differ
from longspan.sketching import SKLinear


class Counted(NamedTuple):
    """What a rank holds."""

    parameters: list[RankParameter]
    signs: int
    """Bytes of the signs of sketched layers."""


def counted_parameters(run: Run, gpus: int, rank: int) -> Counted:
    """Count what `rank` holds when `gpus` processes train `run` natively.

    The process must have no process group, unless `gpus` is 1.
    """
    fewer, blocks = _fewer_layers(run, gpus)
    model = new_decoder(fewer)
    with fake_rank(run, gpus, rank) as mesh:
        parallelize(model, mesh, run.layout, run.train)
        found = [_counted(name, p, blocks) for name, p in named_parameters(model)]
    signs = sum(
        blocks[int(name.split("blocks.")[1].split(".")[0])][1] * x.nbytes
        for name, module in model.named_modules()
        if isinstance(module, SKLinear)
        for x in module.buffers()
    )
    return Counted(found, signs)


def _fewer_layers(run: Run, gpus: int) -> tuple[Run, list[tuple[int, int]]]:
    """A run with one block for all that are the same in a pipeline stage.

    Building blocks takes most of the time. Also returns, for each block of it, the first block of
    `run` that it stands for, and how many.
    """
    if parameters_differ(run):
        return run, [(block, 1) for block in range(run.model.layers)]
    stages = ModelSplit(run, gpus).stages
    layers = [range(run.model.layers)] if stages is None else stages.layers
    blocks = [(x[0], len(x)) for x in layers]
    fewer = run.model.model_copy(update={"layers": len(blocks)})
    return run.model_copy(update={"model": fewer}), blocks


def _counted(name: str, parameter: Tensor, blocks: list[tuple[int, int]]) -> RankParameter:
    gathered, local, copies = _gathered(parameter), to_local(parameter).numel(), 1
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        first, copies = blocks[int(index)]
        name = f"blocks.{first}.{rest}"
    return RankParameter(name, local, gathered, copies)


def _gathered(parameter: Tensor) -> int:
    """Elements of a parameter after FSDP2's all-gather: all, or a tensor-parallel shard."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, shards = parameter.device_mesh, 1
    for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if axis == "tensor" and not placement.is_replicate():
            shards = mesh[axis].size()
    return -(-parameter.numel() // shards)


@contextmanager
def fake_rank(run: Run, world: int, rank: int) -> Iterator[ParallelMesh]:
    """One rank of a fake world."""
    this = World(rank, world, rank)
    if world == 1:
        yield ParallelMesh(run.layout, this)
        return
    with fake_world(rank, world):
        mesh = init_parameter_mesh(run.layout.resolve(world), torch.device("cpu"))
        yield ParallelMesh(run.layout, this, mesh)
