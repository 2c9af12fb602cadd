"""A shuffle that needs no memory: a keyed permutation of range(size), computed per index.

A four-round Feistel network permutes the smallest power of two with an even number of bits that
holds `size`. An image outside the range is permuted again until it falls inside ("cycle walking"),
which keeps the map one-to-one. The power of two is less than 4 × size, so this takes fewer than
four steps on average.
"""

from __future__ import annotations

from longspan.hashing import hash64

_ROUNDS = 4


def permute(index: int, size: int, *key: int) -> int:
    """The image of `index` under the permutation of range(size) that `key` selects."""
    assert 0 <= index < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (hash64(*key, round_, right) & low)
        index = left << half | right
        if index < size:
            return index
