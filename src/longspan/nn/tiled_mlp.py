"""The gated MLP in tiles of tokens: its hidden activations exist for one tile at a time.

Only input and output are whole ("TiledMLP" of ALST). The backward pass keeps the input alone; for
each tile it computes the hidden activations again and adds to the gradients of the weights, whose
sums over tiles are float32.

torch.compile and dispatch modes see a custom operator, and not how many tiles there are. Without
them two autograd functions compute the same: the first keeps the input, the second computes the
output. Activation checkpointing stops its recomputation when all that was kept is there again, so
the MLP of the end of a block is not computed a third time for an output that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm

from longspan.dtypes import accumulation_dtype
from longspan.nn.activations import ACTIVATIONS, BACKWARDS
from longspan.nn.loss import add_product
from longspan.torch_internals import has_dispatch_mode


def tiled_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    activation: str,
    eps: float,
    tile: int,
) -> Tensor:
    """down(norm(activation(gate(x)) · up(x))) of x (tokens, width), `tile` tokens at a time.

    Weights are (out, in) and have the dtype of x; `norm`, the weight of an RMSNorm, and biases may
    be None.
    """
    tensors = x, gate, up, down, norm, gate_bias, up_bias, down_bias
    if torch.compiler.is_compiling() or has_dispatch_mode() or type(x) is not Tensor:
        # A tile's operators between the products are compiled, too, where the block is.
        out: Tensor = tiled_mlp_forward(
            *tensors, activation, eps, tile, torch.compiler.is_compiling()
        )
        return out
    settings = activation, eps, tile, False
    kept = _Input.apply(settings, *tensors)  # type: ignore[no-untyped-call]
    found: Tensor = _Output.apply(settings, kept, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Input(torch.autograd.Function):
    """Keeps what the backward pass needs, and computes the gradients; its result is a dummy."""

    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], *tensors: Any) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(*tensors)
        x, _, _, down, *_ = tensors
        dummy: Tensor = x.new_empty(()).expand(len(x), len(down))
        return dummy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        arguments: list[Any] = [*ctx.saved_tensors, *ctx.settings, needs]
        return None, *_spread(_backward(grad, *arguments), needs)


class _Output(torch.autograd.Function):
    """The output, whose gradient goes to the dummy."""

    @staticmethod
    def forward(_: Any, settings: tuple[Any, ...], _kept: Tensor, *tensors: Any) -> Tensor:
        return _forward(*tensors, *settings)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, *[None] * 8


def _tiles(tokens: int, tile: int) -> Iterator[slice]:
    return (slice(start, start + tile) for start in range(0, tokens, tile))


def _forward(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    eps: float,
    tile: int,
    fuses: bool,
) -> Tensor:
    """`fuses`: whether the operators between products are compiled."""
    hidden_of = _compiled(_hidden) if fuses else _hidden
    out = x.new_empty(len(x), len(down))
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        for rows in _tiles(len(x), tile):
            x_tile = x[rows]
            factors = linear(x_tile, gate, gate_bias), linear(x_tile, up, up_bias)
            hidden = hidden_of(*factors, _detached(norm), activation, eps)
            if down_bias is None:
                torch.mm(hidden, down.T, out=out[rows])
            else:
                torch.addmm(down_bias, hidden, down.T, out=out[rows])
            del factors, hidden  # before the next tile allocates its own
    return out


def _backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    eps: float,
    tile: int,
    fuses: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of the eight tensors that `needs` says, in their order."""
    gradients_of = _compiled(_hidden_gradients) if fuses else _hidden_gradients
    tensors = x, gate, up, down, norm, gate_bias, up_bias, down_bias
    exact = accumulation_dtype(x)
    sums = [
        weight.new_zeros(weight.shape, dtype=exact) if needed and weight is not None else None
        for needed, weight in zip(needs[1:], tensors[1:], strict=True)
    ]
    grad_gate, grad_up, grad_down, *vectors = sums
    grad_x = x.new_empty(x.shape) if needs[0] else None
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        for rows in _tiles(len(x), tile):
            x_tile, grad_tile = x[rows], grad[rows]
            factors = linear(x_tile, gate, gate_bias), linear(x_tile, up, up_bias)
            grad_hidden = grad_tile @ down
            hidden, d_gate, d_up, d_norm = gradients_of(
                *factors, grad_hidden, _detached(norm), activation, eps
            )
            del factors, grad_hidden
            if grad_x is not None:
                torch.mm(d_gate, gate, out=grad_x[rows]).addmm_(d_up, up)
            for total, left, right in (
                (grad_gate, d_gate, x_tile),
                (grad_up, d_up, x_tile),
                (grad_down, grad_tile, hidden),
            ):
                if total is not None:
                    add_product(total, left.T, right)
            for total, rows_of in zip(vectors, (d_norm, d_gate, d_up, grad_tile), strict=True):
                if total is not None:
                    total += rows_of.sum(0, dtype=exact)
            del hidden, d_gate, d_up, d_norm
    found = [grad_x, *sums]
    return [
        total.to(tensor.dtype)
        for total, tensor in zip(found, tensors, strict=True)
        if total is not None and tensor is not None
    ]


def _hidden(gate: Tensor, up: Tensor, norm: Tensor | None, activation: str, eps: float) -> Tensor:
    hidden = ACTIVATIONS[activation](gate) * up
    return hidden if norm is None else rms_norm(hidden, norm.shape, norm, eps)


def _hidden_gradients(
    gate: Tensor, up: Tensor, grad: Tensor, norm: Tensor | None, activation: str, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_hidden`, and the gradients of gate and up; last the rows whose sum is that of norm."""
    activated = ACTIVATIONS[activation](gate)
    hidden, of_norm = activated * up, grad
    if norm is not None:
        exact = hidden.to(accumulation_dtype(hidden))
        scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed, scaled = exact * scale, grad * norm
        of_norm = (grad * normed).to(grad.dtype)
        grad = (scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(grad.dtype)
        hidden = (normed * norm).to(hidden.dtype)
    return hidden, BACKWARDS[activation](grad * up, gate), grad * activated, of_norm


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _spread(found: Sequence[Tensor], needs: Sequence[bool]) -> Iterator[Tensor | None]:
    """The gradients in the places of the tensors that they are of."""
    left = iter(found)
    return (next(left) if needed else None for needed in needs)


tiled_mlp_forward = torch.library.custom_op("longspan::tiled_mlp", _forward, mutates_args=())
tiled_mlp_backward = torch.library.custom_op(
    "longspan::tiled_mlp_backward", _backward, mutates_args=()
)


@tiled_mlp_forward.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[0])


@tiled_mlp_backward.register_fake
def _(grad: Tensor, *tensors_and_settings: Any) -> list[Tensor]:
    *tensors, _, _, _, _, needs = tensors_and_settings
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x, needed in zip(tensors, needs, strict=True)
        if needed
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.settings = inputs[8:]


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:8])
    found = tiled_mlp_backward(grad, *ctx.saved_tensors, *ctx.settings, needs)
    return *_spread(found, needs), *[None] * 4


tiled_mlp_forward.register_autograd(_operator_backward, setup_context=_save)
