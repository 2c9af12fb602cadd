"""A model placed on a mesh of processes: replicated, sharded, split by tensor, or all of these.

- tensor: each rank holds some of the heads, of the MLP's width and of the vocabulary; activations
  between blocks are whole. Applied first, see `tensor.py`.
- replicate alone: every rank holds the model; DDP sums the gradients.
- shard: FSDP2 splits parameters, gradients and optimizer state over the axis; with replicate beside
  it, each group of ranks shards a copy (hybrid sharding).

With ZeRO stage 1 gradients stay whole until a step's last micro-batch; with 2 those of each
micro-batch are scattered at once; with 3 parameters too are dropped after each block's forward pass
and gathered again for its backward pass. All three keep one share of the optimizer's state.

The loss of a step is one sum over all its tokens, so gradients are summed over ranks. DDP and FSDP
average them; the loss is multiplied by the number of ranks beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from longspan.config import Layout
from longspan.models import Decoder
from longspan.parallel.tensor import split_by_tensor
from longspan.parallel.world import World


class Placement:
    """Where the parts of a run lie, seen from one rank."""

    def __init__(self, layout: Layout, world: World, mesh: DeviceMesh | None) -> None:
        self.world, self.zero = world, layout.zero
        self.ranks = layout.resolve(world.size)
        self._mesh = mesh

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.ranks["replicate"] * self.ranks["shard"]

    def own(self, indices: range) -> range:
        """This rank's share of a step's samples."""
        if self._mesh is None:
            return indices
        share = len(indices) // self.data_ranks
        replica, part = (self._mesh.get_local_rank(axis) for axis in ("replicate", "shard"))
        first = (replica * self.ranks["shard"] + part) * share
        return indices[first : first + share]

    def place(self, model: Decoder) -> nn.Module:
        """What to call in a training step; `model` itself is placed in the same move."""
        if self._mesh is None:
            return model
        if self.ranks["tensor"] > 1:
            split_by_tensor(model, self._mesh["tensor"])
        if self.data_ranks == 1:
            return model
        if self.ranks["shard"] == self.ranks["tensor"] == 1:
            on = [self.world.local_rank] if self._mesh.device_type == "cuda" else None
            return DistributedDataParallel(model, device_ids=on, gradient_as_bucket_view=True)
        hybrid = self.ranks["replicate"] > 1
        mesh = self._mesh["replicate", "shard"] if hybrid else self._mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.zero == 3)
        fully_shard(model, mesh=mesh)  # the embedding is needed to the end: for the head
        register_fsdp_forward_method(model, "next_logits")
        return model

    @contextmanager
    def micro_batch(self, module: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one micro-batch of a step."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last or self.zero > 1)
        waits = isinstance(module, DistributedDataParallel) and not is_last
        with module.no_sync() if waits else nullcontext():  # type: ignore[operator]
            yield

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks that read different samples."""
        for axis in ("replicate", "shard"):
            if self._mesh is not None and self.ranks[axis] > 1:
                dist.all_reduce(x, group=self._mesh.get_group(axis))
        return x

    @torch.no_grad()
    def clip_gradients(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients so that their norm, over all ranks, is at most `limit`.

        Returns the norm before. A gradient that several ranks hold counts once.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        parts = [
            (g.to_local() if isinstance(g, DTensor) else g).float().square().sum()
            / (self.world.size / _shards(g))
            for g in gradients
        ]
        squares = torch.stack(parts).sum()
        if self._mesh is not None:
            dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            (g.to_local() if isinstance(g, DTensor) else g).mul_(factor)
        return norm

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank, so that all act alike."""
        if self._mesh is None:
            return flag
        flags = torch.tensor(int(flag))  # on the CPU: no waiting for a GPU
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)


def _shards(x: Tensor) -> int:
    """Into how many different parts ranks have split it."""
    if not isinstance(x, DTensor):
        return 1
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def whole(x: Tensor) -> Tensor:
    """A sharded tensor gathered, on every rank; others as they are. Every rank must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(whole: Tensor, placed: Tensor) -> Tensor:
    """`whole` laid out as `placed` is; each rank keeps its own part."""
    if not isinstance(placed, DTensor):
        return whole.to(placed.device)
    there = whole.to(placed.device)
    return distribute_tensor(there, placed.device_mesh, placed.placements, src_data_rank=None)


@contextmanager
def placement(layout: Layout, world: World, device: torch.device) -> Iterator[Placement]:
    """Join the other processes, for as long as this is entered."""
    if world.size == 1:
        yield Placement(layout, world, None)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    joined = dist.is_initialized()
    if not joined:
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    ranks = layout.resolve(world.size)
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(device.type, tuple(ranks[name] for name in names), mesh_dim_names=names)
    yield Placement(layout, world, mesh)
    if not joined:
        dist.barrier()  # a rank that leaves first would break those still talking to it
        dist.destroy_process_group()
