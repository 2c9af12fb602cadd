"""Projection, RoPE and attention as one operator, whose queries, keys and values are one tensor.

In compiled blocks on Hopper GPUs: one product projects all three, RoPE rotates them where they are,
and the backward pass of attention leaves their gradients in one tensor, for one product each of the
gradients of the input and of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.attention.custom_op import flatten, unflatten
from longspan.attention.functional import choose_backend
from longspan.attention.mask import Mask
from longspan.attention.pattern import Dense, Dilated, Pattern
from longspan.nn.precision import autocast_dtype
from longspan.nn.products import are_chosen, is_measured, product
from longspan.torch_internals import has_forward_hooks


def packs(layers: Sequence[nn.Module], x: Tensor, pattern: Pattern, head_dim: int) -> bool:
    """Whether `attend_packed` serves the projections `layers` of x (batch, tokens, hidden)."""
    if not (torch.compiler.is_compiling() and are_chosen()):
        return False
    if any(type(layer) is not nn.Linear or has_forward_hooks(layer) for layer in layers):
        return False
    if any(layer.bias is not None or isinstance(layer.weight, DTensor) for layer in layers):
        return False
    if len({layer.weight.requires_grad for layer in layers}) > 1:  # the gradients are one tensor
        return False
    widths = [len(layer.weight) for layer in layers]  # type: ignore[arg-type]
    return (
        x.dtype == autocast_dtype(x) == torch.bfloat16
        and is_measured(x.shape[0] * x.shape[1], x.shape[2], sum(widths))
        and _is_by_kernels(x.new_empty(*x.shape[:-1], widths[0] // head_dim, head_dim), pattern)
    )


def _is_by_kernels(q: Tensor, pattern: Pattern) -> bool:
    """Whether `attend` would give queries like `q`, as many keys and values to our own kernels."""
    is_dilated = isinstance(pattern, Dilated) and pattern.blocks is None
    if not (is_dilated or isinstance(pattern, Dense)):
        return False
    return choose_backend(q, q, Mask(pattern, True)).name == "triton"


def attend_packed(
    layers: Sequence[nn.Module], x: Tensor, table: Tensor, pattern: Pattern, head_dim: int
) -> Tensor:
    """Causal attention (batch, tokens, heads, head_dim) of x (batch, tokens, hidden).

    `layers` project it to queries, keys and values; `table` is RoPE's.
    """
    weights: list[Tensor] = [layer.weight.to(x.dtype) for layer in layers]  # type: ignore[misc]
    heads = len(weights[0]) // head_dim
    out: Tensor
    # As the backward pass keeps them: of x in its own shape the compiler would write a second copy.
    rows = x.flatten(0, -2)
    out, *_ = packed_attention(rows, *weights, table, heads, head_dim, *flatten(pattern))
    return out


def _forward(
    rows: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    heads: int,
    head_dim: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its log-sum-exp, and rotated queries and keys with the values, packed.

    rows (batch · tokens, hidden), of as many tokens as `table` has.
    """
    from longspan.attention.kernels import dispatch
    from longspan.attention.kernels.rotary import rotate

    pattern = unflatten(segment_lengths, dilation_rates, blocks, first_head)
    weight = torch.cat([query, key, value])
    packed = rows.new_empty(len(rows), len(weight))
    product(rows, weight.T, out=packed)
    packed = packed.view(-1, table.shape[1], len(weight) // head_dim, head_dim)
    q, k, v = dispatch.parts_of(packed, heads)
    rotate(packed, table, heads + k.shape[2])
    out, lse = dispatch.forward(q, k, v, None, pattern, True, head_dim**-0.5)
    return out, lse, packed


def _backward(
    grad: Tensor,
    packed: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    heads: int,
    head_dim: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    blocks: Sequence[float],
    first_head: int,
) -> Tensor:
    """The gradient of the projections, shaped like `packed`."""
    from longspan.attention.kernels import dispatch

    pattern = unflatten(segment_lengths, dilation_rates, blocks, first_head)
    return dispatch.backward_packed(grad, packed, out, lse, heads, pattern, head_dim**-0.5, table)


packed_attention = torch.library.custom_op("longspan::packed_attention", _forward, mutates_args=())
packed_attention_backward = torch.library.custom_op(
    "longspan::packed_attention_backward", _backward, mutates_args=()
)


@packed_attention.register_fake
def _(
    rows: Tensor, query: Tensor, key: Tensor, _value: Tensor, table: Tensor, heads: int,
    head_dim: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = table.shape[1]
    batch, all_heads = rows.shape[0] // tokens, (query.shape[0] + 2 * key.shape[0]) // head_dim
    lse = rows.new_empty(batch, heads, tokens, dtype=torch.float32)
    packed = rows.new_empty(batch, tokens, all_heads, head_dim)
    return rows.new_empty(batch, tokens, heads, head_dim), lse, packed


@packed_attention_backward.register_fake
def _(_grad: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(packed)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, query, key, value, table, *ctx.settings = inputs
    out, lse, packed = output
    ctx.save_for_backward(rows, query, key, value, table, out, lse, packed)
    ctx.mark_non_differentiable(lse, packed)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    rows, query, key, value, table, out, lse, packed = ctx.saved_tensors
    of_packed = packed_attention_backward(grad, packed, out, lse, table, *ctx.settings)
    of_packed = of_packed.flatten(2).flatten(0, 1)
    # Joined again, since each may be a parameter, which needs no memory to keep.
    of_rows = of_packed @ torch.cat([query, key, value])
    of_weights = (of_packed.T @ rows).split([len(query), len(key), len(value)])
    return of_rows, *of_weights, *[None] * 7


packed_attention.register_autograd(_gradients, setup_context=_save)
