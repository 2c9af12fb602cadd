"""In which type layers compute."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type autocast has products of `x` computed in, or None where it does not."""
    device = x.device.type
    # The meta device has no autocast; that torch could say so, torch 2.11 does not compile.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
