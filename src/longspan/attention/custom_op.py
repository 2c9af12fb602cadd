"""Attention in branches as one custom operator: O(tokens) memory, exact gradients through the join.

A dense pattern is one branch whose segment is the sequence, and so is a block-sparse one, with
lists of blocks. `views` does the work on a CPU, the Triton kernels of `launch` on a GPU.

torch.compile, fake tensors and all that listens to operators see one custom operator with known
shapes. Where none of them is about, the same functions are called through a plain autograd
function: a custom operator's way in and out costs 0.4 ms on a slow core, more than a short
attention takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from longspan.attention import cpu
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern


def attend_in_branches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    ids: tuple[Tensor | None, Tensor | None] = (None, None),
    is_causal: bool,
    scale: float,
    backend: str,
) -> Tensor:
    """q (batch, tokens, heads, head_dim); k, v the same with heads that divide q's.

    `ids`: int64 (batch, tokens) of the queries and of the keys; only equal ones meet.
    """
    tokens = q.shape[1]
    blocks: BlockSparse | None = None
    first_head = 0
    match pattern:
        case Dilated():
            segment_lengths, rates = pattern.segment_lengths, pattern.dilation_rates
            blocks, first_head = pattern.blocks, pattern.first_head
        case BlockSparse(block_size=size):
            segment_lengths, rates, blocks = (-(-tokens // size) * size,), (1,), pattern
        case _:
            assert isinstance(pattern, Dense)
            segment_lengths, rates = (tokens,), (1,)
    numbers: list[float] = []
    if blocks is not None:
        *sizes, seed = astuple(blocks)
        numbers = [*map(float, sizes), float(seed % 2**32)]  # all of it that `uniform` uses
    arguments = (
        q,
        k,
        v,
        *ids,
        segment_lengths,
        rates,
        numbers,
        first_head,
        is_causal,
        scale,
        backend,
    )
    out: Tensor
    if _is_watched(q):
        out, _ = branch_attention(*arguments)
    else:
        out, _ = _BranchAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def _is_watched(q: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or type(q) is not Tensor
        or _get_current_dispatch_mode() is not None
    )


def branch_forward(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], rates: Sequence[int],
    first_head: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal dilated attention, and its natural log-sum-exp (batch, tokens, heads).

    For one who joins it to other parts: no gradient flows, `branch_gradients` gives it.
    """
    backend = "views" if q.device.type == "cpu" else "triton"
    run = branch_attention if _is_watched(q) else _forward
    out, lse = run(
        q, k, v, None, None, segment_lengths, rates, [], first_head, True, scale, backend
    )
    return out, lse.transpose(1, 2) * (1 if backend == "views" else math.log(2))


def branch_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segment_lengths: Sequence[int], rates: Sequence[int], first_head: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its share of the gradients of q, k and v, where `out` and `lse` are the joined ones."""
    backend = "views" if q.device.type == "cpu" else "triton"
    stored = (lse / (1 if backend == "views" else math.log(2))).transpose(1, 2).contiguous()
    return _backward(
        grad, q, k, v, None, None, out, stored, segment_lengths, rates, [], first_head, True, scale,
        backend,
    )  # fmt: skip


def _blocks(numbers: Sequence[float]) -> BlockSparse | None:
    if not numbers:
        return None
    size, window, global_tokens, stride, density, seed = numbers
    return BlockSparse(int(size), int(window), int(global_tokens), int(stride), density, int(seed))


def _ids(query_ids: Tensor | None, key_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if query_ids is None or key_ids is None else (query_ids, key_ids)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The output, shaped as q, and what its gradient needs: (batch, heads, tokens)."""
    if backend == "views":
        assert query_ids is None
        assert not blocks
        return cpu.forward(q, k, v, segment_lengths, rates, first_head, is_causal, scale)
    from longspan.attention.kernels import dispatch

    ids = _ids(query_ids, key_ids)
    return dispatch.forward(
        q, k, v, ids, segment_lengths, rates, _blocks(blocks), first_head, is_causal, scale
    )


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "views":
        return cpu.backward(
            grad_out, q, k, v, out, lse, segment_lengths, rates, first_head, is_causal, scale
        )
    from longspan.attention.kernels import dispatch

    ids = _ids(query_ids, key_ids)
    return dispatch.backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        ids,
        segment_lengths,
        rates,
        _blocks(blocks),
        first_head,
        is_causal,
        scale,
    )


branch_attention = torch.library.custom_op("longspan::branch_attention", _forward, mutates_args=())
branch_attention_backward = torch.library.custom_op(
    "longspan::branch_attention_backward", _backward, mutates_args=()
)


@branch_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, query_ids: Any, key_ids: Any, segment_lengths: Any,
    rates: Any, blocks: Any, first_head: int, is_causal: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact, device=q.device)
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
        return (*_backward(grad_out, *ctx.saved_tensors, *ctx.settings), *[None] * 9)
