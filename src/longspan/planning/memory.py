"""Memory of a run on each device: at the start, at the peak of a step, and when it saves.

Everything here is arithmetic: a layout takes milliseconds. `parameters.py` says which part of each
parameter a rank holds, `activations.py` what a block keeps for its backward pass. A step has a few
moments at one of which its memory is largest, and the peak is the largest of their sums; not all
that a step ever allocates is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from longspan.config import Run
from longspan.costs import linear_sizes, trains
from longspan.parallel.choices import pinned_bytes, reduce_dtype
from longspan.planning.activations import Activations, BlockActivations
from longspan.planning.chunks import ROWS, chunks_of, row_bytes
from longspan.planning.parameters import Degrees, ModelSplit, RankParameter
from longspan.planning.pipeline_memory import in_flight

FP32_BYTES = 4
"""Bytes per element of parameters, gradients and each of the two Adam moments, by default."""
HEAD_BUFFERS = 3
"""Buffers as large as the head at the end of the backward pass: the head's gradient, which the
chunked loss computes in forward; that of the embedding or of earlier micro-batches; their sum."""
MATRIX, NORM = ".weight", "norm.weight"
"""How the names of weights end, and of those among them that are no matrices."""
MUON_WORKSPACE = 14
"""Bytes per element of a whole matrix in Muon's step: its momentum and its update in float32, and
three products of the iteration in bfloat16."""
MIN_8BIT_ELEMENTS, QUANT_BLOCK = 4096, 256
"""torchao's 8-bit Adam keeps smaller tensors in float32, and has one scale per block."""


@dataclass(frozen=True)
class Allowance:
    """What CUDA and its allocator take beside tensors. Calibrate it to your machine."""

    libraries: int = 64 << 20
    """Workspaces of cuBLAS, 32 MiB each on Hopper, in the forward and in the backward thread."""
    context: int = 600 << 20
    """The CUDA context and loaded kernels, which PyTorch does not allocate."""
    fragmentation: float = 0.02
    """Of what is allocated: blocks that the caching allocator holds and cannot reuse."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one rank."""

    parameters: int
    """The local shard."""
    gradients: int
    optimizer: int
    signs: int
    """Signs of sketched layers, one bit each; only `tensor` and `pipeline` shard them."""
    offloaded: int
    """The part of these bytes that is offloaded to CPU, and activations and rows of earlier chunks
    that are."""
    peak: Mapping[str, int]
    """What is on the device when a step needs most, by name."""
    peak_at: str
    """When that is."""
    kept: Mapping[str, int]
    """Activations that the forward pass of one micro-batch keeps for its backward pass."""
    start: int
    """Allocated before the first step."""
    save: int
    """Allocated while a checkpoint is saved: tensors are copied to CPU memory."""
    fragmentation: int
    """The CUDA context, and what the caching allocator cannot reuse."""

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` should show after a step."""
        return sum(self.peak.values())

    @property
    def on_device(self) -> int:
        """What the device must have."""
        return self.allocated + self.fragmentation


ALLOWANCE = Allowance()


def memory_per_rank(run: Run, world: int, allowance: Allowance = ALLOWANCE) -> list[DeviceMemory]:
    """Memory of each rank of the pipeline axis when `world` processes train `run` natively.

    Ranks that differ only on other axes use at most the same. `run.train.precision` must be
    resolved; a device or compilation of "auto" is that of a GPU.
    """
    if chunks := chunks_of(run):
        (memory,) = memory_per_rank(chunks.of_chunk, world, allowance)
        rows = row_bytes(run, run.layout.resolve(world))
        offloaded = rows.pop(ROWS) if run.train.offload_chunk_rows else 0
        lost = 0 if run.train.device == "cpu" else int(allowance.fragmentation * sum(rows.values()))
        return [
            replace(
                memory,
                offloaded=memory.offloaded + offloaded,
                peak={**memory.peak, **rows},
                fragmentation=memory.fragmentation + lost,
            )
        ]
    split = ModelSplit(run, world)
    return [_memory(run, split, stage, allowance) for stage in range(split.degrees.pipeline)]


def needed_by(run: Run, gpus: int) -> int:
    """Bytes that the fullest device must have."""
    return max(memory.on_device for memory in memory_per_rank(run, gpus))


class _Counts:
    """Elements of a rank's parameters, summed as the formulas below need them."""

    def __init__(self, parameters: Iterable[RankParameter], run: Run) -> None:
        self.local = self.moments = self.autocast = self.head = self.outside_blocks = 0
        self.trained = self.trained_gathered = 0
        optimizer = run.train.optimizer
        blocks: dict[int, int] = {}
        copies: dict[int, int] = {}
        for p in parameters:
            self.local += p.copies * p.local
            block = p.block
            is_matrix = block is not None and p.name.endswith(MATRIX) and not p.name.endswith(NORM)
            kind = "momentum" if optimizer == "muon" and is_matrix else optimizer
            is_trained = trains(run.model, run.train.freeze, p.name)
            if is_trained:
                self.trained += p.copies * p.local
                self.trained_gathered += p.copies * p.gathered
                average = FP32_BYTES * p.local if run.train.ema else 0
                self.moments += p.copies * (_moment_bytes(p.local, kind) + average)
            if block is None:
                self.outside_blocks += p.gathered
                if is_trained:
                    self.head = max(self.head, p.gathered)  # or the tied embedding
                continue
            if is_matrix and run.train.parameter_precision == "fp32":
                self.autocast += p.copies * p.gathered
            blocks[block] = blocks.get(block, 0) + p.gathered
            copies[block] = p.copies
        self.largest_block = max(blocks.values())
        self.in_blocks = sum(copies[block] * count for block, count in blocks.items())


def _memory(run: Run, split: ModelSplit, stage: int, allowance: Allowance) -> DeviceMemory:
    degrees, tokens_of = split.degrees, Activations(run, split.degrees)
    counts = _Counts(split.parameters(split.first_rank(stage)), run)
    each = _parameter_bytes(run)
    parameters, gradients = each * counts.local, each * _gradients(run, degrees, counts)
    offloaded = parameters + FP32_BYTES * counts.trained + counts.moments
    offloaded = offloaded if run.layout.offload else 0
    offloaded += _offloaded(run, split, stage, tokens_of).pinned
    on_gpu = not tokens_of.on_cpu
    states = {
        "parameters": 0 if run.layout.offload else parameters,
        "optimizer state": 0 if run.layout.offload else counts.moments,
        "signs of sketched layers": split.sign_bytes(stage),
        "library workspaces": allowance.libraries if on_gpu else 0,
    }
    moments, kept = _moments(run, split, stage, counts, tokens_of)
    held = 0 if run.layout.offload else gradients
    for parts in moments.values():
        parts["gradients"] = int(parts["gradients"] * held)
        parts.update(states)
    peak_at = max(moments, key=lambda name: sum(moments[name].values()))
    peak = {name: moments[peak_at][name] for name in PARTS if moments[peak_at].get(name)}
    context = allowance.context if on_gpu else 0
    lost = int(allowance.fragmentation * sum(peak.values())) if on_gpu else 0
    resident = sum(states.values())
    return DeviceMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=counts.moments,
        signs=states["signs of sketched layers"],
        offloaded=offloaded,
        peak=peak,
        peak_at=peak_at,
        kept=kept,
        start=resident - states["optimizer state"],
        save=resident,
        fragmentation=context + lost,
    )


PARTS = (
    "parameters",
    "gradients",
    "optimizer state",
    "transient buffers",
    "16-bit copies of weights",
    "signs of sketched layers",
    "activations",
    "block workspace",
    "logits and loss",
    ROWS,
    "rows that a chunk reads",
    "gradients of rows",
    "communication buffers",
    "library workspaces",
)
"""The parts of the peak, in the order of the plan's table."""


def _moments(
    run: Run, split: ModelSplit, stage: int, counts: _Counts, activations: Activations
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The parts at each moment of a step, where gradients are a fraction of all; and what one
    micro-batch keeps for its backward pass, by name.
    """
    degrees, width = split.degrees, activations.width
    accumulates = _accumulates(run, degrees)
    blocks = [(activations.block(block), copies) for block, copies in split.blocks(stage)]
    chunks = _by_chunk(split, stage, blocks)
    flights, buffers = in_flight(run, split, stage, activations)
    offloaded = _offloaded(run, split, stage, activations)
    held = sum(n * size for n, size in zip(flights, chunks, strict=True)) + activations.rope_table()
    one = sum(chunks)
    kept: dict[str, int] = {}
    for block, copies in blocks:
        for name, size in block.kept.items():
            kept[name] = kept.get(name, 0) + copies * size
    workspace = freed = 0
    for block, copies in reversed(blocks):  # the backward pass has freed what later ones keep
        workspace = max(workspace, block.workspace - freed)
        freed += copies * sum(block.kept.values())
    is_sharded = degrees.is_fsdp
    keeps_copies = not is_sharded and blocks[0][0].keeps_copies
    copies = width * counts.autocast if keeps_copies else 0
    # Autocast holds its copies to the end of the forward pass; a compiled block makes its own.
    is_cached = not is_sharded and width < FP32_BYTES and not activations.is_compiled
    is_cached = is_cached and not run.train.fp8  # whose layers cast without autocast
    cached = width * counts.autocast if is_cached else copies
    each = _parameter_bytes(run)
    recast = 0 if is_sharded or keeps_copies or width == each else width
    workspace += (recast + (0 if is_sharded else each)) * counts.largest_block
    if is_sharded:
        at_loss, in_block, at_end = _transient_sharded(run, degrees, counts)
    else:
        at_loss, in_block, at_end = (
            0,
            FP32_BYTES * counts.head,
            _transient_unsharded(run, degrees, counts),
        )
    _, has_head = split.has_ends(stage)
    loss = activations.loss() if has_head else {}
    if has_head and split.stages is not None:
        # Of micro-batches that have passed the loss and wait for their backward pass.
        last = split.stages.by_rank[stage].index(split.stages.last)
        held += (flights[last] - 1) * activations.kept_by_loss()
    before = 1.0 if accumulates else 0.0
    smallest = min(block.total for block, _ in blocks)

    def moment(
        gradients: float, kept: int, *, transient: int, workspace: int = 0
    ) -> dict[str, int]:
        return {
            "gradients": gradients,  # type: ignore[dict-item]
            "transient buffers": transient,
            "16-bit copies of weights": copies,
            "activations": kept,
            "block workspace": workspace,
            "communication buffers": buffers,
        }

    moments = {
        "the loss": moment(before, held + offloaded.stays, transient=at_loss)
        | {"logits and loss": sum(loss.values()), "16-bit copies of weights": cached},
        "the backward pass of the last block": moment(
            before,
            held + max(0, offloaded.stays - offloaded.under_way),
            transient=in_block,
            workspace=workspace,
        ),
        "the backward pass of the first block": moment(
            1.0, held - one + smallest, transient=in_block, workspace=workspace
        ),
        "the end of the backward pass": moment(1.0, held - one, transient=at_end),
    }
    if run.train.optimizer == "muon":
        largest = max(i * o for i, o in linear_sizes(run.model).values())
        transient = MUON_WORKSPACE * largest
        moments["the optimizer step"] = moment(1.0, held - one, transient=transient)
    return moments, kept


class _Offloaded(NamedTuple):
    """Where the activations that a rank would offload are at the end of a forward pass."""

    pinned: int
    """Bytes of CPU memory."""
    stays: int
    """Bytes that are on the device, since `train.offload_limit_gib` leaves no room for them."""
    under_way: int
    """Bytes of a block's workspace for copies, where nothing is copied while those are there."""


def _offloaded(run: Run, split: ModelSplit, stage: int, activations: Activations) -> _Offloaded:
    blocks = [(activations.block(block), copies) for block, copies in split.blocks(stage)]
    flights, _ = in_flight(run, split, stage, activations)
    limit, pinned, stays = run.train.offload_limit_gib, 0, 0
    for block, copies in blocks:
        for size in block.offloaded:
            count, buffer = max(flights) * copies, pinned_bytes(size)
            fitting = count
            if limit is not None:
                fitting = min(count, (int(limit * 2**30) - pinned) // buffer)
            pinned += fitting * buffer
            stays += (count - fitting) * size
    return _Offloaded(pinned, stays, blocks[-1][0].under_way if stays else 0)


def _by_chunk(
    split: ModelSplit, stage: int, blocks: list[tuple[BlockActivations, int]]
) -> list[int]:
    """Bytes that a micro-batch keeps in each of a pipeline rank's stages."""
    sizes = [block.total for block, copies in blocks for _ in range(copies)]
    found = []
    for layers in split.layers(stage):
        found.append(sum(sizes[: len(layers)]))
        sizes = sizes[len(layers) :]
    return found


def _compute_bytes(run: Run) -> int:
    """Bytes per element in the run's precision."""
    return 2 if run.train.precision in ("bf16", "fp16") else FP32_BYTES


def _parameter_bytes(run: Run) -> int:
    """Bytes per element of parameters and gradients; the few that stay in float32 do not count."""
    return FP32_BYTES if run.train.parameter_precision == "fp32" else 2


def _accumulates(run: Run, degrees: Degrees) -> bool:
    """Whether a step accumulates gradients over several micro-batches."""
    return run.train.global_batch > run.train.micro_batch * degrees.data


def _gradients(run: Run, degrees: Degrees, counts: _Counts) -> int:
    """Elements of accumulated gradients: local shards, or unsharded ones reduced once a step."""
    reduces_once = run.layout.zero <= 1 or degrees.pipeline > 1
    is_unsharded = degrees.is_fsdp and reduces_once and _accumulates(run, degrees)
    return counts.trained_gathered if is_unsharded else counts.trained


def _transient_unsharded(run: Run, degrees: Degrees, counts: _Counts) -> int:
    """Bytes of the head's gradient before it is added to others, and PowerSGD's error feedback."""
    adds_head = run.model.tie_embeddings or _accumulates(run, degrees)
    error_feedback = counts.local if run.layout.gradient_compression == "powersgd" else 0
    return FP32_BYTES * ((HEAD_BUFFERS * counts.head if adds_head else 0) + error_feedback)


def _transient_sharded(run: Run, degrees: Degrees, counts: _Counts) -> tuple[int, int, int]:
    """Bytes of FSDP2's gathered parameters and unreduced gradients: at the loss, in the backward
    pass of a block, and at the end of the backward pass.
    """
    width, largest_block = _compute_bytes(run), counts.largest_block
    if run.layout.zero == 3 and degrees.can_reshard and degrees.pipeline == 1:
        in_blocks, at_end = 2 * largest_block, 0  # the current block and the prefetched one
    else:  # pipeline stages keep theirs for the next micro-batch
        in_blocks = at_end = counts.in_blocks
    reduce_bytes = reduce_dtype(run.layout).itemsize
    always = FP32_BYTES * counts.outside_blocks
    if degrees.replicate > 1 and run.layout.zero > 1 and _accumulates(run, degrees):
        always += reduce_bytes * counts.local  # all-reduced over replicas at the end of a step
    # The gradients of one block, and their reduce-scatter input.
    in_block = width * in_blocks + (width + reduce_bytes) * largest_block
    in_block += FP32_BYTES * counts.outside_blocks
    # Gradients and reduce-scatter input of what is outside blocks, or the buffers of the head.
    outside = max(HEAD_BUFFERS * counts.head, 2 * counts.outside_blocks)
    end = width * at_end + FP32_BYTES * outside
    if run.layout.offload:  # reduced gradients wait for their copy to the CPU
        in_block += reduce_bytes * largest_block // degrees.shards
        end += reduce_bytes * counts.outside_blocks // degrees.shards
    return always + width * at_end, always + in_block, always + end


def _moment_bytes(count: int, optimizer: str) -> int:
    """Bytes of the two Adam moments of a tensor with `count` elements, or of Muon's momentum."""
    if optimizer == "momentum":
        return FP32_BYTES * count
    if optimizer == "adamw8bit" and count >= MIN_8BIT_ELEMENTS and count % QUANT_BLOCK == 0:
        return 2 * (count + FP32_BYTES * count // QUANT_BLOCK)
    return 2 * FP32_BYTES * count
