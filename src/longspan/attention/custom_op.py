"""Branch attention as one custom operator: O(tokens) memory, exact gradients through the merge.

`cpu` computes it on a CPU, the Triton kernels of `kernels.dispatch` on a GPU. A dense or
block-sparse pattern is one branch whose segment is the whole sequence.

torch.compile, fake tensors and dispatch modes see a custom operator with known shapes. Without
them the same functions run in a plain autograd function: a custom operator costs 0.4 ms of overhead
on a slow core, more than a short attention takes. A pattern is passed as an object; only the custom
operator needs it as plain numbers, see `flatten`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import cpu
from longspan.attention.packed import document_starts
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import has_dispatch_mode

FlatPattern = tuple[Sequence[int], Sequence[int], Sequence[float], int]
Ids = tuple[Tensor | None, Tensor | None]


def flatten(pattern: Pattern) -> FlatPattern:
    """Segment lengths, dilation rates, fields of block sparsity and first head of a pattern."""
    assert isinstance(pattern, Dense | Dilated | BlockSparse), pattern
    blocks = pattern.blocks if isinstance(pattern, Dilated) else pattern
    fields: list[float] = []
    if isinstance(blocks, BlockSparse):
        *sizes, seed = astuple(blocks)
        fields = [*map(float, sizes), float(seed % 2**32)]  # all of the seed that `uniform` uses
    if isinstance(pattern, Dilated):
        return pattern.segment_lengths, pattern.dilation_rates, fields, pattern.first_head
    return (), (), fields, 0


def unflatten(
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    fields: Sequence[float],
    first_head: int,
) -> Pattern:
    """The inverse of `flatten`."""
    blocks = None
    if fields:
        size, window, global_tokens, stride, density, seed = fields
        sizes = int(size), int(window), int(global_tokens), int(stride)
        blocks = BlockSparse(*sizes, density, int(seed))
    if segment_lengths:
        return Dilated(tuple(segment_lengths), tuple(dilation_rates), blocks, first_head)
    return blocks or Dense()


def attend_branches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    is_causal: bool,
    scale: float,
    backend: str,
    ids: Ids = (None, None),
) -> Tensor:
    """q (batch, tokens, heads, head_dim); k, v the same with a divisor of q's heads.

    `ids`: int64 (batch, tokens) of the queries and of the keys; a query sees a key only if their
    ids are equal. Runs of equal query ids are documents, in each of which the pattern starts anew.
    """
    out: Tensor
    if _needs_operator(q):
        out, _ = branch_attention(q, k, v, *ids, *flatten(pattern), is_causal, scale, backend)
    else:
        out, _ = _BranchAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, *ids, pattern, is_causal, scale, backend
        )
    return out


def attend_branches_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention and its natural log-sum-exp (batch, tokens, heads), to merge with others.

    Without autograd: `branch_gradients` computes the gradients.
    """
    backend = "cpu" if q.device.type == "cpu" else "triton"
    if _needs_operator(q):
        flat = flatten(pattern)
        out, lse = branch_attention(q, k, v, None, None, *flat, True, scale, backend)
    else:
        out, lse = _forward(q, k, v, None, None, pattern, True, scale, backend)
    return out, lse.transpose(1, 2) * (1 if backend == "cpu" else math.log(2))


def branch_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Dilated,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The branches' share of the gradients of q, k and v, given the merged `out` and `lse`."""
    backend = "cpu" if q.device.type == "cpu" else "triton"
    stored = (lse / (1 if backend == "cpu" else math.log(2))).transpose(1, 2).contiguous()
    return _backward(grad, q, k, v, None, None, out, stored, pattern, True, scale, backend)


def _needs_operator(q: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(q) is not Tensor or has_dispatch_mode()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    pattern: Pattern,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The output, shaped like q, and its log-sum-exp (batch, heads, tokens) for the backward."""
    if _has_documents(query_ids, pattern, backend):
        out = torch.empty_like(q)
        shape = q.shape[0], q.shape[2], q.shape[1]
        lse = torch.empty(shape, dtype=accumulation_dtype(q), device=q.device)
        for rows, tokens, ids in _documents(query_ids, key_ids):
            out[rows, tokens], lse[rows, :, tokens] = _forward(
                q[rows, tokens], k[rows, tokens], v[rows, tokens], *ids, pattern, is_causal, scale,
                backend,
            )  # fmt: skip
        return out, lse
    if backend == "cpu":
        return cpu.forward(q, k, v, _dilated(pattern, q), is_causal, scale)
    from longspan.attention.kernels import dispatch

    return dispatch.forward(q, k, v, _both(query_ids, key_ids), pattern, is_causal, scale)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: Pattern,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_documents(query_ids, pattern, backend):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, tokens, ids in _documents(query_ids, key_ids):
            found = _backward(
                grad_out[rows, tokens], q[rows, tokens], k[rows, tokens], v[rows, tokens], *ids,
                out[rows, tokens], lse[rows, :, tokens].contiguous(), pattern, is_causal, scale,
                backend,
            )  # fmt: skip
            for grad, part in zip(grads, found, strict=True):
                grad[rows, tokens] = part
        return grads
    if backend == "cpu":
        return cpu.backward(grad_out, q, k, v, out, lse, _dilated(pattern, q), is_causal, scale)
    from longspan.attention.kernels import dispatch

    both = _both(query_ids, key_ids)
    return dispatch.backward(grad_out, q, k, v, out, lse, both, pattern, is_causal, scale)


def _has_documents(query_ids: Tensor | None, pattern: Pattern, backend: str) -> bool:
    """Whether to compute document by document. A dense pattern needs no positions in them: the
    Triton kernels compare ids.
    """  # fmt: skip
    if query_ids is None or (backend == "triton" and isinstance(pattern, Dense)):
        return False
    return len(query_ids) > 1 or bool((query_ids != query_ids[:, :1]).any())


def _documents(
    query_ids: Tensor | None, key_ids: Tensor | None
) -> Iterator[tuple[slice, slice, Ids]]:
    """The row and the tokens of each document, and ids if some of its keys are padding."""
    assert query_ids is not None
    assert key_ids is not None
    is_padded = not torch.equal(query_ids, key_ids)
    for row, ids in enumerate(query_ids.cpu()):
        for start, end in pairwise((*document_starts(ids), len(ids))):
            rows, tokens = slice(row, row + 1), slice(start, end)
            of_padding = query_ids[rows, tokens], key_ids[rows, tokens]
            yield rows, tokens, of_padding if is_padded else (None, None)


def _dilated(pattern: Pattern, q: Tensor) -> Dilated:
    """A dense pattern is one segment."""
    if isinstance(pattern, Dense):
        return Dilated((q.shape[1],), (1,))
    assert isinstance(pattern, Dilated)
    return pattern


def _both(query_ids: Tensor | None, key_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query_ids is None or key_ids is None else (query_ids, key_ids)


def _flat_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    pattern = unflatten(segment_lengths, dilation_rates, blocks, first_head)
    return _forward(q, k, v, query_ids, key_ids, pattern, is_causal, scale, backend)


def _flat_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = grad_out, q, k, v, query_ids, key_ids, out, lse
    pattern = unflatten(segment_lengths, dilation_rates, blocks, first_head)
    return _backward(*tensors, pattern, is_causal, scale, backend)


branch_attention = torch.library.custom_op(
    "longspan::branch_attention", _flat_forward, mutates_args=()
)
branch_attention_backward = torch.library.custom_op(
    "longspan::branch_attention_backward", _flat_backward, mutates_args=()
)


@branch_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = q.shape[0], q.shape[2], q.shape[1]
    lse = torch.empty(shape, dtype=accumulation_dtype(q), device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@branch_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    return grad_q, grad_k, grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, query_ids, key_ids, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, query_ids, key_ids, *output)
    ctx.mark_non_differentiable(output[1])


def _operator_backward(ctx: Any, grad_out: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
    grads = branch_attention_backward(grad_out, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *[None] * 9)


branch_attention.register_autograd(_operator_backward, setup_context=_save)


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*arguments)
        _save(ctx, arguments, output)
        ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which has no gradient
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
        return (*_backward(grad_out, *ctx.saved_tensors, *ctx.settings), *[None] * 6)
