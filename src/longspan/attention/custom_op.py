"""Attention as one custom operator: O(tokens) memory, exact gradients through the merge.

`strided` computes it on a CPU, Triton kernels (`kernels.dispatch`, `kernels.window`) on a GPU, and
`reference` what neither supports. A dense or block-sparse pattern is one branch whose segment is
the whole sequence.

torch.compile, fake tensors and dispatch modes see a custom operator with known shapes. Without
them the same functions run in a plain autograd function: a custom operator costs 0.4 ms of overhead
on a slow core, more than a short attention takes. A pattern is passed as an object; only the custom
operator needs it as plain numbers, see `flatten`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longspan.attention import reference, strided
from longspan.attention.kernels.spans import spans_of
from longspan.attention.mask import Mask
from longspan.attention.merge import (
    attend_with_sinks,
    is_before_ampere,
    merge_stored_sinks,
    stored_sink_gradient,
)
from longspan.attention.packed import document_starts
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern
from longspan.attention.window import Window
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import has_dispatch_mode

FlatPattern = tuple[Sequence[int], Sequence[int], Sequence[float], int]


def flatten(pattern: Pattern) -> FlatPattern:
    """Segment lengths, dilation rates, fields of block sparsity and first head of a pattern.

    The fields of a window take the place of segment lengths, without dilation rates.
    """
    if isinstance(pattern, Window):
        return astuple(pattern), (), (), 0
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
    if segment_lengths and not dilation_rates:
        return Window(*segment_lengths)
    blocks = None
    if fields:
        size, window, global_tokens, stride, density, seed = fields
        sizes = int(size), int(window), int(global_tokens), int(stride)
        blocks = BlockSparse(*sizes, density, int(seed))
    if segment_lengths:
        return Dilated(tuple(segment_lengths), tuple(dilation_rates), blocks, first_head)
    return blocks or Dense()


def attend_branches(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, backend: str
) -> Tensor:
    """q (batch, queries, heads, head_dim); k, v (batch, keys, kv_heads, head_dim).

    Only the reference backend takes dropout and fewer queries than keys.
    """
    if _needs_operator(q):
        out: Tensor
        out, _ = branch_attention(q, k, v, *_flat_mask(mask), scale, backend)
        return out
    by = _forward, _backward, _unit(backend)
    return attend_with_sinks(q, k, v, mask.sink_logits, *by, mask, scale, backend)


def attend_branches_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention and its natural log-sum-exp (batch, tokens, heads), to merge with others.

    Without autograd: `branch_gradients` computes the gradients.
    """
    backend, mask = _backend(q), Mask(pattern)
    if _needs_operator(q):
        out, lse = branch_attention(q, k, v, *_flat_mask(mask), scale, backend)
    else:
        out, lse = _forward(q, k, v, mask, scale, backend)
    return out, lse.transpose(1, 2) * _unit(backend)


def branch_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Dilated,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The branches' share of the gradients of q, k and v, given the merged `out` and `lse`."""
    backend = _backend(q)
    stored = (lse / _unit(backend)).transpose(1, 2).contiguous()
    return _backward(grad, q, k, v, out, stored, Mask(pattern), scale, backend)


def _backend(q: Tensor) -> str:
    """That of branches which are merged with other partials."""
    return "strided" if q.device.type == "cpu" or is_before_ampere(q) else "triton"


def _unit(backend: str) -> float:
    """What a backend's log-sum-exps are multiples of."""
    return math.log(2) if backend == "triton" else 1.0


def _needs_operator(q: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(q) is not Tensor or has_dispatch_mode()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """The output, shaped like q, and its log-sum-exp (batch, heads, queries) for the backward.

    It is base 2 with the backend "triton", else natural.
    """
    if backend == "reference":
        return reference.forward(q, k, v, mask, scale)
    pattern, is_causal, padding = mask.pattern, mask.is_causal, mask.key_padding_mask
    if mask.documents is not None:  # the rows of a batch are documents, too
        function = _each_forward if backend == "strided" else _kernel_forward
        inputs = _folded(q), _folded(k), _folded(v), _folded(padding)
        out, lse = function(*inputs, pattern, is_causal, scale, _starts(mask.documents))
        batch, tokens, heads = q.shape[:3]
        lse = lse.reshape(heads, batch, tokens).transpose(0, 1).contiguous()
        return out.reshape(q.shape), lse
    if backend == "strided":
        return strided.forward(q, k, v, _dilated(pattern, q.shape[1]), is_causal, scale)
    return _kernel_forward(q, k, v, padding, pattern, is_causal, scale)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if backend == "reference":
        return reference.backward(grad_out, q, k, v, out, lse, mask, scale)
    pattern, is_causal, padding = mask.pattern, mask.is_causal, mask.key_padding_mask
    if mask.documents is not None:
        function = _each_backward if backend == "strided" else _kernel_backward
        dq, dk, dv = function(
            _folded(grad_out), _folded(q), _folded(k), _folded(v), _folded(out),
            lse.transpose(0, 1).flatten(1)[None], _folded(padding), pattern, is_causal, scale,
            _starts(mask.documents),
        )  # fmt: skip
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    if backend == "strided":
        inner = _dilated(pattern, q.shape[1])
        return strided.backward(grad_out, q, k, v, out, lse, inner, is_causal, scale)
    return _kernel_backward(grad_out, q, k, v, out, lse, padding, pattern, is_causal, scale)


def _starts(documents: Tensor) -> tuple[int, ...]:
    """Where documents begin in the rows of (batch, tokens), one after the other."""
    rows = documents.cpu()  # without a wait if they are there already
    tokens = rows.shape[1]
    return tuple(i * tokens + at for i, row in enumerate(rows) for at in document_starts(row))


def _folded(x: Any) -> Any:
    """The rows of a batch one after the other: (batch, tokens, ...) to (1, batch · tokens, ...)."""
    return None if x is None else x.flatten(0, 1)[None]


def _each_forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, pattern: Pattern, is_causal: bool,
    scale: float, starts: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With strided views, one document after the other."""
    assert padding is None
    outputs, lses = [], []
    for start, end in pairwise((*starts, q.shape[1])):
        tokens, inner = slice(start, end), _dilated(pattern, end - start)
        out, lse = strided.forward(
            q[:, tokens], k[:, tokens], v[:, tokens], inner, is_causal, scale
        )
        outputs.append(out)
        lses.append(lse)
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=2)


def _each_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    padding: Tensor | None, pattern: Pattern, is_causal: bool, scale: float,
    starts: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = []
    for start, end in pairwise((*starts, q.shape[1])):
        tokens, inner = slice(start, end), _dilated(pattern, end - start)
        found = strided.backward(
            grad_out[:, tokens], q[:, tokens], k[:, tokens], v[:, tokens], out[:, tokens],
            lse[:, :, tokens], inner, is_causal, scale,
        )  # fmt: skip
        grads.append(found)
    dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*grads, strict=True))
    return dq, dk, dv


def _dilated(pattern: Pattern, tokens: int) -> Dilated:
    """A dense pattern is one segment."""
    if isinstance(pattern, Dense):
        return Dilated((tokens,), (1,))
    assert isinstance(pattern, Dilated)
    return pattern


def _kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, pattern: Pattern, is_causal: bool,
    scale: float, starts: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if isinstance(pattern, Window):
        from longspan.attention.kernels import window

        spans = spans_of(starts or (0,), q.shape[1])
        return window.forward(q, k, v, _long(padding), pattern, is_causal, scale, spans)
    from longspan.attention.kernels import dispatch

    return dispatch.forward(q, k, v, _ids(padding), pattern, is_causal, scale, starts)


def _kernel_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    padding: Tensor | None, pattern: Pattern, is_causal: bool, scale: float,
    starts: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = grad_out, q, k, v, out, lse
    if isinstance(pattern, Window):
        from longspan.attention.kernels import window

        spans = spans_of(starts or (0,), q.shape[1])
        return window.backward(*tensors, _long(padding), pattern, is_causal, scale, spans)
    from longspan.attention.kernels import dispatch

    return dispatch.backward(*tensors, _ids(padding), pattern, is_causal, scale, starts)


def _long(padding: Tensor | None) -> Tensor | None:
    return None if padding is None else padding.long()


def _ids(padding: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Ids of queries and of keys, which see each other if they are equal."""
    if padding is None:
        return None
    keys = padding.long()
    return torch.zeros_like(keys), keys


def _flat_mask(mask: Mask) -> tuple[Any, ...]:
    seed = mask.dropout_seed % 2**32  # all of the seed that `uniform` uses
    return (
        mask.documents, mask.key_padding_mask, mask.sink_logits, *flatten(mask.pattern),
        mask.is_causal, mask.dropout_p, seed, mask.first_row,
    )  # fmt: skip


def _unflat_mask(documents: Tensor | None, padding: Tensor | None, *others: Any) -> Mask:
    """Without the sinks, which are merged later."""
    *flat, is_causal, dropout_p, seed, first_row = others
    options = documents, padding, dropout_p, seed, None, first_row
    return Mask(unflatten(*flat), is_causal, *options)


def _flat_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    padding: Tensor | None,
    sinks: Tensor | None,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    dropout_p: float,
    dropout_seed: int,
    first_row: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    mask = _unflat_mask(
        documents, padding, segment_lengths, dilation_rates, blocks, first_head, is_causal,
        dropout_p, dropout_seed, first_row,
    )  # fmt: skip
    out, lse = _forward(q, k, v, mask, scale, backend)
    return merge_stored_sinks(out, lse, sinks, _unit(backend))


def _flat_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    padding: Tensor | None,
    out: Tensor,
    lse: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
    is_causal: bool,
    dropout_p: float,
    dropout_seed: int,
    first_row: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _unflat_mask(
        documents, padding, segment_lengths, dilation_rates, blocks, first_head, is_causal,
        dropout_p, dropout_seed, first_row,
    )  # fmt: skip
    return _backward(grad_out, q, k, v, out, lse, mask, scale, backend)


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
    q, k, v, documents, padding, sinks, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, documents, padding, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _operator_backward(ctx: Any, grad_out: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
    *saved, out, lse, sinks = ctx.saved_tensors
    grads = branch_attention_backward(grad_out, *saved, out, lse, *ctx.settings)
    of_sinks = stored_sink_gradient(grad_out, out, lse, sinks, _unit(ctx.settings[-1]))
    return (*grads, None, None, of_sinks, *[None] * 10)


branch_attention.register_autograd(_operator_backward, setup_context=_save)
