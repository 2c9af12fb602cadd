"""LoRA (Hu et al. 2021): a frozen linear layer and a trained low-rank update of its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class LoRALinear(nn.Linear):
    """x Wᵀ + bias + alpha / rank · x Aᵀ Bᵀ, of which A (rank, in) and B (out, rank) are trained."""

    def __init__(
        self, in_features: int, out_features: int, rank: int, alpha: float, *, bias: bool
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, in_features))
        self.lora_b = nn.Parameter(torch.empty(out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        return super().forward(x) + self.scale * linear(linear(x, self.lora_a), self.lora_b)
