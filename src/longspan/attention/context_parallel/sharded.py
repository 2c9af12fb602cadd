"""Attention over a sequence that lies on several ranks in shards.

Each rank has the queries, keys and values of its shard. Which way they meet follows from the
pattern, and where there are several from the bytes they move: those that the rank with most
receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.context_parallel.dilated import attend_in_parts, parts_of
from longspan.attention.context_parallel.kv_exchange import Plan, fetch, outer_rows, plan_of
from longspan.attention.context_parallel.ring import attend_in_rounds, seen_keys
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.context_parallel.ulysses import attend_by_heads, can_split
from longspan.attention.functional import attend, check_mask, check_tensors
from longspan.attention.merge import has_kernel
from longspan.attention.pattern import Dense, Dilated, Pattern
from longspan.attention.reference import Mask, masked_attention

WayName = Literal["nothing", "rows", "ring", "heads"]


@dataclass(frozen=True)
class Way:
    """What ranks tell one another, and why that."""

    name: WayName
    reason: str


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
) -> Tensor:
    """`attend`, where each rank of `group` holds one shard of the tokens.

    q: (batch, own tokens, heads, head_dim); k, v: (batch, own tokens, kv_heads, head_dim). Unless
    `shards` says otherwise, all shards are as long as this one. `documents` and `key_padding_mask`
    are those of the whole sequence, (batch, tokens), the same on every rank, as `dropout_seed` is.
    """
    check_tensors(q, k, v)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = shards or Shards.even(ranks * q.shape[1], ranks)
    if shards.ranks != ranks or shards.length(rank) != q.shape[1] or k.shape[1] != q.shape[1]:
        raise ValueError(
            f"expected {shards.ranks} ranks and, on rank {rank}, {shards.length(rank)} tokens of q "
            f"and k, got {ranks} ranks, {q.shape[1]} and {k.shape[1]} tokens"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = Mask(pattern, is_causal, documents, key_padding_mask, dropout_p, dropout_seed)
    check_mask(q, mask, shards.tokens)
    heads, name = Heads(q.shape[2], k.shape[2]), group.group_name
    match _choose(q, mask, scale, shards, heads).name:
        case "nothing":
            return attend(
                q, k, v, pattern, is_causal=is_causal, scale=scale, documents=documents,
                key_padding_mask=key_padding_mask, dropout_p=dropout_p, dropout_seed=dropout_seed,
            )  # fmt: skip
        case "ring":
            return attend_in_rounds(
                q, k, v, shards, rank, is_causal=is_causal, scale=scale, group=name
            )
        case "heads":
            return attend_by_heads(q, k, v, mask, scale, shards, rank, name)
    plan = plan_of(pattern, shards, rank, heads, is_causal, q.device)
    # Each rank may answer this otherwise: both ways send the same rows.
    if isinstance(pattern, Dilated) and _is_plain(q, mask, scale) and is_causal:
        parts = parts_of(pattern, shards, rank, heads, q.device) if not pattern.blocks else None
        if parts is not None:
            return attend_in_parts(q, k, v, pattern, parts, plan, scale, name)
    k_rows, v_rows = fetch(k, v, plan, name)
    return _attend_to_both(q, k, v, k_rows, v_rows, plan, mask, scale, shards, rank)


def choose_way(
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
) -> Way:
    """The way `attend_sharded` takes for one rank's q and k, and why.

    "nothing": every segment lies inside a shard. "rows": each rank fetches the key rows its queries
    see elsewhere. "ring": all keys they see, from one rank at a time. "heads": tokens are exchanged
    for heads before attention and back after it.
    """
    mask = Mask(pattern, is_causal, documents, key_padding_mask, dropout_p)
    return _choose(q, mask, scale, shards, Heads(q.shape[2], k.shape[2]))


def _choose(q: Tensor, mask: Mask, scale: float, shards: Shards, heads: Heads) -> Way:
    pattern = mask.pattern
    is_plain = _is_plain(q, mask, scale)
    if shards.ranks == 1:
        return Way("nothing", "there is one rank")
    if shards.is_zigzag and not (isinstance(pattern, Dense) and mask.is_causal and is_plain):
        raise ValueError(
            "paired shards are for causal dense attention without documents, padding and dropout, "
            f"got {pattern}: use consecutive shards"
        )
    if isinstance(pattern, Dilated):
        masks_nothing = mask.documents is None and mask.key_padding_mask is None
        if masks_nothing and mask.dropout_p == 0 and _fits(shards, pattern):
            return Way("nothing", "every segment lies inside a shard")
        return Way("rows", "a dilated pattern, of which few rows are seen elsewhere")
    is_ring = isinstance(pattern, Dense) and is_plain
    moved = vectors_moved(pattern, shards, heads, mask.is_causal)
    other: WayName = "ring" if is_ring else "rows"
    counts = f"vectors a rank receives in a step: {other} {moved[other]:,}"
    if mask.dropout_p > 0 or shards.is_zigzag:
        return Way(other, "there is dropout" if mask.dropout_p else "the shards are paired")
    if "heads" not in moved:
        return Way(other, f"{heads.queries} heads do not split over {shards.ranks} ranks")
    counts = f"{counts}, heads {moved['heads']:,}"
    # Where both move as much, by heads all ranks have as much to do.
    return Way("heads" if moved["heads"] <= moved[other] else other, counts)


@lru_cache(maxsize=64)
def vectors_moved(
    pattern: Pattern, shards: Shards, heads: Heads, is_causal: bool
) -> dict[WayName, int]:
    """Vectors of head_dim numbers that the rank with most receives in a step, each way.

    Forward and backward; a key and its value are two.
    """
    seen = _seen(pattern, shards, heads, is_causal)
    keys, gradients = seen.sum(1), seen.sum(0)  # that each rank receives
    moved: dict[WayName, int] = {"rows": int(2 * (keys + gradients).max())}
    if isinstance(pattern, Dense):
        moved["ring"] = int(2 * (2 * keys + gradients).max())  # the backward pass fetches again
    if can_split(heads, shards.ranks):
        longest = max(shards.length(rank) for rank in range(shards.ranks))
        per_token = 2 * heads.queries + 2 * max(heads.keys, shards.ranks)  # q and out, k and v
        moved["heads"] = 2 * (longest - longest // shards.ranks) * per_token
    return moved


def _seen(pattern: Pattern, shards: Shards, heads: Heads, is_causal: bool) -> Tensor:
    """Rows of all key heads that each rank sees of each other: int64 (readers, owners)."""
    ranks = range(shards.ranks)
    if isinstance(pattern, Dense):
        counts = [[seen_keys(shards, a, b, is_causal) for b in ranks] for a in ranks]
        return heads.keys * torch.tensor(counts).fill_diagonal_(0)
    borders = torch.tensor(shards.borders)
    wanted = (outer_rows(pattern, shards, rank, heads, is_causal) for rank in ranks)
    cuts = (torch.stack([torch.searchsorted(x, borders).diff() for x in rows]) for rows in wanted)
    return torch.stack([counts.sum(0) for counts in cuts])


def best_shards(pattern: Pattern, tokens: int, ranks: int, heads: Heads) -> Shards:
    """How to cut a sequence for causal attention: in pairs of pieces where dense attention goes
    round the ring, which then has as much to do on every rank; else in consecutive shards.
    """
    plain = Shards.even(tokens, ranks)
    if not isinstance(pattern, Dense) or tokens % (2 * ranks):
        return plain
    pairs = Shards.even(tokens, ranks, is_zigzag=True)
    by_heads = vectors_moved(pattern, plain, heads, True).get("heads")
    in_pairs = vectors_moved(pattern, pairs, heads, True)["ring"]
    return plain if by_heads is not None and by_heads <= in_pairs else pairs


def _fits(shards: Shards, pattern: Dilated) -> bool:
    """Whether every segment lies inside a shard, on all ranks: nothing is sent, and none waits."""
    return all(start % w == 0 for start in shards.borders[:-1] for w in pattern.segment_lengths)


def _is_plain(q: Tensor, mask: Mask, scale: float) -> bool:
    """Whether nothing is masked but by the pattern, and there are kernels."""
    masks_nothing = mask.documents is None and mask.key_padding_mask is None
    return masks_nothing and mask.dropout_p == 0 and scale > 0 and has_kernel(q)


def _attend_to_both(
    q: Tensor, k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, plan: Plan, mask: Mask,
    scale: float, shards: Shards, rank: int,
) -> Tensor:  # fmt: skip
    """One key head after another, since each has rows of its own."""
    own, parts = shards.of(rank), []
    for key_head in range(k.shape[2]):
        readers, where = Heads(q.shape[2], k.shape[2]).readers(key_head), plan.positions[key_head]
        before = int(torch.searchsorted(where, own.start))
        of_head = plan.received[key_head]

        def joined(x: Tensor, rows: Tensor) -> Tensor:
            fetched = rows[of_head].transpose(0, 1)  # noqa: B023  (batch, rows, head_dim)
            around = [fetched[:, :before], x[:, :, key_head], fetched[:, before:]]  # noqa: B023
            return torch.cat(around, dim=1)[:, :, None]

        parts.append(
            masked_attention(
                q[:, :, readers.start : readers.stop],
                joined(k, k_rows),
                joined(v, v_rows),
                mask,
                scale,
                torch.cat([where[:before], torch.tensor(own), where[before:]]),
                first_query=own.start,
                first_head=readers.start,
                tokens=shards.tokens,
            )
        )
    return torch.cat(parts, dim=2)
