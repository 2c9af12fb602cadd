"""Context in time (`train.chunk_tokens`): its memory and time, from those of one chunk.

A run in chunks is planned as a run whose samples are chunks, of which it accumulates the gradients,
and what it has besides: rows of earlier chunks, their gradients, and one more forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from longspan.attention.context_parallel.chunk_plan import count_rows
from longspan.attention.context_parallel.shards import Heads
from longspan.attention.pattern import Dense, Dilated, patterns_of
from longspan.config import Run
from longspan.rules.chunks import chunk_rules

FP32_BYTES = 4
MIN_POWER = 10
"""Of two: smaller chunks are not chosen."""
ROWS = "rows of earlier chunks"
"""What `train.offload_chunk_rows` offloads."""


class Chunks(NamedTuple):
    """A run in chunks."""

    of_chunk: Run
    """The run whose samples are chunks: it has one chunk in each."""
    per_sample: int
    """How many a sample has."""


def chunks_of(run: Run) -> Chunks | None:
    """None if sequences are taken whole."""
    size, context, train = run.train.chunk_tokens, run.data.context, run.train
    if not 0 < size < context:
        return None
    count = -(-context // size)
    together = 1 if run.data.isolates else train.micro_batch  # documents are walked one by one
    update = {"micro_batch": together, "global_batch": train.global_batch * count}
    return Chunks(
        run.model_copy(
            update={
                "data": run.data.model_copy(update={"context": size}),
                "train": train.model_copy(update=update),
            }
        ),
        count,
    )


def chunk_sizes(run: Run) -> list[int]:
    """The sizes of chunks that its pattern allows, the largest first: powers of two, and segments.

    Only those below its own, if it has chunks.
    """
    limit = run.train.chunk_tokens or run.data.context
    segments = {w for layer in run.attention.cycle for w in layer.segment_lengths}
    powers = {1 << power for power in range(MIN_POWER, limit.bit_length())}
    sizes = sorted((x for x in segments | powers if 1 << MIN_POWER <= x < limit), reverse=True)
    return [
        size
        for size in sizes
        if not any(chunk_rules(run.train.with_chunks(size), run.attention, run.data))
    ]


def row_bytes(run: Run, ranks: Mapping[str, int]) -> dict[str, int]:
    """Bytes on a rank of the rows of earlier chunks, and of their gradients, by name.

    `ranks` of each axis: those of tensor and sequence parallelism split heads.
    """
    chunks = chunks_of(run)
    if chunks is None:
        return {}
    model, train = run.model, run.train
    width = 2 if train.precision in ("bf16", "fp16") else FP32_BYTES
    vectors = 2 * model.head_dim * chunks.of_chunk.train.micro_batch
    split = ranks["tensor"] * ranks["sequence"]
    heads = Heads(model.heads // split, max(1, model.kv_heads // split))
    kept = read = gradients = 0
    for pattern in patterns_of(run.attention, model.layers):
        rows, most = _count(pattern, run.data.context, train.chunk_tokens, heads)
        kept += width * vectors * rows
        gradients += FP32_BYTES * vectors * most
        if not isinstance(pattern, Dense):  # which reads them piece by piece
            read += width * vectors * most
        if not isinstance(pattern, Dense | Dilated):  # which has them in one piece with its own
            read += width * vectors * heads.keys * train.chunk_tokens
    modes = [train.checkpointing_of(block) for block in range(model.layers)]
    if full := modes.count("full"):  # of which one block at a time has its rows
        read = read * (model.layers - full + 1) // model.layers
    return {ROWS: kept, "rows that a chunk reads": read, "gradients of rows": gradients}


_count = lru_cache(maxsize=4096)(count_rows)
