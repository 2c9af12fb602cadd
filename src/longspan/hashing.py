"""Random numbers that are a function of where they are used: no state, the same on every device."""

from __future__ import annotations

from torch import Tensor

_MASK = (1 << 32) - 1


def uniform(seed: int, *indices: Tensor) -> Tensor:
    """A number in [0, 1) per (seed, index, …): float64, the indices broadcast together.

    Each index, an int64 below 2³¹, is folded into 32 bits of state held in int64 and mixed by
    multiply and xor-shift.
    """
    state: Tensor | int = (seed * 0x9E3779B1 + 0x7F4A7C15) & _MASK
    for index in indices:
        state = _mixed((state + index * 0x85EBCA77) & _MASK)
    assert isinstance(state, Tensor)
    return state.double() / 2.0**32


def _mixed(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)
