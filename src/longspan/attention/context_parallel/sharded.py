"""`attend_sharded`: attention over a sequence split across ranks (sequence or context parallelism).

Each rank holds the queries, keys and values of its shard. The pattern decides between strategies
and, if several are possible, the bytes that the rank with the most traffic receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.context_parallel.kv_exchange import remote_row_counts
from longspan.attention.context_parallel.ring import ring_attention
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.context_parallel.sparse_kv import sparse_kv_attention
from longspan.attention.context_parallel.ulysses import (
    can_split_heads,
    mask_of_heads,
    ulysses_attention,
)
from longspan.attention.functional import attend_checked
from longspan.attention.mask import Mask, check_mask, check_scale, check_tensors
from longspan.attention.merge import has_flash_kernel
from longspan.attention.packed import Packed
from longspan.attention.pattern import Dense, Dilated, Pattern
from longspan.torch_internals import never_compiled

StrategyName = Literal["local", "sparse_kv", "ring", "ulysses"]


@dataclass(frozen=True)
class Strategy:
    """How ranks communicate keys and values, and why this strategy was chosen."""

    name: StrategyName
    reason: str


@never_compiled
def attend_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    group: dist.ProcessGroup,
    shards: Shards | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`attend` for a sequence of which each rank of `group` holds one shard.

    q: (batch, local tokens, heads, head_dim); k, v: (batch, local tokens, kv_heads, head_dim). By
    default all shards have the same length. `documents` and `key_padding_mask` are those of the
    whole sequence, (batch, tokens), and like `dropout_seed` and `sink_logits` the same on every
    rank; a rank's gradient of `sink_logits` is its share.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    options = documents, key_padding_mask, dropout_p, dropout_seed, sink_logits
    mask = Mask(pattern, is_causal, *options)
    check_tensors(q, k, v)
    shards = shards or Shards.even(ranks * q.shape[1], ranks)
    if shards.ranks != ranks or shards.length(rank) != q.shape[1] or k.shape[1] != q.shape[1]:
        raise ValueError(
            f"expected {shards.ranks} ranks and, on rank {rank}, {shards.length(rank)} tokens of q "
            f"and k, got {ranks} ranks, {q.shape[1]} and {k.shape[1]} tokens"
        )
    check_mask(q, mask, shards.tokens)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        check_scale(scale)
    if documents is None:
        return _attend(q, k, v, mask, scale, shards, rank, group.group_name)
    outputs = []
    for row in range(q.shape[0]):
        rows, of_row = slice(row, row + 1), mask.of_row(row)
        outputs.append(
            _attend(q[rows], k[rows], v[rows], of_row, scale, shards, rank, group.group_name)
        )
    return torch.cat(outputs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, shards: Shards, rank: int, name: str
) -> Tensor:
    """Without `mask.documents`; `name` is that of the group."""
    has_kernels = mask.is_pattern_only and has_flash_kernel(q, scale)
    heads = Heads(q.shape[2], k.shape[2])
    attend_local = partial(attend_checked, scale=scale)
    match strategy_of(mask, shards, heads, has_kernels).name:
        case "local":
            return attend_local(q, k, v, mask)
        case "ring":
            sinks = mask.sink_logits
            return ring_attention(q, k, v, mask.is_causal, scale, shards, rank, name, sinks)
        case "ulysses":
            of_heads = mask_of_heads(mask, heads.queries, shards.ranks, rank)
            attend_heads = partial(attend_local, mask=of_heads)
            return ulysses_attention(q, k, v, attend_heads, shards, rank, name)
        case "sparse_kv":
            return sparse_kv_attention(q, k, v, mask, scale, shards, rank, name, has_kernels)


def choose_strategy(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    shards: Shards,
    *,
    is_causal: bool = True,
    scale: float = 1.0,
    documents: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Strategy:
    """The strategy that `attend_sharded` uses for one rank's q and k, and why.

    "local": every segment lies inside a shard, nothing is communicated. "sparse_kv": each rank
    receives the remote key rows that its queries see. "ring": keys of one rank after another.
    "ulysses": an all-to-all exchanges tokens for heads before attention and back after it.
    """
    mask = Mask(pattern, is_causal, documents, key_padding_mask, dropout_p)
    if documents is not None:
        mask = mask.of_row(0)
    has_kernels = mask.is_pattern_only and has_flash_kernel(q, scale)
    return strategy_of(mask, shards, Heads(q.shape[2], k.shape[2]), has_kernels)


def strategy_of(mask: Mask, shards: Shards, heads: Heads, has_kernels: bool) -> Strategy:
    """The strategy and why; `has_kernels`: whether flash attention supports the queries."""
    pattern = mask.pattern
    if shards.ranks == 1:
        return Strategy("local", "there is one rank")
    is_ring = isinstance(pattern, Dense) and has_kernels
    if shards.is_zigzag and not (is_ring and mask.is_causal):
        raise ValueError(
            "zigzag shards need causal dense attention without documents, padding and dropout, "
            f"got {pattern}: use consecutive shards"
        )
    if isinstance(pattern, Dilated):
        if mask.is_pattern_only and _has_local_segments(shards, pattern):
            return Strategy("local", "every segment lies inside a shard")
        return Strategy("sparse_kv", "a dilated pattern sees few remote rows")
    if isinstance(pattern, Packed) and mask.dropout_p == 0 and can_split_heads(heads, shards.ranks):
        return Strategy("ulysses", "there are documents, which the kernels attend as they are")
    received = received_vectors(pattern, shards, heads, mask.is_causal)
    other: StrategyName = "ring" if is_ring else "sparse_kv"
    if mask.dropout_p > 0 or shards.is_zigzag:
        return Strategy(other, "there is dropout" if mask.dropout_p else "the shards are zigzag")
    if "ulysses" not in received:
        reason = f"{heads.queries} heads cannot be split over {shards.ranks} ranks"
        return Strategy(other, reason)
    reason = (
        f"vectors received per rank and step: {other} {received[other]:,}, "
        f"ulysses {received['ulysses']:,}"
    )
    # If both receive the same, Ulysses has the better load balance.
    is_ulysses = received["ulysses"] <= received[other]
    return Strategy("ulysses" if is_ulysses else other, reason)


@lru_cache(maxsize=64)
def received_vectors(
    pattern: Pattern, shards: Shards, heads: Heads, is_causal: bool
) -> dict[StrategyName, int]:
    """Vectors of head_dim elements that the rank with the most traffic receives in a step.

    Forward and backward, for each strategy; a key and its value are two vectors.
    """
    rows = remote_row_counts(pattern, shards, heads, is_causal)
    keys, gradients = rows.sum(1), rows.sum(0)  # received by each rank
    received: dict[StrategyName, int] = {"sparse_kv": int(2 * (keys + gradients).max())}
    if isinstance(pattern, Dense):
        received["ring"] = int(2 * (2 * keys + gradients).max())  # keys again in the backward pass
    if can_split_heads(heads, shards.ranks):
        longest = max(shards.length(rank) for rank in range(shards.ranks))
        per_token = 2 * heads.queries + 2 * max(heads.keys, shards.ranks)  # q and out, k and v
        received["ulysses"] = 2 * (longest - longest // shards.ranks) * per_token
    return received


def choose_shards(
    patterns: Pattern | Sequence[Pattern], tokens: int, ranks: int, heads: Heads
) -> Shards:
    """How to split a sequence for the causal attention of all layers, by their patterns.

    Zigzag for ring attention, which then has the same work on every rank; else consecutive shards.
    """
    consecutive = Shards.even(tokens, ranks)
    patterns = [patterns] if isinstance(patterns, Pattern) else patterns
    if not all(isinstance(pattern, Dense) for pattern in patterns) or tokens % (2 * ranks):
        return consecutive
    zigzag = Shards.even(tokens, ranks, is_zigzag=True)
    ulysses = received_vectors(Dense(), consecutive, heads, True).get("ulysses")
    ring = received_vectors(Dense(), zigzag, heads, True)["ring"]
    return consecutive if ulysses is not None and ulysses <= ring else zigzag


def _has_local_segments(shards: Shards, pattern: Dilated) -> bool:
    """Whether every segment lies inside a shard, on all ranks, so that none has to communicate."""
    starts = shards.boundaries[:-1]
    return all(start % w == 0 for start in starts for w in pattern.segment_lengths)
