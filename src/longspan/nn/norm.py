"""RMSNorm whose float32 weight follows a low-precision input."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.RMSNorm):
    """x / rms(x) · weight, in x's type; the kernel sums in float32.

    torch has one fused kernel for input and weight of one type, and falls back to several where
    they differ, as they do under autocast.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
