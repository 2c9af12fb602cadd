"""The gated MLP, and the factory type for a block's linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

MakeLinear = Callable[[str, int, int], nn.Module]
"""Creates a linear layer from its name, in_features and out_features."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class GatedMLP(nn.Module):
    """down(norm(activation(gate(x)) · up(x))): SwiGLU with "silu".

    `norm` is MAGNETO's sub-layer norm, by default none.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        linear: MakeLinear,
        norm: nn.Module | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate = linear("mlp.gate", hidden, ffn)
        self.up = linear("mlp.up", hidden, ffn)
        self.norm = norm or nn.Identity()
        self.down = linear("mlp.down", ffn, hidden)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.activation(self.gate(x)) * self.up(x)))
        return out
