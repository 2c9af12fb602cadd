"""A shuffle that needs no memory: a keyed permutation of range(size), computed per index.

A four-round Feistel network permutes the smallest even-bit power of two that holds `size`; an
image outside the range is permuted again until it falls inside ("cycle walking"), which keeps the
map one-to-one. The power of two is less than 4 × size, so that takes under four steps on average.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 4


def _mix(x: int) -> int:
    """SplitMix64's finalizer: every input bit moves every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix(*words: int) -> int:
    """A 64-bit hash of integers: the one source of keys and seeds derived from others."""
    state = 0
    for word in words:
        state = _mix((state + word + 0x9E3779B97F4A7C15) & _MASK)
    return state


def permute(index: int, size: int, *key: int) -> int:
    """Where `index` goes in the permutation of range(size) that `key` selects."""
    assert 0 <= index < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (mix(*key, round_, right) & low)
        index = left << half | right
        if index < size:
            return index
