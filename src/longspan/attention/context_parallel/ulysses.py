"""Ulysses: an all-to-all over heads gives each rank all tokens of some heads.

Tokens are exchanged for heads before attention and heads for tokens after it. In between any local
attention runs, with any mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.mask import Mask
from longspan.attention.packed import from_head
from longspan.torch_internals import all_to_all_async, wait


def can_split_heads(heads: Heads, ranks: int) -> bool:
    """Whether every rank gets equally many query heads, and all key heads that they read."""
    return heads.queries % ranks == 0 and (heads.keys % ranks == 0 or ranks % heads.keys == 0)


def mask_of_heads(mask: Mask, heads: int, ranks: int, rank: int) -> Mask:
    """The mask of a rank's share of query heads."""
    count = heads // ranks
    first, sinks = rank * count, mask.sink_logits
    if sinks is not None:
        sinks = sinks[first : first + count]
    return replace(mask, pattern=from_head(mask.pattern, first), sink_logits=sinks)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend_local: Callable[[Tensor, Tensor, Tensor], Tensor],
    shards: Shards,
    rank: int,
    group: str,
) -> Tensor:
    """q (batch, local tokens, heads, head_dim); k, v the same with a divisor of q's heads.

    `attend_local` is called with all tokens of this rank's heads.
    """
    copies = max(1, shards.ranks // k.shape[2])
    if copies > 1:  # a key head that several ranks read is sent to each of them
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    lengths = tuple(shards.length(i) for i in range(shards.ranks))
    out = attend_local(*(_all_to_all(x, True, lengths, rank, group) for x in (q, k, v)))
    return _all_to_all(out, False, lengths, rank, group)


def _all_to_all(
    x: Tensor, to_heads: bool, lengths: tuple[int, ...], rank: int, group: str
) -> Tensor:
    out: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        x, to_heads, lengths, rank, group
    )
    return out


class _AllToAll(torch.autograd.Function):
    """(batch, local tokens, all heads, dims) to (batch, all tokens, local heads, dims), or back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to_heads: bool, lengths: tuple[int, ...], rank: int, group: str
    ) -> Tensor:
        ctx.settings = lengths, rank, group
        ctx.to_heads = to_heads
        return _to_heads(x, *ctx.settings) if to_heads else _to_tokens(x, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse = _to_tokens if ctx.to_heads else _to_heads
        return inverse(grad, *ctx.settings), None, None, None, None


def _to_heads(x: Tensor, lengths: tuple[int, ...], rank: int, group: str) -> Tensor:
    ranks = len(lengths)
    batch, tokens, _, dims = x.shape
    sent = x.reshape(batch, tokens, ranks, -1, dims).permute(2, 1, 0, 3, 4).flatten(0, 1)
    rows = wait(all_to_all_async(sent, [lengths[rank]] * ranks, lengths, group))
    return rows.transpose(0, 1).contiguous()


def _to_tokens(x: Tensor, lengths: tuple[int, ...], rank: int, group: str) -> Tensor:
    ranks = len(lengths)
    rows = wait(all_to_all_async(x.transpose(0, 1), lengths, [lengths[rank]] * ranks, group))
    return rows.view(ranks, -1, *rows.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)
