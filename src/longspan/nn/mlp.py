"""The SwiGLU MLP, and the factory type for a block's linear layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import silu

MakeLinear = Callable[[str, int, int], nn.Module]
"""Creates a linear layer without bias from its name, in_features and out_features."""


class SwiGLU(nn.Module):
    """down(norm(silu(gate(x)) · up(x))); `norm` is MAGNETO's sub-layer norm, by default none."""

    def __init__(
        self, hidden: int, ffn: int, linear: MakeLinear, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate = linear("mlp.gate", hidden, ffn)
        self.up = linear("mlp.up", hidden, ffn)
        self.norm = norm or nn.Identity()
        self.down = linear("mlp.down", ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(silu(self.gate(x)) * self.up(x)))
        return out
