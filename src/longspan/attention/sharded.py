"""Attention over a sequence that lies on several ranks in shards.

Each rank has the queries, keys and values of its shard, fetches the key rows that its queries see
elsewhere (`exchange.py`), and attends to both: by kernels where `crossing.py` can, else by plain
code, one key head after another.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.crossing import attend_in_parts, parts_of
from longspan.attention.exchange import Heads, Plan, Shards, fetch, plan_of
from longspan.attention.masked import Mask, masked_attention
from longspan.attention.operator import attend
from longspan.attention.pattern import Dilated, Pattern


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
) -> Tensor:
    """`attend`, where each rank of `group` holds one shard of the tokens.

    q: (batch, own tokens, heads, head_dim); k, v: (batch, own tokens, kv_heads, head_dim). Unless
    `shards` says otherwise, all shards are as long as this one. `documents`: integers (batch,
    tokens) of the whole sequence, the same on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = shards or Shards.even(ranks * q.shape[1], ranks)
    own = shards.of(rank)
    if shards.ranks != ranks or len(own) != q.shape[1] or k.shape[1] != q.shape[1]:
        raise ValueError(
            f"expected {shards.ranks} ranks and, on rank {rank}, {len(own)} tokens of q and k, got "
            f"{ranks} ranks, {q.shape[1]} and {k.shape[1]} tokens"
        )
    heads = Heads(q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(pattern, Dilated) and documents is None and _fits(shards, pattern):
        return attend(q, k, v, pattern, is_causal=is_causal, scale=scale)
    plan = plan_of(pattern, shards, rank, heads, is_causal, q.device)
    if isinstance(pattern, Dilated) and _can_part(q, pattern, documents, is_causal, scale):
        parts = parts_of(pattern, shards, rank, heads, q.device)
        if parts is not None:
            return attend_in_parts(q, k, v, pattern, parts, plan, scale, group)
    k_rows, v_rows = fetch(k, v, plan, group)
    mask = Mask(pattern, is_causal, documents)
    return _attend_to_both(q, k, v, k_rows, v_rows, plan, mask, scale, own, shards.tokens, heads)


def _fits(shards: Shards, pattern: Dilated) -> bool:
    """Whether every segment lies inside a shard, on all ranks: nothing is sent, and none waits."""
    return all(start % w == 0 for start in shards.borders[:-1] for w in pattern.segment_lengths)


def _can_part(
    q: Tensor, pattern: Dilated, documents: Tensor | None, is_causal: bool, scale: float
) -> bool:
    """Whether `crossing.py` can do it; each rank may answer otherwise, as both ways send alike."""
    plain = pattern.blocks is None and documents is None
    return plain and is_causal and scale > 0 and q.device.type == "cpu"


def _attend_to_both(
    q: Tensor, k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, plan: Plan, mask: Mask,
    scale: float, own: range, tokens: int, heads: Heads,
) -> Tensor:  # fmt: skip
    """One key head after another, since each has rows of its own."""
    parts = []
    for key_head in range(heads.keys):
        readers, where = heads.readers(key_head), plan.positions[key_head]
        before = int(torch.searchsorted(where, own.start))
        of_head = plan.received[key_head]

        def joined(x: Tensor, rows: Tensor) -> Tensor:
            fetched = rows[of_head].transpose(0, 1)  # noqa: B023  (batch, rows, head_dim)
            around = [fetched[:, :before], x[:, :, key_head], fetched[:, before:]]  # noqa: B023
            return torch.cat(around, dim=1)[:, :, None]

        positions = torch.cat([where[:before], torch.tensor(own), where[before:]])
        pattern = mask.pattern
        if isinstance(pattern, Dilated):
            pattern = replace(pattern, first_head=pattern.first_head + readers.start)
        parts.append(
            masked_attention(
                q[:, :, readers.start : readers.stop],
                joined(k, k_rows),
                joined(v, v_rows),
                replace(mask, pattern=pattern),
                scale,
                positions,
                first_query=own.start,
                tokens=tokens,
            )
        )
    return torch.cat(parts, dim=2)
