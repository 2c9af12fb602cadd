"""The gated MLP."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from longspan.nn.norm import RMSNorm


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), with MAGNETO's norm before `down` where asked for."""

    def __init__(self, hidden: int, ffn: int, *, sub_layer_norm: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.norm = RMSNorm(ffn) if sub_layer_norm else nn.Identity()
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(silu(self.gate(x)) * self.up(x)))
        return out
