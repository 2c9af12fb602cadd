"""The index permutation is one-to-one, keyed, and spreads evenly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data.permutation import permute
from longspan.hashing import hash64


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 9))
def test_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_large_sizes_need_no_memory_and_stay_in_range() -> None:
    size = 10**15 + 7
    images = {permute(i, size, 3, 1) for i in range(1000)}
    assert len(images) == 1000
    assert all(0 <= image < size for image in images)


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {
        tuple(permute(i, 100, seed, epoch) for i in range(100))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert tuple(range(100)) not in orders


def test_images_are_spread_evenly() -> None:
    """Chi-squared of where each tenth of the input lands: 81 degrees of freedom."""
    size, cells = 1000, [[0] * 10 for _ in range(10)]
    keys = range(40)
    for key in keys:
        for i in range(size):
            cells[i * 10 // size][permute(i, size, key) * 10 // size] += 1
    expected = size * len(keys) / 100
    chi2 = sum((cell - expected) ** 2 / expected for row in cells for cell in row)
    assert chi2 < 140  # p < 0.0001 above


def test_hash_depends_on_every_word() -> None:
    assert len({hash64(a, b) for a in range(50) for b in range(50)}) == 2500


def test_orders_never_change() -> None:
    """A run resumed by a later release must see the same samples in the same order."""
    assert [permute(i, 10, 3, 1) for i in range(10)] == [3, 2, 0, 7, 9, 5, 6, 1, 4, 8]
    assert hash64(1, 2, 3) == 7702586659592502839
