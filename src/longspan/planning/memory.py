"""Memory of model and optimizer on each rank, without activations.

Parameters are counted, not estimated: the training code parallelizes the run's model on the meta
device, as one rank of a world without processes (torch's "fake" backend). Bytes per element, and
the transient buffers of a step, are then added by formula.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longspan.config import Run
from longspan.parallel.apply import reduce_dtype
from longspan.planning.parameters import Degrees, ModelSplit, RankParameter

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

    Ranks that differ only on other axes use at most the same. `run.train.precision` must be
    resolved.
    """
    split = ModelSplit(run, world)
    return [_memory(run, split, stage) for stage in range(split.degrees.pipeline)]


class _Counts:
    """Elements of a rank's parameters, summed as the formulas below need them."""

    def __init__(self, parameters: Iterable[RankParameter], optimizer: str) -> None:
        self.local = self.moments = self.autocast = self.head = self.outside_blocks = 0
        blocks: dict[int, int] = {}
        copies: dict[int, int] = {}
        for p in parameters:
            self.local += p.copies * p.local
            self.moments += p.copies * _moment_bytes(p.local, optimizer)
            block = p.block
            if block is None:
                self.outside_blocks += p.gathered
                self.head = max(self.head, p.gathered)  # or the tied embedding
                continue
            if p.name.endswith(".weight") and not p.name.endswith("norm.weight"):
                self.autocast += p.copies * p.gathered
            blocks[block] = blocks.get(block, 0) + p.gathered
            copies[block] = p.copies
        self.largest_block = max(blocks.values())
        self.in_blocks = sum(copies[block] * count for block, count in blocks.items())

    @property
    def gathered(self) -> int:
        return self.outside_blocks + self.in_blocks


def _memory(run: Run, split: ModelSplit, stage: int) -> DeviceMemory:
    degrees = split.degrees
    counts = _Counts(split.parameters(split.first_rank(stage)), run.train.optimizer)
    parameters = FP32_BYTES * counts.local
    transient = _transient_sharded if degrees.is_fsdp else _transient_unsharded
    has_copies = not degrees.is_fsdp and _compute_bytes(run) < FP32_BYTES
    return DeviceMemory(
        parameters=parameters,
        gradients=FP32_BYTES * _gradients(run, degrees, counts),
        optimizer=counts.moments,
        transient=transient(run, degrees, counts),
        autocast_copies=_compute_bytes(run) * counts.autocast if has_copies else 0,
        signs=split.sign_bytes(stage),
        offloaded=2 * parameters + counts.moments if run.layout.offload else 0,
    )


def _compute_bytes(run: Run) -> int:
    """Bytes per element in the run's precision."""
    return 2 if run.train.precision in ("bf16", "fp16") else FP32_BYTES


def _accumulates(run: Run, degrees: Degrees) -> bool:
    """Whether a step accumulates gradients over several micro-batches."""
    return run.train.global_batch > run.train.micro_batch * degrees.data


def _gradients(run: Run, degrees: Degrees, counts: _Counts) -> int:
    """Elements of accumulated gradients: local shards, or unsharded ones reduced once a step."""
    reduces_once = run.layout.zero <= 1 or degrees.pipeline > 1
    is_unsharded = degrees.is_fsdp and reduces_once and _accumulates(run, degrees)
    return counts.gathered if is_unsharded else counts.local


def _transient_unsharded(run: Run, degrees: Degrees, counts: _Counts) -> int:
    """Bytes of the head's gradient before it is added to others, and PowerSGD's error feedback."""
    adds_head = run.model.tie_embeddings or _accumulates(run, degrees)
    error_feedback = counts.local if run.layout.gradient_compression == "powersgd" else 0
    return FP32_BYTES * ((HEAD_BUFFERS * counts.head if adds_head else 0) + error_feedback)


def _transient_sharded(run: Run, degrees: Degrees, counts: _Counts) -> int:
    """Peak bytes of FSDP2's gathered parameters and unreduced gradients."""
    width, largest_block = _compute_bytes(run), counts.largest_block
    if run.layout.zero == 3 and degrees.shards > 1 and degrees.pipeline == 1:
        in_blocks, at_end = 2 * largest_block, 0  # the current block and the prefetched one
    else:  # pipeline stages keep theirs for the next micro-batch
        in_blocks = at_end = counts.in_blocks
    reduce_bytes = reduce_dtype(run.layout).itemsize
    # Backward through the blocks: the gradients of one block, and their reduce-scatter input.
    block_bytes = width * in_blocks + (width + reduce_bytes) * largest_block
    block_bytes += FP32_BYTES * counts.outside_blocks
    end_bytes = width * at_end + FP32_BYTES * HEAD_BUFFERS * counts.head
    peak = FP32_BYTES * counts.outside_blocks + max(block_bytes, end_bytes)
    if degrees.replicate > 1 and run.layout.zero > 1 and _accumulates(run, degrees):
        peak += reduce_bytes * counts.local  # all-reduced over replicas at the end of a step
    return peak


def _moment_bytes(count: int, optimizer: str) -> int:
    """Bytes of the two Adam moments of a tensor with `count` elements."""
    if optimizer == "adamw8bit" and count >= MIN_8BIT_ELEMENTS and count % QUANT_BLOCK == 0:
        return 2 * (count + FP32_BYTES * count // QUANT_BLOCK)
    return 2 * FP32_BYTES * count
