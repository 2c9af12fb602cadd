"""Memory of model and optimizer on each rank, without activations.

Parameters are counted, not estimated: the training code parallelizes the run's model on the meta
device, as one rank of a world without processes (torch's "fake" backend). Bytes per element, and
the transient buffers of a step, are then added by formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.attention import pattern_of
from longspan.config import Run
from longspan.costs import linear_sizes, rank_of
from longspan.models import new_decoder, stage_flops
from longspan.parallel.apply import parallelize, reduce_dtype
from longspan.parallel.dtensor import to_local
from longspan.parallel.mesh import ParallelMesh, init_parameter_mesh
from longspan.parallel.parameters import named_parameters
from longspan.parallel.pipeline_schedule import plan_stages
from longspan.parallel.world import World
from longspan.sketching import SKLinear
from longspan.torch_internals import fake_store

FP32_BYTES = 4
"""Bytes per element of parameters, gradients and each of the two Adam moments."""
HEAD_BUFFERS = 3
"""Buffers as large as the head at the end of the backward pass: the head's gradient, which the
chunked loss computes in forward; that of the embedding or of earlier micro-batches; their sum."""
MIN_8BIT_ELEMENTS, QUANT_BLOCK = 4096, 256
"""torchao's 8-bit Adam keeps smaller tensors in float32, and has one scale per block."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one rank at the peak of the backward pass."""

    parameters: int
    """The local shard."""
    gradients: int
    optimizer: int
    transient: int
    """Peak workspace: gathered parameters, and gradients before they are reduced."""
    autocast_copies: int
    """16-bit copies of weights that autocast caches if they are not sharded."""
    signs: int
    """Signs of sketched layers, one bit each; only `tensor` and `pipeline` shard them."""
    offloaded: int = 0
    """The part of these bytes that is offloaded to CPU."""

    @property
    def on_device(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.transient + self.autocast_copies + self.signs - self.offloaded


def memory_per_rank(run: Run, world: int) -> list[DeviceMemory]:
    """Memory of each rank of the pipeline axis when `world` processes train `run` natively.

    Ranks that differ only on other axes use the same. `run.train.precision` must be resolved.
    """
    stages = run.layout.resolve(world)["pipeline"]
    return [_memory(run, world, stage * world // stages) for stage in range(stages)]


class _ElementCounts:
    """Parameter elements on a rank: of its shards, and of the gathered parameters."""

    def __init__(self, copies: Sequence[int]) -> None:
        """`copies`: how many blocks of the run each block of the counted model stands for."""
        self._copies = copies
        self.local: list[int] = []
        self.autocast = 0
        """Dense layers of the blocks, which autocast copies."""
        self.head = 0
        """The head, or the tied embedding."""
        self.outside_blocks = 0
        self._blocks: dict[int, int] = {}

    def add(self, name: str, parameter: Tensor) -> None:
        gathered, local, copies = _gathered(parameter), to_local(parameter).numel(), 1
        if name.startswith("blocks."):
            block = int(name.split(".")[1])
            copies = self._copies[block]
            is_weight = parameter.dim() > 1 and name.endswith(".weight")
            self.autocast += copies * gathered if is_weight else 0
            self._blocks[block] = self._blocks.get(block, 0) + gathered
        else:
            self.outside_blocks += gathered
            self.head = max(self.head, gathered)
        self.local += [local] * copies

    @property
    def largest_block(self) -> int:
        return max(self._blocks.values())

    @property
    def in_blocks(self) -> int:
        return sum(self._copies[block] * count for block, count in self._blocks.items())

    @property
    def gathered(self) -> int:
        return self.outside_blocks + self.in_blocks


def _memory(run: Run, world: int, rank: int) -> DeviceMemory:
    counted_run, copies = _fewer_layers(run, run.layout.resolve(world)["pipeline"])
    model, counts = new_decoder(counted_run), _ElementCounts(copies)
    with _fake_rank(run, world, rank) as mesh:
        parallelize(model, mesh, run.layout, run.train)
        for name, parameter in named_parameters(model):
            counts.add(name, parameter)
    moments = sum(_moment_bytes(n, run.train.optimizer) for n in counts.local)
    parameters = FP32_BYTES * sum(counts.local)
    transient = _transient_sharded if mesh.is_fsdp else _transient_unsharded
    has_copies = not mesh.is_fsdp and _compute_bytes(run) < FP32_BYTES
    return DeviceMemory(
        parameters=parameters,
        gradients=FP32_BYTES * _gradients(run, mesh, counts),
        optimizer=moments,
        transient=transient(run, mesh, counts),
        autocast_copies=_compute_bytes(run) * counts.autocast if has_copies else 0,
        signs=_signs(model, copies),
        offloaded=2 * parameters + moments if run.layout.offload else 0,
    )


def _fewer_layers(run: Run, pipeline: int) -> tuple[Run, list[int]]:
    """A run with one block for all that are the same in a pipeline stage, and how many those are.

    Blocks take most of the time to build. They may differ in the ranks of their linear layers.
    """
    model, sizes = run.model, linear_sizes(run.model)
    ranks = {
        tuple(rank_of(model, f"blocks.{i}.{name}", *size) for name, size in sizes.items())
        for i in range(model.layers)
    }
    if len(ranks) > 1:
        return run, [1] * model.layers
    copies = [model.layers]
    if pipeline > 1:
        flops = stage_flops(model, pattern_of(run.attention), run.data.context)
        plan = plan_stages(run.layout, model.layers, flops, pipeline)
        copies = [len(layers) for layers in plan.layers]
    fewer = model.model_copy(update={"layers": len(copies)})
    return run.model_copy(update={"model": fewer}), copies


def _signs(model: nn.Module, copies: Sequence[int]) -> int:
    """Bytes of the signs of sketched layers, which are buffers."""
    return sum(
        copies[int(name.split("blocks.")[1].split(".")[0])] * x.nbytes
        for name, module in model.named_modules()
        if isinstance(module, SKLinear)
        for x in module.buffers()
    )


def _compute_bytes(run: Run) -> int:
    """Bytes per element in the run's precision."""
    return 2 if run.train.precision in ("bf16", "fp16") else FP32_BYTES


def _accumulates(run: Run, mesh: ParallelMesh) -> bool:
    """Whether a step accumulates gradients over several micro-batches."""
    return run.train.global_batch > run.train.micro_batch * mesh.data_ranks


def _gradients(run: Run, mesh: ParallelMesh, counts: _ElementCounts) -> int:
    """Elements of accumulated gradients: local shards, or unsharded ones reduced once a step."""
    reduces_once = run.layout.zero <= 1 or mesh.ranks["pipeline"] > 1
    is_unsharded = mesh.is_fsdp and reduces_once and _accumulates(run, mesh)
    return counts.gathered if is_unsharded else sum(counts.local)


def _transient_unsharded(run: Run, mesh: ParallelMesh, counts: _ElementCounts) -> int:
    """Bytes of the head's gradient before it is added to others, and PowerSGD's error feedback."""
    adds_head = run.model.tie_embeddings or _accumulates(run, mesh)
    error_feedback = sum(counts.local) if run.layout.gradient_compression == "powersgd" else 0
    return FP32_BYTES * ((HEAD_BUFFERS * counts.head if adds_head else 0) + error_feedback)


def _transient_sharded(run: Run, mesh: ParallelMesh, counts: _ElementCounts) -> int:
    """Peak bytes of FSDP2's gathered parameters and unreduced gradients."""
    width, largest_block = _compute_bytes(run), counts.largest_block
    if mesh.reshards_after_forward and mesh.ranks["pipeline"] == 1:
        in_blocks, at_end = 2 * largest_block, 0  # the current block and the prefetched one
    else:  # pipeline stages keep theirs for the next micro-batch
        in_blocks = at_end = counts.in_blocks
    reduce_bytes = reduce_dtype(run.layout).itemsize
    # Backward through the blocks: the gradients of one block, and their reduce-scatter input.
    block_bytes = width * in_blocks + (width + reduce_bytes) * largest_block
    block_bytes += FP32_BYTES * counts.outside_blocks
    end_bytes = width * at_end + FP32_BYTES * HEAD_BUFFERS * counts.head
    peak = FP32_BYTES * counts.outside_blocks + max(block_bytes, end_bytes)
    if mesh.ranks["replicate"] > 1 and run.layout.zero > 1 and _accumulates(run, mesh):
        peak += reduce_bytes * sum(counts.local)  # all-reduced over replicas at the end of a step
    return peak


@contextmanager
def _fake_rank(run: Run, world: int, rank: int) -> Iterator[ParallelMesh]:
    """One rank of a fake world."""
    this = World(rank, world, rank)
    if world == 1:
        yield ParallelMesh(run.layout, this)
        return
    assert not dist.is_initialized(), "plan outside of a process group"
    dist.init_process_group("fake", rank=rank, world_size=world, store=fake_store())
    try:
        mesh = init_parameter_mesh(run.layout.resolve(world), torch.device("cpu"))
        yield ParallelMesh(run.layout, this, mesh)
    finally:
        dist.destroy_process_group()


def _gathered(parameter: Tensor) -> int:
    """Elements of a parameter after FSDP2's all-gather: all, or a tensor-parallel shard."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, shards = parameter.device_mesh, 1
    for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if axis == "tensor" and not placement.is_replicate():
            shards = mesh[axis].size()
    return -(-parameter.numel() // shards)


def _moment_bytes(count: int, optimizer: str) -> int:
    """Bytes of the two Adam moments of a tensor with `count` elements."""
    if optimizer == "adamw8bit" and count >= MIN_8BIT_ELEMENTS and count % QUANT_BLOCK == 0:
        return 2 * (count + FP32_BYTES * count // QUANT_BLOCK)
    return 2 * FP32_BYTES * count
