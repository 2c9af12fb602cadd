"""The schedule of a dilated pattern's branches: their order, and the pairs that each one skips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Branch:
    """One branch for the kernels: lengths in rows, and its relation to the other branches."""

    rate: int
    segment: int
    inner: int  # rows of the inner segments whose pairs it skips; 0 if it visits all pairs
    ratios: tuple[int, ...]  # the outer branches' rates over its own
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class BranchSchedule:
    """The branches from the sparsest to the densest.

    In a nested schedule each branch keeps only positions that the next one keeps: partial results
    of every `partial_rate`-th position are enough, and the last branch writes the result.
    """

    branches: tuple[Branch, ...]
    is_nested: bool
    partial_rate: int
    reach: int  # the longest segment: no pair is further apart

    def writes_every_row(self) -> bool:
        return self.is_nested and self.branches[-1].rate == 1


def schedule_branches(
    branches: Sequence[tuple[int, int]], has_blocks: bool, max_ratio: int | None = 32
) -> BranchSchedule:
    """Order branches (segment length, rate); nested ones skip the pairs of inner branches.

    Nested: every segment consists of whole inner ones, and every rate is a multiple of the inner
    ones and divides every segment. The ratio of the largest rate to the smallest must also be a
    power of two, at most `max_ratio` if it is given: a key's multiplicity repeats within a tile.
    """
    dense_to_sparse = sorted(branches)
    widest, sparsest = dense_to_sparse[-1]
    pairs, ratio = list(pairwise(dense_to_sparse)), sparsest // dense_to_sparse[0][1]
    is_nested = (
        all(w % v == 0 and r % s == 0 for (v, s), (w, r) in pairs)
        and all(w % sparsest == 0 for w, _ in dense_to_sparse)
        and ratio.bit_count() == 1
        and (max_ratio is None or ratio <= max_ratio)
        and not (has_blocks and pairs)
    )
    last = len(dense_to_sparse) - 1
    scheduled = tuple(
        Branch(
            rate=r,
            segment=w // r,
            inner=dense_to_sparse[i - 1][0] // r if is_nested and i > 0 else 0,
            ratios=tuple(s // r for _, s in dense_to_sparse[i + 1 :]) if is_nested else (),
            is_first=i == last,
            is_last=is_nested and i == 0,
        )
        for i, (w, r) in enumerate(dense_to_sparse)
    )[::-1]
    partial_rate = dense_to_sparse[1][1] if is_nested and pairs else 1
    reach = widest if is_nested else math.lcm(*(w for w, _ in branches))
    return BranchSchedule(scheduled, is_nested, partial_rate, reach)
