"""Rotary position embedding (RoPE): pair i of a head rotates by position · theta^(−2i/D)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines for integer `positions` (tokens,): float32 (2, tokens, 1, head_dim / 2).

    Angles are computed in float64: at a million tokens float32 is off by 0.03 radians.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None, None] * theta**-exponent
    return torch.stack([angles.cos(), angles.sin()]).float()


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x (batch, tokens, heads, head_dim); its first and second half form the pairs."""
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
