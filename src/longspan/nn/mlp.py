"""The gated MLP, and the factory type for a block's linear layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from longspan.nn.activations import ACTIVATIONS
from longspan.nn.norm import RMSNorm
from longspan.nn.precision import autocast_dtype
from longspan.nn.residual import linear_onto
from longspan.nn.tiled_mlp import tiled_mlp

MakeLinear = Callable[[str, int, int], nn.Module]
"""Creates a linear layer from its name, in_features and out_features."""


class GatedMLP(nn.Module):
    """down(norm(activation(gate(x)) · up(x))): SwiGLU with "silu".

    `norm` is MAGNETO's sub-layer norm, by default none.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        linear: MakeLinear,
        norm: RMSNorm | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate = linear("mlp.gate", hidden, ffn)
        self.up = linear("mlp.up", hidden, ffn)
        self.norm = norm or nn.Identity()
        self.down = linear("mlp.down", ffn, hidden)
        self._activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.tile_tokens = 0
        """Tokens of a tile (`train.mlp_tile_tokens`); 0 computes all at once. Tiles are for dense
        layers that are not split over ranks.
        """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output, (..., hidden) as x, plus `residual` if there is one."""
        if 0 < self.tile_tokens < x.numel() // x.shape[-1]:
            out = self._forward_in_tiles(x)
            return out if residual is None else residual + out
        hidden = self.norm(self.activation(self.gate(x)) * self.up(x))
        return linear_onto(residual, self.down, hidden)

    def _forward_in_tiles(self, x: Tensor) -> Tensor:
        dtype, norm = autocast_dtype(x) or x.dtype, self.norm
        layers = [self.gate, self.up, self.down]
        tensors: list[Tensor | None] = [x.flatten(0, -2), *(layer.weight for layer in layers)]  # type: ignore[list-item]
        tensors.append(norm.weight_for(x) if isinstance(norm, RMSNorm) else None)
        tensors += [layer.bias for layer in layers]  # type: ignore[misc]
        out = tiled_mlp(
            *(None if tensor is None else tensor.to(dtype) for tensor in tensors),  # type: ignore[arg-type]
            activation=self._activation_name,
            eps=norm.eps or 0.0 if isinstance(norm, RMSNorm) else 0.0,
            tile=self.tile_tokens,
        )
        return out.view(*x.shape[:-1], -1)
