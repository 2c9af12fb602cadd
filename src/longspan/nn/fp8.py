"""Linear layers that multiply in fp8 while they train.

Of y = x Wᵀ and of both its gradients, each factor is multiplied by a scale, rounded to 8 bits and
multiplied on units that are twice as fast as those for 16 bits; sums are not in 8 bits. x and W are
rounded to e4m3 (3 bits of mantissa), the gradient of y to e5m2 (2 bits, a larger range). A factor
has one scale, from its largest magnitude at that moment ("tensorwise", "dynamic"), which is a power
of two: what a number is rounded to then hardly depends on the others, so neither on the layout nor
on later tokens. Only numbers that are some 2^14 times smaller than the largest lose bits by it.

The units sum over dense rows of both factors, but the gradients of x and W sum over their columns.
So factors are rounded first, which torch.compile fuses with what comes before, and their bytes are
transposed by a kernel of their own: that takes less time than to cast them once more, transposed.

Parameters, their names and their gradients are those of `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from longspan.nn.precision import autocast_dtype
from longspan.torch_internals import FP8_PRODUCT

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""What factors of the forward pass are rounded to, and gradients of outputs."""
MULTIPLE = 16
"""Of the numbers that a product sums over."""
EXPONENT = 0x7F800000
"""The bits of a float32 that are left of it if it is rounded down to a power of two."""
LEAST = 2.0**-100
"""The least magnitude that is scaled into the range: scale and inverse are float32."""


class FP8Linear(nn.Linear):
    """A linear layer in fp8; in eval mode it computes what `nn.Linear` does."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if not self.training:
            return linear(x, self.weight, self.bias)
        dtype = autocast_dtype(x) or x.dtype
        rows = x.to(dtype).reshape(-1, self.in_features)
        y: Tensor = _Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(dtype)


def convert_to_fp8(modules: Iterable[nn.Module]) -> None:
    """Have the linear layers in `modules` multiply in fp8."""
    for module in modules:
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = FP8Linear


class _Product(torch.autograd.Function):
    """x · Wᵀ of x (tokens, in) and W (out, in), in the dtype of x.

    W is rounded to it first, as FSDP gathers it: a layout must not change what is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_scale, weight_scale = _scale(x, FORWARD), _scale(weight.to(x.dtype), FORWARD)
        ctx.save_for_backward(x, weight, x_scale, weight_scale)
        rows = rounded_weight(weight, weight_scale, x.dtype, False)
        factors = _rounded(x, x_scale, FORWARD), rows
        return _product(*factors, (x_scale, weight_scale), x.dtype, is_fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        grad_scale = _scale(grad, BACKWARD)
        rounded = _rounded(grad, grad_scale, BACKWARD)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # From the weight itself: torch.compile would keep its bytes, which no rank shards.
            columns = rounded_weight(weight, weight_scale, x.dtype, True)
            grad_x = _product(rounded, columns, (grad_scale, weight_scale), x.dtype)
        if ctx.needs_input_grad[1]:
            # It keeps these bytes of x, instead of its 16 bits.
            factors = transposed(rounded), transposed(_rounded(x, x_scale, FORWARD))
            grad_weight = _product(*factors, (grad_scale, x_scale), x.dtype).to(weight.dtype)
        return grad_x, grad_weight


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that leaves the magnitudes of x in the range of `dtype`."""
    largest = x.abs().amax().float().clamp(min=LEAST)
    scale = torch.finfo(dtype).max / largest
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype).contiguous()


def _product(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    is_fast: bool = False,
) -> Tensor:
    """a · bᵀ of a (rows, inner) and b (columns, inner), both in fp8.

    `is_fast`: sums are less exact, but for the 16 bits of the result.
    """
    inverses = (scale.reciprocal() for scale in scales)
    found: Tensor = FP8_PRODUCT(a, b.t(), *inverses, None, None, dtype, is_fast)
    return found


@torch.library.custom_op("longspan::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """The transpose (columns, rows) of x (rows, columns) in fp8, dense, filled up with zeros to a
    multiple of 16 columns.
    """
    if x.is_cuda:
        from longspan.nn.fp8_kernel import transpose

        return transpose(x, _filled(len(x)))
    columns = x.view(torch.uint8).t()
    return pad(columns, (0, _filled(len(x)) - len(x))).contiguous().view(x.dtype)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], _filled(x.shape[0]))


@torch.library.custom_op("longspan::rounded_weight", mutates_args=())
def rounded_weight(x: Tensor, scale: Tensor, dtype: torch.dtype, transposes: bool) -> Tensor:
    """x (rows, columns) or its transpose, times `scale` () in fp8, rounded to `dtype` before.

    An operator of its own, since torch.compile leaves out the first of two roundings.
    """
    if x.is_cuda:
        from longspan.nn.fp8_kernel import round_weight

        return round_weight(x, scale, dtype, transposes)
    found = _rounded(x.to(dtype), scale, FORWARD)
    return found.t().contiguous() if transposes else found


@rounded_weight.register_fake
def _(x: Tensor, _scale: Tensor, _dtype: torch.dtype, transposes: bool) -> Tensor:
    return x.new_empty(x.shape[::-1] if transposes else x.shape, dtype=FORWARD)


def _filled(rows: int) -> int:
    return -(-rows // MULTIPLE) * MULTIPLE
