"""The types that sums are accumulated in."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32: what sums over `x` are accumulated in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
