"""Attention over shards by heads: each rank takes all tokens of some heads (Ulysses).

Tokens are exchanged for heads before attention, and heads for tokens after it. In between it is
attention in one process, whatever the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.kv_exchange import arrived, start
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.functional import attend
from longspan.attention.reference import Mask


def can_split(heads: Heads, ranks: int) -> bool:
    """Whether every rank gets as many query heads, and all key heads they read."""
    return heads.queries % ranks == 0 and (heads.keys % ranks == 0 or ranks % heads.keys == 0)


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, shards: Shards, rank: int, group: str
) -> Tensor:
    """q (batch, own tokens, heads, head_dim); k, v the same with heads that divide q's."""
    copies = max(1, shards.ranks // k.shape[2])
    if copies > 1:  # a key head that several ranks read goes to each of them
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
    lengths = tuple(shards.length(i) for i in range(shards.ranks))
    settings = lengths, rank, group
    all_q, all_k, all_v = (_swap(x, True, *settings) for x in (q, k, v))
    out = attend(
        all_q,
        all_k,
        all_v,
        mask.pattern,
        is_causal=mask.is_causal,
        scale=scale,
        documents=mask.documents,
        key_padding_mask=mask.key_padding_mask,
    )
    return _swap(out, False, *settings)


def _swap(x: Tensor, to_heads: bool, lengths: tuple[int, ...], rank: int, group: str) -> Tensor:
    out: Tensor = _Swap.apply(x, to_heads, lengths, rank, group)  # type: ignore[no-untyped-call]
    return out


class _Swap(torch.autograd.Function):
    """(batch, own tokens, all heads, dims) to (batch, all tokens, own heads, dims), and back."""

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
        back = _to_tokens if ctx.to_heads else _to_heads
        return back(grad, *ctx.settings), None, None, None, None


def _to_heads(x: Tensor, lengths: tuple[int, ...], rank: int, group: str) -> Tensor:
    ranks = len(lengths)
    batch, tokens, _, dims = x.shape
    sent = x.reshape(batch, tokens, ranks, -1, dims).permute(2, 1, 0, 3, 4).flatten(0, 1)
    rows = arrived(start(sent, [lengths[rank]] * ranks, lengths, group))
    return rows.transpose(0, 1).contiguous()


def _to_tokens(x: Tensor, lengths: tuple[int, ...], rank: int, group: str) -> Tensor:
    ranks = len(lengths)
    rows = arrived(start(x.transpose(0, 1), lengths, [lengths[rank]] * ranks, group))
    return rows.view(ranks, -1, *rows.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)
