"""RMSNorm whose float32 weight follows a low-precision input."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import rms_norm

from longspan.nn.collectives import summed
from longspan.nn.precision import autocast_dtype


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight, in x's type; the kernel sums in float32.

    torch has one fused kernel for input and weight of one type, and falls back to several where
    they differ. Under autocast the weight is rounded as those of matrices are, so that a sharded
    layer, which has it in 16 bits, computes the same. A weight that is split over ranks is that of
    a rank's own features of x: one number per token is summed forward, and one backward.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(autocast_dtype(x) or x.dtype).to(x.dtype)
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            group = weight.device_mesh.get_group()
            return self._of_own_features(x, weight.to_local(), group)
        return rms_norm(x, self.normalized_shape, weight, self.eps)

    def _of_own_features(self, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert self.eps is not None
        exact = x.double() if x.dtype == torch.float64 else x.float()
        own = exact.square().sum(-1, keepdim=True)
        squares: Tensor = _Sum.apply(own, group)  # type: ignore[no-untyped-call]
        return (exact * (squares / self.weight.shape[0] + self.eps).rsqrt() * weight).to(x.dtype)


class _Sum(torch.autograd.Function):
    """The sum over ranks that each go on with it in their own way: so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None
