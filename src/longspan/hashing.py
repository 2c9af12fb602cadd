"""Stateless random numbers: hashes of where they are used, the same on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def hash64(*words: int) -> int:
    """A 64-bit hash of integers, by SplitMix64: derives keys and seeds from other ones."""
    state = 0
    for word in words:
        x = (state + word + 0x9E3779B97F4A7C15) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        state = x ^ (x >> 31)
    return state


def lowbias32(x: Tensor) -> Tensor:
    """C. Wellons' hash "lowbias32" of 32-bit integers held in int64.

    No product overflows: the second factor is taken modulo 2³² to a magnitude below 2³¹.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & _MASK32
    return x ^ (x >> 16)


def uniform(seed: int, index: Tensor, *indices: Tensor) -> Tensor:
    """Uniform in [0, 1) for each (seed, index, …): float64, the indices broadcast together.

    Indices are int64 below 2³¹. Only the seed modulo 2³² matters.
    """
    state = (seed * 0x9E3779B1 + 0x7F4A7C15) & _MASK32
    return fold32(state, index, *indices).double() / 2.0**32


FACTOR = 0x85EBCA77 - (1 << 32)
"""Of an index in `fold32`, modulo 2³², with a magnitude below 2³¹: torch.compile multiplies indices
in int32 on a GPU, where only so does the product have the right 32 bits."""


def fold32(state: Tensor | int, *indices: Tensor | int) -> Tensor:
    """A 32-bit hash, held in int64, of `state` and of each index in turn, broadcast together.

    Indices are int64 below 2³¹, and one of them is a tensor.
    """
    for i in indices:
        state = lowbias32((state + i * FACTOR) & _MASK32)  # type: ignore[arg-type]
    return state  # type: ignore[return-value]
