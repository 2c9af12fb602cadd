"""Dilated attention on a CPU: strided views into torch's flash kernel, joined by log-sum-exp.

Branch (w, r) needs no gather. Head h keeps positions p ≡ h (mod r), so the heads h ≡ b (mod r)
together read the strided view x[:, b::r, b::r], in which a segment is w/r consecutive rows. Each
such view is a batch of ordinary attentions.

Worked example, w = 4, r = 2, two heads, eight tokens: head 0 reads rows 0 2 | 4 6, head 1 reads
rows 1 3 | 5 7, where | parts the segments; rows 1 3 5 7 of head 0 are left to other branches.

How a part's share of the gradient is found: see `parts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.merge import exact_type, flash, flash_backward, join_part


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


def _pieces(
    q: Tensor, segment_lengths: Sequence[int], rates: Sequence[int], first_head: int
) -> Iterator[_Piece]:
    """The views of each branch: its whole segments, then what is left of the last one."""
    tokens, heads = q.shape[1:3]
    for w, r in zip(segment_lengths, rates, strict=True):
        for offset in range(min(r, tokens)):
            own_heads = slice((offset - first_head) % r, heads, r)
            rows = len(range(offset, tokens, r))
            rest = rows % (w // r)
            border = offset + (rows - rest) * r
            if own_heads.start >= heads:
                continue
            if border > offset:
                yield _Piece(slice(offset, border, r), own_heads, w // r)
            if rest:
                yield _Piece(slice(border, None, r), own_heads, rest)


def _rows(x: Tensor, heads: int) -> Tensor:
    """One head per query head, and rows without gaps, which the flash kernel takes for granted."""
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x if x.stride(3) == 1 else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    first_head: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q (batch, tokens, heads, head_dim) and k, v with heads that divide q's, to the output and
    its log-sum-exp (batch, heads, tokens), which is float32 or, for float64, float64.
    """
    exact = exact_type(q)
    q, k, v = (_rows(x, q.shape[2]) for x in (q, k, v))
    out = torch.zeros(q.shape, dtype=exact)
    stored_lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=exact)
    lse = stored_lse.transpose(1, 2)
    for piece in _pieces(q, segment_lengths, rates, first_head):
        part, part_lse = flash(
            piece.split(q), piece.split(k), piece.split(v), 0.0, is_causal, scale=scale
        )
        join_part(piece.of(out), piece.of(lse), piece.join(part, out), piece.join(part_lse, lse))
    return out.to(q.dtype), stored_lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    first_head: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output and what `forward` returned."""
    kv_heads = k.shape[2]
    grad_out, q, k, v, out = (_rows(x, q.shape[2]) for x in (grad_out, q, k, v, out))
    lse = lse.transpose(1, 2)
    grads = tuple(torch.zeros(q.shape, dtype=lse.dtype) for _ in range(3))
    for piece in _pieces(q, segment_lengths, rates, first_head):
        inputs = (piece.split(x) for x in (grad_out, q, k, v, out, lse))
        shares = flash_backward(*inputs, 0.0, is_causal, scale=scale)
        for grad, share in zip(grads, shares, strict=True):
            piece.of(grad).add_(piece.join(share, grad))
    grad_q, grad_k, grad_v = grads
    grouped = (*q.shape[:2], kv_heads, -1, q.shape[3])
    grad_k, grad_v = grad_k.view(grouped).sum(3), grad_v.view(grouped).sum(3)
    return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype)
