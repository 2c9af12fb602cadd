"""Collectives inside the forward and backward pass: tensor and sequence (context) parallelism.

Tensor parallelism all-reduces the outputs of attention and MLP, and the gradients of their inputs.
With Megatron-style sequence parallelism each all-reduce is a reduce-scatter and an all-gather. With
sketched or low-rank layers the residual stream is split by features, and only what lies between the
factors of a layer is all-reduced. Outputs have the run's precision; the inputs and their gradients
are float32, as the residual stream is. Activation checkpointing repeats what a block communicates
in its forward pass, except for its last output and for the exchanges of sequence parallelism.

Sequence parallelism exchanges what the pattern says (`attention.context_parallel`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from longspan.attention import Heads, Mask, Pattern, Shards, choose_shards
from longspan.attention.context_parallel.kv_exchange import remote_row_counts, remote_rows
from longspan.attention.context_parallel.ring import ring_schedule
from longspan.attention.context_parallel.sharded import strategy_of
from longspan.attention.pattern import Dilated
from longspan.constants import LOSS_CHUNK
from longspan.costs import linear_sizes, rank_of
from longspan.planning.traffic import FLOAT32, Step, Traffic

COUNTED_ROWS = 10_000
"""Heads see about as many rows each: beyond so many of the first, the others are not counted."""


def tensor_traffic(step: Step) -> Iterator[Traffic]:
    """The collectives of tensor parallelism."""
    ranks = step.ranks.tensor
    if ranks == 1:
        return
    whole = step.tokens * step.model.hidden
    is_split = step.residual != "none"
    repeats = 1 if step.run.train.activation_checkpointing != "none" else 0

    def traffic(collective: str, size: int, calls: int, purpose: str) -> Traffic:
        return Traffic("tensor", collective, ranks, size, calls * step.micro_batches, purpose)

    if step.is_first:
        collective = "reduce_scatter" if is_split else "all_reduce"
        yield traffic(collective, FLOAT32 * whole, 1, "embedding")
        if is_split:
            yield traffic("all_gather", FLOAT32 * whole, 1, "gradient of the embedding")
    counts = Counter[tuple[str, int, str]]()
    for block, copies in step.blocks():
        for key, calls in _block(step, block, whole, repeats).items():
            counts[key] += copies * calls
    for (collective, size, purpose), calls in counts.items():
        yield traffic(collective, size, calls, purpose)
    if step.is_last:
        yield from _head(step, whole, ranks)
    if step.residual == "tokens":  # each rank has the gradient of its tokens
        layers = sum(copies for _, copies in step.blocks())
        is_fsdp = step.ranks.is_fsdp
        reduces_each = is_fsdp and step.layout.zero > 1 and step.ranks.pipeline == 1
        reduces = step.micro_batches if reduces_each else 1
        # FSDP2 gathers blocks in the run's precision, and accumulates gradients in float32.
        width = step.width if is_fsdp and reduces == step.micro_batches else FLOAT32
        for norms, size in ((2 * layers, width), (int(step.is_last), FLOAT32)):
            size *= step.model.hidden
            calls = norms * reduces
            yield Traffic("tensor", "all_reduce", ranks, size, calls, "gradients of norms")


def _block(step: Step, block: int, whole: int, repeats: int) -> Counter[tuple[str, int, str]]:
    """Calls per micro-batch by collective, bytes and purpose."""
    model, is_split = step.model, step.residual != "none"
    found = Counter[tuple[str, int, str]]()
    per_token = FLOAT32 * step.tokens
    if step.residual == "features":
        found["all_reduce", per_token, "sums of squares in norms"] += 2 * (2 + repeats)
    if model.sub_layer_norm:
        found["all_reduce", per_token, "sums of squares in sub-layer norms"] += 2 * (2 + repeats)
    if model.qk_norm:  # replicated, and each rank has the gradient of its heads
        width = step.width if step.ranks.is_fsdp else FLOAT32
        found["all_reduce", width * model.head_dim, "gradients of q/k norms"] += 2
    ranks = {
        name: rank_of(model, f"blocks.{block}.{name}", *size)
        for name, size in linear_sizes(model).items()
    }
    for rank in filter(None, ranks.values()):
        factors = 2 * model.sketch.terms if model.linear == "sketched" else 1
        size = step.width * step.tokens * factors * rank
        found["all_reduce", size, "between the factors of linear layers"] += 2 + repeats
    for part, inputs, output in (
        ("attention", ("query", "key", "value"), "out"),
        ("mlp", ("gate", "up"), "down"),
    ):
        dense = sum(not ranks[f"{part}.{name}"] for name in inputs)
        gathers = 1 if dense == len(inputs) else dense  # one for all of them, if all are dense
        what = "attention" if part == "attention" else "the MLP"
        scatters = int(not ranks[f"{part}.{output}"])
        # Recomputation stops before the last output of a block.
        again = repeats if part == "attention" else 0
        reduce = "reduce_scatter" if is_split else "all_reduce"
        found[reduce, step.width * whole, f"output of {what}"] += scatters * (1 + again)
        found[reduce, FLOAT32 * whole, f"gradient of {what}'s input"] += gathers
        if is_split:
            inputs_again = gathers * (1 + repeats)
            found["all_gather", FLOAT32 * whole, f"input of {what}"] += inputs_again
            found["all_gather", step.width * whole, f"gradient of {what}'s output"] += scatters
    return found


def _head(step: Step, whole: int, ranks: int) -> Iterator[Traffic]:
    """The last norm, and the loss from sharded logits, chunk by chunk."""
    calls, width = step.micro_batches, FLOAT32
    if step.residual == "features":
        size = width * step.tokens
        yield Traffic("tensor", "all_reduce", ranks, size, 2 * calls, "sums of squares in norms")
    if step.residual != "none":
        yield Traffic("tensor", "all_gather", ranks, width * whole, calls, "input of the head")
    rows = min(step.tokens, max(1, LOSS_CHUNK // (step.model.vocab // ranks)))
    chunks = -(-step.tokens // rows)
    mean = step.tokens * width // chunks
    yield Traffic("tensor", "all_reduce", ranks, mean, chunks * calls, "maximum of the softmax")
    yield Traffic("tensor", "all_reduce", ranks, 2 * mean, chunks * calls, "sum of the softmax")
    size = step.width * whole
    yield Traffic("tensor", "all_reduce", ranks, size, calls, "gradient of the head's input")


def sequence_traffic(step: Step, sequence_rank: int | None) -> Iterator[Traffic]:
    """The exchanges of sequence (context) parallelism."""
    ranks, model = step.ranks.sequence, step.model
    if ranks == 1:
        return
    tensor = step.ranks.tensor
    heads = Heads(model.heads // tensor, model.kv_heads // tensor)
    patterns, context = step.parts.patterns, step.run.data.context
    vector = step.width * step.run.train.micro_batch * model.head_dim
    for block, copies in step.blocks():
        for vectors, times, purpose, is_sparse in exchanges(
            patterns[block],
            patterns,
            context,
            ranks,
            heads,
            sequence_rank,
            is_chunk=step.run.train.chunk_tokens > 0,
        ):
            yield Traffic(
                "sequence",
                "all_to_all",
                ranks,
                vector * vectors,
                times * copies * step.micro_batches,
                purpose,
                overlaps=is_sparse,
                is_sparse=is_sparse,
            )


def exchanges(
    pattern: Pattern,
    patterns: Sequence[Pattern],
    context: int,
    ranks: int,
    heads: Heads,
    rank: int | None,
    *,
    is_chunk: bool = False,
) -> tuple[tuple[int, int, str, bool], ...]:
    """What attention exchanges in a layer with `pattern`, forward and backward, for one sequence.

    `patterns` are those of all layers, which decide how the sequence is split; `is_chunk`: it is a
    chunk, whose ranks always exchange tokens for heads.
    Each entry: vectors of head_dim elements, calls, what they are, and whether none of them stays
    on the rank. `rank` None is the one that communicates most.
    """
    if is_chunk:
        return _of_ulysses(Shards.even(context, ranks).length(rank or 0), ranks, heads)
    shards = choose_shards(patterns, context, ranks, heads)
    return _exchanges(pattern, shards, heads, rank)


def _of_ulysses(length: int, ranks: int, heads: Heads) -> tuple[tuple[int, int, str, bool], ...]:
    """Of a rank with `length` tokens."""
    copies = max(heads.keys, ranks)
    return (
        (length * heads.queries, 4, "queries and outputs, all tokens of some heads", False),
        (length * copies, 4, "keys and values, all tokens of some heads", False),
    )


@lru_cache(maxsize=256)
def _exchanges(
    pattern: Pattern, shards: Shards, heads: Heads, rank: int | None
) -> tuple[tuple[int, int, str, bool], ...]:
    ranks = shards.ranks
    strategy = strategy_of(Mask(pattern, True), shards, heads, has_kernels=True).name
    if strategy == "local":
        return ()
    if strategy == "ulysses":
        return _of_ulysses(shards.length(rank or 0), ranks, heads)
    if strategy == "ring":
        found = Counter[tuple[int, str]]()
        last = ranks - 1
        for a in ring_schedule(shards, last if rank is None else rank, True):
            rows = 2 * heads.keys * max(a.send_count, a.receive_count)
            found[rows, "keys and values of a round"] += 2
            found[rows, "gradients of a round"] += 1
        return tuple((rows, calls, what, True) for (rows, what), calls in found.items())
    rows = 2 * _rows(pattern, shards, heads, rank)
    return ((rows, 1, "remote keys and values", True), (rows, 1, "their gradients", True))


def _rows(pattern: Pattern, shards: Shards, heads: Heads, rank: int | None) -> int:
    """Rows of the sparse KV exchange that a rank sends or receives, whichever are more."""
    if rank is not None or not isinstance(pattern, Dilated) or pattern.blocks is not None:
        counts = remote_row_counts(pattern, shards, heads, True)
        most = counts.sum(1).maximum(counts.sum(0))
        return int(most.max() if rank is None else most[rank])
    # The rank that is farthest from the start of its segments receives most; no other sends more.
    starts = shards.boundaries[:-1]
    branches = pattern.branches
    busiest = max(range(len(starts)), key=lambda i: sum(starts[i] % w / r for w, r in branches))
    first = _estimated_rows(pattern, starts[busiest], heads.queries // heads.keys)
    if first > COUNTED_ROWS:
        return first * heads.keys
    return sum(map(len, remote_rows(pattern, shards, busiest, heads, True)))


def _estimated_rows(pattern: Dilated, start: int, heads: int) -> int:
    """Rows before position `start` that a key head's `heads` query heads see from there on.

    Between the starts of two segments the branches of the longer ones see every r-th position each.
    If rates divide each other, those of the smallest rate include the others; else they add up, at
    most to all positions.
    """
    begins = {(start // w * w, r) for w, r in pattern.branches}
    rows, stop = 0.0, start
    for begin in sorted({begin for begin, _ in begins}, reverse=True):
        rates = sorted({r for other, r in begins if other <= begin})
        shares = [min(heads, r) / r for r in rates]
        is_nested = all(b % a == 0 for a, b in pairwise(rates))
        rows += (stop - begin) * (shares[0] if is_nested else min(1.0, sum(shares)))
        stop = begin
    return round(rows)
