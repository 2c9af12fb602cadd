"""The collectives of a training step on one rank, by arithmetic: no process group is needed.

`longspan plan --check` counts the same in a world without processes, and tests count them on real
ranks. What each layout communicates:

- DDP all-reduces gradients in buckets, once a step.
- FSDP2 all-gathers each block, and the rest of the model, for every micro-batch, with ZeRO-3 for
  its backward pass again; it reduce-scatters gradients, with ZeRO-2 and 3 in every micro-batch.
  Pipeline stages keep what they have gathered for the backward pass. Replicas all-reduce shards.
- Tensor parallelism and sequence parallelism: see `communication_in_blocks.py`.
- Pipeline stages send activations forward and gradients back, once per micro-batch each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from longspan.config import Run
from longspan.costs import Shape
from longspan.planning.chunks import chunks_of
from longspan.planning.communication_in_blocks import sequence_traffic, tensor_traffic
from longspan.planning.traffic import FLOAT32, Step, Traffic

__all__ = ["Traffic", "communication"]

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 << 20, 1 << 20
"""DDP's defaults: a bucket is all-reduced as soon as it has so many bytes of gradients."""
FLAGS_BYTES = 4 * 8
"""After each step all ranks agree on four flags: stop, save, still writing, failed to write."""


def communication(
    run: Run, gpus: int, *, pipeline_rank: int = 0, sequence_rank: int | None = None
) -> list[Traffic]:
    """The collectives of a step of `run` on one of `gpus` ranks, trained by the native engine.

    `run.train.precision` must be resolved. Ranks differ by their stage, and by their part of the
    sequence: by default it is the part that communicates most.
    """
    if chunks := chunks_of(run):
        of_chunks = communication(
            chunks.of_chunk, gpus, pipeline_rank=pipeline_rank, sequence_rank=sequence_rank
        )
        count = chunks.per_sample  # of which all but one have another forward pass
        more = [_forward_calls(x, run) * (count - 1) // count for x in of_chunks]
        return [replace(x, calls=x.calls + n) for x, n in zip(of_chunks, more, strict=True)]
    step = Step(run, gpus, pipeline_rank)
    found = [
        *_gradients_of_replicas(step),
        *_sharded(step),
        *tensor_traffic(step),
        *sequence_traffic(step, sequence_rank),
        *_between_stages(step),
        *_scalars(step),
    ]
    counts = Counter[Traffic]()
    for x in found:
        if x.ranks > 1 and x.bytes > 0:
            counts[replace(x, calls=1)] += x.calls
    return [replace(x, calls=calls) for x, calls in counts.items() if calls > 0]


def _forward_calls(x: Traffic, run: Run) -> int:
    """Those that a forward pass of the blocks repeats."""
    again = run.train.activation_checkpointing != "none"  # some are in the recomputation, too
    match x.axis, x.purpose:
        case "shard", purpose if purpose.endswith("forward"):
            # Only ZeRO-3 frees gathered parameters after a forward pass, and only those of blocks.
            return x.calls if x.overlaps and run.layout.zero == 3 else 0
        case "sequence", _:
            return x.calls // 2  # heads for tokens and back, forward and backward
        case "tensor", "embedding" | "output of the MLP":
            return x.calls
        case "tensor", "output of attention":
            return x.calls // (1 + again)
        case "tensor", purpose if purpose.startswith(("sums of squares", "between")):
            return x.calls // (2 + again)
    return 0


def _gradients_of_replicas(step: Step) -> Iterator[Traffic]:
    """DDP's all-reduces."""
    if not step.is_ddp:
        return
    ranks, method = step.ranks.replicate, step.layout.gradient_compression
    # Gradients are ready in about the reverse order of the parameters.
    first = step.outer_shapes(embedding=True, head=False, trained=True)
    shapes = step.outer_shapes(embedding=False, head=True, trained=True)[::-1]
    for block, copies in reversed(step.blocks()):
        shapes += copies * list(reversed(step.trained_shapes(block)))
    buckets = _buckets([*shapes, *first])
    if method == "powersgd":
        # Uncompressed tensors, and the two factors of the others, by bucket; after ten steps.
        yield from (
            Traffic(
                "replicate", "all_reduce", ranks, size, 1, "gradients, compressed", overlaps=True
            )
            for bucket in buckets
            for size in _powersgd_bytes(bucket)
            if size
        )
        return
    width = 2 if method == "bf16" else FLOAT32
    for size in [width * sum(map(math.prod, bucket)) for bucket in buckets]:
        yield Traffic("replicate", "all_reduce", ranks, size, 1, "gradients", overlaps=True)


def _buckets(shapes: Iterable[Shape]) -> list[list[Shape]]:
    buckets: list[list[Shape]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES
    for shape in shapes:
        if size >= limit:
            buckets.append([])
            size, limit = 0, BUCKET_BYTES
        buckets[-1].append(shape)
        size += FLOAT32 * math.prod(shape)
    return buckets


def _powersgd_bytes(bucket: Sequence[Shape]) -> tuple[int, int, int]:
    """Bytes of a bucket's uncompressed tensors, of the factors P and of the factors Q; rank 1."""
    plain = rows = columns = 0
    for shape in bucket:
        n, m = shape[0], math.prod(shape[1:])
        if len(shape) > 1 and 2 * (n + m) < n * m:
            rows, columns = rows + n, columns + m
        else:
            plain += n * m
    return FLOAT32 * plain, FLOAT32 * rows, FLOAT32 * columns


def _sharded(step: Step) -> Iterator[Traffic]:
    """FSDP2's all-gathers and reduce-scatters, and the all-reduces of replicas."""
    if not step.ranks.is_fsdp:
        return
    layout, shards, replicas = step.layout, step.ranks.shards, step.ranks.replicate
    is_pipeline = step.ranks.pipeline > 1
    reduces = step.micro_batches if layout.zero > 1 and not is_pipeline else 1
    reduce_width = 2 if layout.gradient_compression == "bf16" else FLOAT32
    for is_block, shapes, trained, count in _groups(step):
        gathered, reduced = (sum(padded(x, shards) for x in xs) for xs in (shapes, trained))
        what = "a block" if is_block else "embedding, norm and head"
        # Sharded by one rank, parameters are never gathered.
        width = step.width if is_block else FLOAT32
        forward = 1 if is_pipeline else step.micro_batches
        for purpose, calls in (
            ("forward", forward),
            ("backward", step.micro_batches if is_block and layout.zero == 3 else 0),
        ):
            yield Traffic(
                "shard",
                "all_gather",
                shards,
                width * gathered,
                calls * count,
                f"parameters of {what}, {purpose}",
                overlaps=is_block,
            )
        yield Traffic(
            "shard",
            "reduce_scatter",
            shards,
            reduce_width * reduced,
            reduces * count,
            f"gradients of {what}",
            overlaps=True,
        )
        yield Traffic(
            "replicate",
            "all_reduce",
            replicas,
            reduce_width * reduced // shards,
            reduces * count,
            f"gradients of {what}",
            overlaps=True,
        )


def _groups(step: Step) -> Iterator[tuple[bool, list[Shape], list[Shape], int]]:
    """What FSDP2 gathers together: whether it is a block, its parameters, those of them that have
    gradients, and how many groups are the same.
    """
    for block, copies in step.blocks():
        yield True, step.block_shapes(block), step.trained_shapes(block), copies
    is_one = step.ranks.pipeline == 1
    ends = [(True, True)] if is_one else [(True, False)] * step.is_first
    ends += [] if is_one else [(False, True)] * step.is_last
    for embedding, head in ends:
        shapes = step.outer_shapes(embedding=embedding, head=head)
        trained = step.outer_shapes(embedding=embedding, head=head, trained=True)
        yield False, shapes, trained, 1


def padded(shape: Shape, shards: int) -> int:
    """Elements of a parameter whose rows are sharded, each shard rounded up to whole rows."""
    return -(-shape[0] // shards) * shards * math.prod(shape[1:])


def _between_stages(step: Step) -> Iterator[Traffic]:
    ranks = step.ranks.pipeline
    if ranks == 1:
        return
    plan, rank = step.parts.stages, step.pipeline_rank
    assert plan is not None
    shards = 1 if step.residual == "none" else step.ranks.tensor
    size = FLOAT32 * step.tokens * step.model.hidden // shards  # the residual stream is float32
    for change, what in ((-1, "previous"), (1, "next")):
        others = [s + change for s in plan.by_rank[rank] if 0 <= s + change <= plan.last]
        remote = sum(plan.rank_of(other) != rank for other in others)
        # Activations one way and gradients the other way.
        calls = 2 * remote * step.micro_batches
        purpose = f"activations and gradients, {what} stage"
        yield Traffic("pipeline", "send_recv", ranks, size, calls, purpose, overlaps=True)
    ends = plan.rank_of(0), plan.rank_of(plan.last)
    is_tied = step.model.tie_embeddings and step.trains("embedding.weight")
    if is_tied and rank in ends and ends[0] != ends[1]:
        rows = -(-step.model.vocab // step.ranks.tensor // step.ranks.shards)
        size = FLOAT32 * rows * step.model.hidden
        yield Traffic("pipeline", "send_recv", ranks, size, 2, "gradient of the tied embedding")


def _scalars(step: Step) -> Iterator[Traffic]:
    ranks = step.ranks
    sizes = {"replicate": ranks.replicate, "shard": ranks.shards, "pipeline": ranks.pipeline}
    for axis, size in sizes.items():
        yield Traffic(axis, "all_reduce", size, FLOAT32, 1, "loss")
    yield Traffic("world", "all_reduce", step.world, FLOAT32, 1, "gradient norm")
    yield Traffic("world", "all_reduce", step.world, FLAGS_BYTES, 1, "whether to stop or save")
