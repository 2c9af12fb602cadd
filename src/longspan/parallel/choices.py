"""What a layout decides, for the planner too: without importing what carries it out."""

from __future__ import annotations

from typing import Literal

import torch

from longspan.config import Layout, Model

Split = Literal["none", "tokens", "features"]
"""How tensor-parallel ranks split the residual stream (batch, tokens, hidden)."""


def residual_split(model: Model, megatron_sequence_parallel: bool) -> Split:
    """How the ranks of the tensor axis split the residual stream."""
    if model.linear != "dense":
        return "features"
    return "tokens" if megatron_sequence_parallel else "none"


def reduce_dtype(layout: Layout) -> torch.dtype:
    """The dtype in which ranks reduce gradients; shards accumulate them in float32."""
    return torch.bfloat16 if layout.gradient_compression == "bf16" else torch.float32


def pinned_bytes(size: int) -> int:
    """What PyTorch allocates for `size` bytes of pinned memory: a power of two."""
    return 1 << max(0, size - 1).bit_length()
