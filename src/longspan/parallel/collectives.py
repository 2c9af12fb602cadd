"""Collectives by which the ranks of a mesh agree on values. In one process they return their input.

The message after every step goes over the CPU, so that it does not wait for a GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.parallel.mesh import ParallelMesh


def all_reduce_max(mesh: ParallelMesh, *values: int) -> list[int]:
    """The largest of each value over all ranks."""
    if mesh.device_mesh is None:
        return list(values)
    largest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(x) for x in largest]


def all_reduce_any(mesh: ParallelMesh, *flags: bool) -> list[bool]:
    """Whether each flag is true on any rank."""
    return [bool(x) for x in all_reduce_max(mesh, *map(int, flags))]


def all_gather_floats(mesh: ParallelMesh, *values: float) -> list[list[float]]:
    """The values of every rank, in order of rank."""
    local = torch.tensor(values, dtype=torch.float64)
    if mesh.device_mesh is None:
        return [local.tolist()]
    ranks = [torch.empty_like(local) for _ in range(mesh.world.size)]
    dist.all_gather(ranks, local)
    return [rank.tolist() for rank in ranks]


def all_reduce_loss(mesh: ParallelMesh, x: Tensor, *, pipeline: bool = True) -> Tensor:
    """The sum of `x`, in place, over the ranks with different tokens and over pipeline ranks.

    `pipeline`: false if every pipeline rank already has the loss of the last stage.
    """
    for axis in ("replicate", "shard", "pipeline") if pipeline else ("replicate", "shard"):
        if mesh.device_mesh is not None and mesh[axis].size() > 1:
            dist.all_reduce(x, group=mesh.device_mesh.get_group(axis))
    return x
