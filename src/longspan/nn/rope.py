"""Rotary position embedding (RoPE): pair i of a head rotates by position · theta^(−2i/D).

Its scalings are those of transformers, by the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.config import Rope

UNSCALED = Rope()


@dataclass(frozen=True)
class RotaryEmbedding:
    """RoPE of a model: the width of its heads, the base, and how frequencies are scaled."""

    head_dim: int
    theta: float
    rope: Rope = UNSCALED

    def table(self, positions: Tensor, context: int | Tensor | None = None) -> Tensor:
        """Cosines and sines for integer `positions` (tokens,): float32 (2, tokens, 1, head_dim/2).

        Positions (batch, tokens) give float32 (2, batch, tokens, 1, head_dim/2).
        Angles are computed in float64: at a million tokens float32 is off by 0.03 radians.
        `context` is the length of the sequence if `positions` are only a part of it, or of each
        row's (batch, 1); a tensor is not waited for.
        """
        angles = positions.double()[..., None, None] * self._frequencies(positions, context)
        return (torch.stack([angles.cos(), angles.sin()]) * self._attention_factor()).float()

    def _frequencies(self, positions: Tensor, context: int | Tensor | None) -> Tensor:
        """Radians per token of each pair (head_dim / 2,), float64; before it, dims of `context`."""
        rope = self.rope
        theta: float | Tensor = self.theta
        if rope.type == "dynamic":
            theta = self._dynamic_theta(int(positions.max()) + 1 if context is None else context)
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=positions.device)
        frequencies = theta ** -(pairs / self.head_dim)
        if rope.type in ("default", "dynamic"):
            return frequencies
        scaled = frequencies / rope.factor
        if rope.type == "linear":
            return scaled
        assert rope.original_context is not None
        if rope.type == "llama3":
            rotations = rope.original_context * frequencies / (2 * math.pi)
            low, high = rope.low_freq_factor, rope.high_freq_factor
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
        else:
            kept = 1 - self._yarn_ramp(rope.original_context, pairs / 2)
        return scaled * (1 - kept) + frequencies * kept

    def _dynamic_theta(self, length: int | Tensor) -> Tensor:
        """The base for a sequence of `length` tokens, which grows beyond the original context.

        Of lengths (batch, 1): float64 (batch, 1, 1, 1).
        """
        rope, dim = self.rope, self.head_dim
        assert rope.original_context is not None
        tokens = torch.as_tensor(length, dtype=torch.float64)
        growth = rope.factor * tokens / rope.original_context - (rope.factor - 1)
        theta = self.theta * growth.clamp(min=1) ** (dim / (dim - 2) if dim > 2 else 0)
        return theta[..., None, None] if theta.dim() else theta

    def _yarn_ramp(self, context: int, pairs: Tensor) -> Tensor:
        """How much each pair is scaled: 0 for the fastest, 1 for the slowest."""

        def pair_of(rotations: float) -> float:
            """The pair, as a fraction, that rotates so often in the original context."""
            turns = math.log(context / (rotations * 2 * math.pi))
            return self.head_dim * turns / (2 * math.log(self.theta))

        low, high = pair_of(self.rope.beta_fast), pair_of(self.rope.beta_slow)
        if self.rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001  # as in transformers
        return ((pairs - low) / (high - low)).clamp(0, 1)

    def _attention_factor(self) -> float:
        """What cosines and sines are multiplied by: 1, except for YaRN."""
        rope = self.rope
        if rope.type != "yarn":
            return 1.0
        if rope.attention_factor is not None:
            return rope.attention_factor
        growth = 0.1 * math.log(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return (rope.mscale * growth + 1) / (rope.mscale_all_dim * growth + 1)
        return growth + 1


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x (batch, tokens, heads, head_dim); its first and second half form the pairs."""
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
