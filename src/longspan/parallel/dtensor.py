"""Between plain tensors and DTensors: local shards, their offsets, and conversion both ways."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from longspan import torch_internals


def to_local(x: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_offset(x: Tensor) -> tuple[int, ...]:
    """Where in the full tensor this rank's shard begins."""
    return torch_internals.local_offset(x) if isinstance(x, DTensor) else (0,) * x.dim()


def num_shards(x: Tensor) -> int:
    """The number of different shards that a tensor is split into."""
    if not isinstance(x, DTensor):
        return 1
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def from_local_like(shard: Tensor, reference: Tensor) -> Tensor:
    """A rank's shard as a tensor with the mesh, placements and device of `reference`."""
    if not isinstance(reference, DTensor):
        return shard.to(reference.device)
    mesh, placements = reference.device_mesh, reference.placements
    # Built on the mesh's device: parameters offloaded to CPU have left it.
    shape, stride = reference.shape, reference.stride()
    shard = shard.to(mesh.device_type)
    x = DTensor.from_local(shard, mesh, placements, shape=shape, stride=stride)
    return x.to(reference.device)


def distribute_like(full: Tensor, reference: Tensor) -> Tensor:
    """`full` with the mesh, placements and device of `reference`; each rank keeps its shard."""
    if not isinstance(reference, DTensor):
        return full.to(reference.device)
    mesh, placements = reference.device_mesh, reference.placements
    x = distribute_tensor(full.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return x.to(reference.device)


def reduced_grad(parameter: Tensor) -> Tensor | None:
    """This rank's shard of a gradient, in the parameter's placements.

    A gradient may still be a partial sum over some mesh axis; it is reduced here.
    """
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return None if parameter.grad is None else to_local(parameter.grad)
