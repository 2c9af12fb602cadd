"""The fixed random signs (Rademacher factors) of sketched layers, packed one bit each."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.nn import functional

from longspan.hashing import lowbias32


def random_signs(key: str, rows: int, columns: int, device: torch.device) -> Tensor:
    """Generate ±1 as int8 (rows, columns) from `key` alone, the same on any device and version.

    Bit j of word w is bit j of a hash of (w, key) [C. Wellons' "lowbias32", twice]. Checkpoints do
    not store signs, so they must not depend on a library's random number generator.
    """
    if device.type == "meta":
        return torch.empty(rows, columns, dtype=torch.int8, device=device)
    digest = hashlib.sha256(key.encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))
    count = -(-rows * columns // 32)
    words = torch.arange(count, dtype=torch.int64, device=device)
    words = lowbias32(lowbias32((words + low) & 0xFFFFFFFF) ^ high)
    bits = torch.empty(count, 32, dtype=torch.int8, device=device)
    for j in range(32):
        bits[:, j] = (words >> j) & 1
    return bits.mul_(2).sub_(1).flatten()[: rows * columns].view(rows, columns)


def pack_signs(u: Tensor) -> Tensor:
    """Pack the signs `u` (rows, columns) eight to a byte, the first in the lowest bit."""
    is_plus = functional.pad((u > 0).flatten(), (0, -u.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (is_plus << torch.arange(8, dtype=torch.uint8, device=u.device)).sum(1).to(torch.uint8)


def unpack_signs(bits: Tensor, shape: tuple[int, ...], table: Tensor) -> Tensor:
    """Unpack signs to int8 of `shape`; `table` is `sign_table` on the same device."""
    signs = table.index_select(0, bits.int()).view(torch.int8)
    return signs[: math.prod(shape)].view(shape)


def sign_table(device: torch.device) -> Tensor:
    """For each byte its eight signs, as one int64: GPUs read 64 bits at once."""
    with torch.inference_mode(mode=False):  # usable by autograd even if created in inference mode
        values, shifts = torch.arange(256, device=device), torch.arange(8, device=device)
        signs = ((values[:, None] >> shifts) & 1) * 2 - 1
        return signs.to(torch.int8).view(torch.int64).flatten()
