"""RMSNorm whose float32 weight is cast to the dtype of a low-precision input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import rms_norm

from longspan.dtypes import accumulation_dtype
from longspan.nn.precision import autocast_dtype
from longspan.torch_internals import all_reduce


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight in x's dtype; the kernel accumulates in float32.

    torch has a fused kernel for input and weight of the same dtype, and falls back to several
    kernels if they differ. Under autocast the weight is rounded like the weights of matrices, so
    that an FSDP-sharded layer, whose weight is gathered in 16 bits, computes the same. If the
    weight is sharded over ranks, x holds the local features: one element per token is all-reduced
    in forward, and one in backward.

    `offset` is added to the weight.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(width, eps=eps)
        self.offset = offset
        self.weight_group: dist.ProcessGroup | None = None
        """Ranks that apply the same weight to different heads: its gradient is summed over them."""

    def weight_for(self, x: Tensor) -> Tensor:
        """What normalized `x` is multiplied by, in its dtype."""
        weight: Tensor = self.weight
        if self.weight_group is not None:
            weight = _SumGradient.apply(weight, self.weight_group)  # type: ignore[no-untyped-call]
        if self.offset:
            weight = weight + self.offset
        return weight.to(autocast_dtype(x) or x.dtype).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_for(x)
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            group = weight.device_mesh.get_group()
            return self._forward_sharded(x, weight.to_local(), group)
        return rms_norm(x, self.normalized_shape, weight, self.eps)

    def _forward_sharded(self, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert self.eps is not None
        exact = x.to(accumulation_dtype(x))
        local = exact.square().sum(-1, keepdim=True)
        squares: Tensor = _AllReduceSum.apply(local, group)  # type: ignore[no-untyped-call]
        return (exact * (squares / self.weight.shape[0] + self.eps).rsqrt() * weight).to(x.dtype)


class _AllReduceSum(torch.autograd.Function):
    """All-reduce in both directions: each rank uses the sum differently, so gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _SumGradient(torch.autograd.Function):
    """A tensor that all ranks hold alike and use differently: the gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None
