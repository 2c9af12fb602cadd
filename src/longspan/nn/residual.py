"""The sum of the residual stream and a layer's output, which the layer's product can compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.nn.precision import autocast_dtype
from longspan.nn.products import are_chosen, is_measured, product
from longspan.torch_internals import has_forward_hooks


def linear_onto(residual: Tensor | None, layer: nn.Module, x: Tensor) -> Tensor:
    """residual + layer(x), of residual (..., out) or None, and x (..., in).

    Where `chosen_products` serves, the product of a dense layer adds a residual of its own dtype,
    rounded once: sum and product are not written and read again.
    """
    if residual is None or not _adds(layer, x, residual):
        out: Tensor = layer(x)
        return out if residual is None else residual + out
    weight: Tensor = layer.weight.to(residual.dtype)  # type: ignore[assignment]
    rows = x.to(residual.dtype).flatten(0, -2)
    added: Tensor = product_onto(residual.flatten(0, -2), rows, weight)
    return added.view(residual.shape)


def _adds(layer: nn.Module, x: Tensor, residual: Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        and are_chosen()
        and not torch.are_deterministic_algorithms_enabled()
        and type(layer) is nn.Linear
        and not has_forward_hooks(layer)
        and layer.bias is None
        and not isinstance(layer.weight, DTensor)
        and residual.shape[:-1] == x.shape[:-1]
        and residual.dtype == autocast_dtype(x) == torch.bfloat16
        and is_measured(x.numel() // x.shape[-1], *layer.weight.shape)
    )


@torch.library.custom_op("longspan::product_onto", mutates_args=())
def product_onto(addend: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """addend + x · weightᵀ, of addend (rows, out), x (rows, in) and weight (out, in)."""
    return product(x, weight.T, out=torch.empty_like(addend), addend=addend)


@product_onto.register_fake
def _(addend: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(addend)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, x, weight = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad, grad @ weight, grad.T @ x


product_onto.register_autograd(_backward, setup_context=_save)
