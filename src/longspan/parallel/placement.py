"""A model placed on a mesh of processes: replicated, sharded, split by tensor, or all of these.

- pipeline: each rank holds some of the layers, see `pipeline.py`.
- tensor: each rank holds some of the heads, of the MLP's width and of the vocabulary, see
  `tensor.py`.
- replicate alone: every rank holds the model; DDP sums the gradients.
- sequence: each rank holds some of a sequence's tokens, see `sequence.py`; for parameters these
  ranks are a part of the shard axis.
- shard: FSDP2 splits parameters, gradients and optimizer state over the axis; with replicate beside
  it, each group of ranks shards a copy (hybrid sharding).

With ZeRO stage 1 gradients stay whole until a step's last micro-batch; with 2 those of each
micro-batch are scattered at once; with 3 parameters too are dropped after each block's forward pass
and gathered again for its backward pass. All three keep one share of the optimizer's state.

The model comes on the meta device. What a rank does not hold is taken away or split first, then its
own part gets memory and its initial weights: no rank ever holds more.

The loss of a step is one sum over all its tokens, so gradients are summed over ranks. DDP and FSDP
average them; the loss is multiplied by the number of ranks beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from longspan.config import Layout, Run
from longspan.device import DTYPES
from longspan.models import Decoder
from longspan.models.decoder import allocate, initial_weight
from longspan.parallel.activation_checkpointing import rematerialised
from longspan.parallel.flight_recorder import record_collectives
from longspan.parallel.pipeline import Around, Pipelined, keep_own_layers
from longspan.parallel.sequence import shards_of, split_by_sequence
from longspan.parallel.tensor import split_by_tensor, stream_of
from longspan.parallel.world import World
from longspan.sketching import SKLinear

MESH_AXES = ("pipeline", "replicate", "shard", "tensor")
"""From the ranks that talk least to those that talk most, which are neighbours."""

WRAPPER = "_checkpoint_wrapped_module."
"""What torch's checkpoint wrapper puts into the names of parameters."""


class Placement:
    """Where the parts of a run lie, seen from one rank."""

    def __init__(
        self,
        layout: Layout,
        world: World,
        mesh: DeviceMesh | None,
        sequence: dist.ProcessGroup | None = None,
    ) -> None:
        """`sequence`: the ranks that share this one's sequence; on `mesh` the `shard` axis holds
        them too, since they share parameters as well.
        """
        self.world, self.zero = world, layout.zero
        self.ranks = layout.resolve(world.size)
        self._mesh = mesh
        self._sequence = sequence
        self._positions: Tensor | None = None  # of this rank's tokens, where they are shared out
        self._has_tied_copy = False

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.ranks["replicate"] * self.ranks["shard"]

    @property
    def averaged_ranks(self) -> int:
        """Ranks over which DDP and FSDP take the mean of gradients."""
        return self.data_ranks * self.ranks["sequence"]

    @property
    def replicates_only(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.ranks["replicate"] == self.world.size

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        return self.averaged_ranks > 1 and not self.replicates_only

    @property
    def drops_blocks(self) -> bool:
        """Whether FSDP2 drops the other ranks' parameters of a block after its forward pass."""
        return self.zero == 3 and self.ranks["shard"] * self.ranks["sequence"] > 1

    def own(self, indices: Sequence[int]) -> Sequence[int]:
        """This rank's share of a step's samples."""
        if self._mesh is None:
            return indices
        share = len(indices) // self.data_ranks
        replica = self._mesh.get_local_rank("replicate")
        part = self._mesh.get_local_rank("shard") // self.ranks["sequence"]
        first = (replica * self.ranks["shard"] + part) * share
        return indices[first : first + share]

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of the tokens (batch, tokens)."""
        return x if self._positions is None else x[:, self._positions]

    def place(
        self, model: Decoder, run: Run, device: torch.device, around: Around = nullcontext
    ) -> nn.Module:
        """What to call in a training step: `model`, wrapped or taken apart.

        `model`, from the meta device, keeps the parameters of this rank under their names, on
        `device` and initialised. `around`: the context of a forward pass, where stages of a
        pipeline must enter it themselves.
        """
        module, parts = self.arrange(model, run, around)
        for part in parts:
            allocate(part, torch.device("cpu") if run.layout.offload else device)
            for layer in part.modules():
                if isinstance(layer, SKLinear):  # FSDP2 brings parameters there and no signs
                    layer.draw_signs(device)
        with torch.no_grad():
            for name, weight in self.named_parameters(model):
                drawn = initial_weight(run.model, run.train.seed, name, weight.shape)
                weight.copy_(like(drawn, weight))
        if isinstance(module, Pipelined):
            at_once = run.train.micro_batch * self.data_ranks
            split_into = self.ranks["tensor"]
            tokens = run.data.context // self.ranks["sequence"]
            stream = stream_of(run)
            module.set_up(
                run.train.global_batch // at_once,
                tokens,
                token_parts=split_into if stream == "tokens" else 1,
                feature_parts=split_into if stream == "features" else 1,
                device=device,
            )
        if self._mesh is not None and self.replicates_only:
            on = [self.world.local_rank] if device.type == "cuda" else None
            copy = DistributedDataParallel(
                model,
                device_ids=on,
                gradient_as_bucket_view=True,
                init_sync=False,
                broadcast_buffers=False,  # signs of sketched layers, the same everywhere
            )
            _compress(copy, run.layout.gradient_compression)
            return copy
        return module

    def arrange(
        self, model: Decoder, run: Run, around: Around = nullcontext
    ) -> tuple[nn.Module, list[nn.Module]]:
        """Take away from `model` what other ranks hold and split the rest, on the meta device.

        Returns what to call in a training step, and the parts that are sharded one by one.
        """
        parts: list[nn.Module] = [model]
        module: nn.Module = model
        if self._mesh is not None and self.ranks["pipeline"] > 1:
            self._has_tied_copy = model.head is None
            keep_own_layers(model, run, self._mesh["pipeline"])
        if self._sequence is not None:
            shards = shards_of(run, self.ranks["sequence"], self.ranks["tensor"])
            split_by_sequence(model, self._sequence, shards)
            self._positions = model.positions
        if self._mesh is not None and self.ranks["tensor"] > 1:
            split_by_tensor(model, self._mesh["tensor"], stream_of(run))
        for index, block in enumerate(model.blocks):
            travels = self._sequence is not None
            if run.train.compile is True:
                block.compile(fullgraph=not travels)
            model.blocks[index] = rematerialised(block, run.train, travels=travels)
        if self._mesh is not None and self.ranks["pipeline"] > 1:
            module = pipelined = Pipelined(model, run, self._mesh["pipeline"], around)
            parts = list(pipelined.stages)
        if self.is_sharded:
            assert self._mesh is not None
            for part in parts:
                self._shard(part, self._mesh, run)
        return module, parts

    def _shard(self, part: nn.Module, mesh: DeviceMesh, run: Run) -> None:
        """Blocks are gathered in the run's precision, which is what they compute in: autocast would
        keep a 16-bit copy of each weight for the backward pass, of blocks that are gone by then.
        """
        hybrid = self.ranks["replicate"] > 1
        within = mesh["replicate", "shard"] if hybrid else mesh["shard"]
        on_gpu = mesh.device_type == "cuda"
        offload = CPUOffloadPolicy(on_gpu) if run.layout.offload else OffloadPolicy()
        shard = partial(fully_shard, mesh=within, offload_policy=offload)
        precision = MixedPrecisionPolicy(
            param_dtype=DTYPES.get(run.train.precision),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the residual stream is float32
        )
        assert isinstance(part.blocks, nn.ModuleList)
        for block in part.blocks:
            shard(block, reshard_after_forward=self.drops_blocks, mp_policy=precision)
        shard(part)  # the embedding is needed to the end: for the head
        if isinstance(part, Decoder):
            register_fsdp_forward_method(part, "next_logits")

    def named_parameters(self, model: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names they have in one process.

        A second copy of a tied embedding has its name too.
        """
        for name, parameter in model.named_parameters():
            is_copy = self._has_tied_copy and name == "head.weight"
            yield "embedding.weight" if is_copy else name.replace(WRAPPER, ""), parameter

    def is_copy(self, name: str, parameter: nn.Parameter, model: Decoder) -> bool:
        """Whether it is the second copy of a tied embedding, on the last stage of a pipeline."""
        is_head = model.head is not None and parameter is model.head.weight
        return self._has_tied_copy and name == "embedding.weight" and is_head

    def writes(self, x: Tensor) -> bool:
        """Whether it is this rank, of those that hold the same part of a tensor, that saves it."""
        split = set()
        if isinstance(x, DTensor):
            axes = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
            split = {axis for axis, how in axes if not how.is_replicate()}
        alike = set(MESH_AXES) - split - {"pipeline"}
        mesh = self._mesh
        return mesh is None or not any(mesh.get_local_rank(axis) for axis in alike)

    @contextmanager
    def micro_batch(self, module: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one micro-batch of a step."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last or self.zero > 1)
        waits = isinstance(module, DistributedDataParallel) and not is_last
        with module.no_sync() if waits else nullcontext():  # type: ignore[operator]
            yield

    def scaler(self, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
        """A gradient scaler under which all ranks take a step or none does."""
        if self._mesh is None:
            return torch.amp.GradScaler(device.type, enabled=enabled)
        return ShardedGradScaler(device.type, enabled=enabled, process_group=dist.group.WORLD)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks with different tokens, and those of the pipeline."""
        for axis in ("replicate", "shard", "pipeline"):
            if self._mesh is not None and self._mesh[axis].size() > 1:
                dist.all_reduce(x, group=self._mesh.get_group(axis))
        return x

    @torch.no_grad()
    def clip_gradients(self, model: Decoder, limit: float) -> Tensor:
        """Scale the gradients so that their norm, over all ranks, is at most `limit`.

        Returns the norm before. A gradient that several ranks hold counts once.
        """
        copies = self.world.size / self.ranks["pipeline"]
        squares, gradients = [], []
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=p.placements)  # sums still to be taken
            g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            gradients.append(g)
            if not (self._has_tied_copy and name == "head.weight"):
                squares.append(g.float().square().sum() / (copies / _shards(p.grad)))
        total = torch.stack(squares).sum() if squares else torch.zeros(())
        if self._mesh is not None:
            dist.all_reduce(total)
        norm = total.sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)
        return norm

    def sum_over_sequence(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks that share a sequence."""
        if self._sequence is not None:
            dist.all_reduce(x, group=self._sequence)
        return x

    def most(self, *numbers: int) -> list[int]:
        """The largest of each on any rank, so that all act alike."""
        if self._mesh is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64)  # on the CPU: no waiting for a GPU
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [int(x) for x in found]

    def any(self, *flags: bool) -> list[bool]:
        """Whether each is true on any rank."""
        return [bool(x) for x in self.most(*map(int, flags))]


def _compress(model: DistributedDataParallel, how: str) -> None:
    """Let `model` send gradients in 16 bits, or matrices as a product of rank 1 (PowerSGD).

    PowerSGD adds what it left out of one step to the next, and what it left out of the last step
    before a checkpoint is lost.
    """
    if how == "bf16":
        # torch keeps its own hook, which it knows by name, to NCCL; gloo can do it too.
        group = dist.distributed_c10d._get_default_group()
        model.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(group, bucket))
    if how == "powersgd":
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook)


def _shards(x: Tensor) -> int:
    """Into how many different parts ranks have split it."""
    if not isinstance(x, DTensor):
        return 1
    sizes = zip(x.placements, x.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def offset_of(x: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part begins."""
    if not isinstance(x, DTensor):
        return (0,) * x.dim()
    _, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(start)


def laid_out(own: Tensor, placed: Tensor) -> Tensor:
    """A rank's own values as a tensor that is laid out as `placed` is."""
    if not isinstance(placed, DTensor):
        return own.to(placed.device)
    mesh, placements = placed.device_mesh, placed.placements
    # On the mesh's device, from which parameters that are offloaded have moved.
    there = DTensor.from_local(
        own.to(mesh.device_type), mesh, placements, shape=placed.shape, stride=placed.stride()
    )
    return there.to(placed.device)


def like(whole: Tensor, placed: Tensor) -> Tensor:
    """`whole` laid out as `placed` is; each rank keeps its own part."""
    if not isinstance(placed, DTensor):
        return whole.to(placed.device)
    mesh, placements = placed.device_mesh, placed.placements
    there = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return there.to(placed.device)


def parameter_mesh(ranks: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """The mesh on which parameters lie, whose `shard` axis has the ranks of a sequence too."""
    shared = {**ranks, "shard": ranks["shard"] * ranks["sequence"]}
    sizes = tuple(shared[name] for name in MESH_AXES)
    return init_device_mesh(device.type, sizes, mesh_dim_names=MESH_AXES)


@contextmanager
def placement(
    layout: Layout, world: World, device: torch.device, hang_s: float = 600.0
) -> Iterator[Placement]:
    """Join the other processes, for as long as this is entered.

    torch gives up on a message that does not come a minute after the run itself would.
    """
    if world.size == 1:
        yield Placement(layout, world, None)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    joined = dist.is_initialized()
    if not joined:
        record_collectives()
        dist.init_process_group(backend, timeout=timedelta(seconds=hang_s + 60))
    ranks = layout.resolve(world.size)
    mesh = parameter_mesh(ranks, device)
    sequence = None
    if ranks["sequence"] > 1:
        inner = ranks["sequence"], ranks["tensor"]
        by_sequence = init_device_mesh(
            device.type,
            (world.size // math.prod(inner), *inner),
            mesh_dim_names=("others", "sequence", "tensor"),
        )
        sequence = by_sequence.get_group("sequence")
    yield Placement(layout, world, mesh, sequence)
    if not joined:
        dist.barrier()  # a rank that leaves first would break those still talking to it
        dist.destroy_process_group()
