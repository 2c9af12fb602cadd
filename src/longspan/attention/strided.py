"""Dilated attention as strided views into torch's own kernels, merged by log-sum-exp.

On a CPU that is the flash kernel for CPUs, on a GPU memory-efficient attention: for GPUs that the
Triton kernels do not support, such as a V100.

Branch (w, r) needs no gather. Head h keeps positions p ≡ h (mod r), so the heads h ≡ b (mod r)
together read the strided view x[:, b::r, b::r], in which a segment is w/r consecutive rows. Each
such view is a batch of ordinary attentions.

Worked example, w = 4, r = 2, two heads, eight tokens: head 0 reads rows 0 2 | 4 6, head 1 reads
rows 1 3 | 5 7, where | separates segments; rows 1 3 5 7 of head 0 are left to other branches.

`merge` explains why each view's backward pass gives its exact share of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.merge import merge_partial, sdpa_kernels
from longspan.attention.pattern import Dilated
from longspan.dtypes import accumulation_dtype


@dataclass(frozen=True)
class _StridedView:
    """Rows and heads of one branch that form attentions over `length` rows each."""

    rows: slice
    heads: slice
    length: int

    def of(self, x: Tensor) -> Tensor:
        """A view (batch, rows, heads, ...) of x (batch, tokens, heads, ...)."""
        return x[:, self.rows, self.heads]

    def split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, ...) to (batch·segments, heads, length, ...)."""
        view = self.of(x)
        return view.reshape(-1, self.length, *view.shape[2:]).transpose(1, 2)

    def unsplit(self, partial: Tensor, like: Tensor) -> Tensor:
        """The inverse of `split`, shaped like the view of `like`."""
        return partial.transpose(1, 2).reshape(self.of(like).shape)


def _strided_views(q: Tensor, pattern: Dilated) -> Iterator[_StridedView]:
    """The views of each branch: its full segments, then the rest of the last one."""
    tokens, heads = q.shape[1:3]
    for w, r in pattern.branches:
        for offset in range(min(r, tokens)):
            view_heads = slice((offset - pattern.first_head) % r, heads, r)
            rows = len(range(offset, tokens, r))
            rest = rows % (w // r)
            boundary = offset + (rows - rest) * r
            if view_heads.start >= heads:
                continue
            if boundary > offset:
                yield _StridedView(slice(offset, boundary, r), view_heads, w // r)
            if rest:
                yield _StridedView(slice(boundary, None, r), view_heads, rest)


def _kernel_input(x: Tensor, heads: int) -> Tensor:
    """One head per query head, and contiguous rows, which the kernels take for granted."""
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
    return x if x.stride(3) == 1 else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp (batch, heads, tokens), in float32 or, for float64, float64.

    q (batch, tokens, heads, head_dim); k, v the same with a divisor of q's heads.
    """
    dtype = accumulation_dtype(q)
    q, k, v = (_kernel_input(x, q.shape[2]) for x in (q, k, v))
    attention, _ = sdpa_kernels(q)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    stored_lse = torch.full_like(out[..., 0].transpose(1, 2), -torch.inf).contiguous()
    lse = stored_lse.transpose(1, 2)
    for view in _strided_views(q, pattern):
        inputs = (view.split(x) for x in (q, k, v))
        partial, partial_lse = attention(*inputs, is_causal=is_causal, scale=scale)
        partial, partial_lse = view.unsplit(partial, out), view.unsplit(partial_lse, lse)
        merge_partial(view.of(out), view.of(lse), partial, partial_lse)
    return out.to(q.dtype), stored_lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Dilated,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given that of the output and the results of `forward`."""
    kv_heads = k.shape[2]
    grad_out, q, k, v, out = (_kernel_input(x, q.shape[2]) for x in (grad_out, q, k, v, out))
    lse = lse.transpose(1, 2)
    _, gradients = sdpa_kernels(q)
    grads = tuple(torch.zeros(q.shape, dtype=lse.dtype, device=q.device) for _ in range(3))
    for view in _strided_views(q, pattern):
        inputs = (view.split(x) for x in (grad_out, q, k, v, out, lse))
        partials = gradients(*inputs, is_causal=is_causal, scale=scale)
        for grad, partial in zip(grads, partials, strict=True):
            view.of(grad).add_(view.unsplit(partial, grad))
    grad_q, grad_k, grad_v = grads
    grouped = (*q.shape[:2], kv_heads, -1, q.shape[3])
    grad_k, grad_v = grad_k.view(grouped).sum(3), grad_v.view(grouped).sum(3)
    return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype)
