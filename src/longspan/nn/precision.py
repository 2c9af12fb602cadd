"""The dtype that layers compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes matrix products of `x`, or None if it does not apply."""
    device = x.device.type
    # The meta device has no autocast. torch.amp.is_autocast_available would tell, but torch 2.11
    # cannot compile it.
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
