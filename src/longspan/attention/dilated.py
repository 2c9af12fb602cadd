"""Dilated attention as one custom operator: O(tokens) memory, exact gradients through the join.

Branch (w, r) needs no gather. Head h keeps positions p ≡ h (mod r), so the heads h ≡ b (mod r)
together read the strided view x[:, b::r, b::r], in which a segment is w/r consecutive rows. Each
such view is a batch of ordinary attentions; their outputs are joined by log-sum-exp.

Worked example, w = 4, r = 2, two heads, eight tokens: head 0 reads rows 0 2 | 4 6, head 1 reads
rows 1 3 | 5 7, where | parts the segments; rows 1 3 5 7 of head 0 are left to other branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attention.partial import partial_backward, partial_forward


@dataclass(frozen=True)
class _Piece:
    """Rows and heads of one branch that form attentions over `length` rows each."""

    rows: slice
    heads: slice
    length: int

    def of(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, ...) to this piece's own (batch, rows, heads, ...), a view."""
        return x[:, self.rows, self.heads]

    def split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, ...) to (batch·segments, heads, length, ...)."""
        own = self.of(x)
        return own.reshape(-1, self.length, *own.shape[2:]).transpose(1, 2)

    def join(self, part: Tensor, like: Tensor) -> Tensor:
        """The inverse of `split`, shaped as the piece of `like`."""
        return part.transpose(1, 2).reshape(self.of(like).shape)


def _pieces(tokens: int, heads: int, w: int, r: int) -> Iterator[_Piece]:
    """The views of branch (w, r): its whole segments, then what is left of the last one."""
    for offset in range(min(r, heads, tokens)):
        rows = len(range(offset, tokens, r))
        rest = rows % (w // r)
        border = offset + (rows - rest) * r
        if border > offset:
            yield _Piece(slice(offset, border, r), slice(offset, None, r), w // r)
        if rest:
            yield _Piece(slice(border, None, r), slice(offset, None, r), rest)


def _all_pieces(q: Tensor, segment_lengths: Sequence[int], rates: Sequence[int]) -> list[_Piece]:
    tokens, heads = q.shape[1:3]
    branches = zip(segment_lengths, rates, strict=True)
    return [piece for w, r in branches for piece in _pieces(tokens, heads, w, r)]


def _accumulate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op("longspan::dilated_attention", mutates_args=())
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q, k, v (batch, tokens, heads, head_dim) to the output and its lse (batch, tokens, heads)."""
    out = torch.zeros(q.shape, dtype=_accumulate_dtype(q), device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
    for piece in _all_pieces(q, segment_lengths, dilation_rates):
        part, part_lse = partial_forward(
            piece.split(q), piece.split(k), piece.split(v), is_causal, scale
        )
        part, part_lse = piece.join(part, out), piece.join(part_lse, lse)
        old, old_lse = piece.of(out), piece.of(lse)
        new_lse = torch.logaddexp(old_lse, part_lse)
        old.mul_((old_lse - new_lse).exp()[..., None])
        old.addcmul_(part.to(old.dtype), (part_lse - new_lse).exp()[..., None])
        old_lse.copy_(new_lse)
    return out.to(q.dtype), lse


@dilated_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Any, dilation_rates: Any,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=_accumulate_dtype(q), device=q.device)


@torch.library.custom_op("longspan::dilated_attention_backward", mutates_args=())
def _dilated_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for piece in _all_pieces(q, segment_lengths, dilation_rates):
        shares = partial_backward(
            piece.split(grad_out),
            piece.split(q),
            piece.split(k),
            piece.split(v),
            piece.split(out),
            piece.split(lse),
            is_causal,
            scale,
        )
        for grad, share in zip(grads, shares, strict=True):
            piece.of(grad).add_(piece.join(share, grad))
    grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


@_dilated_attention_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segment_lengths: Any, dilation_rates: Any, is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _dilated_attention_backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return (*grads, None, None, None, None)


dilated_attention.register_autograd(_backward, setup_context=_setup_context)
