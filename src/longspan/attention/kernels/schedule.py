"""The schedule of a dilated pattern's branches: their order, and the pairs that each one skips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

TRITON_RATIOS = (32.0,)
"""`max_ratios` of Triton's kernels: they need counts that repeat within a tile."""
GLUON_RATIOS = (16.0, math.inf)
"""Those of the kernels for whole segments: up to 16, counts leave registers for a group of dQ."""
TILE = 64
"""Rows of a tile of queries and of keys of the kernels for whole segments."""
PARTIAL_BYTES = 128 << 20
"""Of each float32 buffer that merges branches; longer sequences are processed slab by slab."""


@dataclass(frozen=True)
class Branch:
    """One branch for the kernels: lengths in rows, and its relation to the other branches."""

    rate: int
    segment: int
    inner: int = 0  # rows of the inner segments whose pairs it skips; 0 if it visits all pairs
    ratios: tuple[int, ...] = ()  # the rates of its chain's outer branches over its own
    partial_ratio: int = 1  # the rate of the branch before it over its own
    is_first: bool = False
    is_last: bool = False


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
        return self.branches[-1].rate == 1

    @property
    def has_partial(self) -> bool:
        return len(self.branches) > 1 or not self.is_nested

    def fit(self, row_bytes: float) -> int:
        """How many tokens buffers allow, of `row_bytes` for a float32 row of all heads.

        A partial result has a row for each `partial_rate`-th token. The sum of dQ, of the kernels
        for whole segments, has one for each token, and may take twice as much.
        """
        rate = min(self.partial_rate, 2) if self.has_partial else 2
        return int(rate * PARTIAL_BYTES / row_bytes)

    def slab(self, row_bytes: float) -> int:
        """Tokens that are processed at once: as many as fit, of which no pair leaves them."""
        reach = math.lcm(self.reach, 4)  # keeps the rows of lse in every slab aligned
        return reach * max(1, self.fit(row_bytes) // reach)


def schedule_branches(
    branches: Sequence[tuple[int, int]],
    has_blocks: bool,
    max_ratios: Sequence[float] = TRITON_RATIOS,
) -> BranchSchedule:
    """Order branches (segment length, rate); nested ones skip the pairs of inner branches.

    Nested: every segment consists of whole inner ones, and every rate is a multiple of the inner
    ones, by a power of two. They form chains of rates up to `max_ratios` times that of the densest:
    so much in the first chain, the second, …, and as in the last in all that follow. Within a
    chain, whose rates divide its segments, each pair is visited once, with the number of branches
    that have it. The next chain visits again what it has in common with a denser one, which is
    little; but counts of few rates are cheap.
    """
    dense_to_sparse = sorted(branches)
    widest, chains = dense_to_sparse[-1][0], _chains(dense_to_sparse, max_ratios)
    if _is_nested(chains) and not (has_blocks and len(branches) > 1):
        found = [branch for chain in chains for branch in _with_own_pairs(chain)]
        rates = [branch.rate for branch in found]
        for i, (rate, before) in enumerate(pairwise(rates)):
            found[i] = replace(found[i], partial_ratio=before // rate)
        found[0] = replace(found[0], is_last=True)
        is_nested, partial_rate, reach = True, (*rates, 1)[1], widest
    else:
        found = [Branch(r, w // r) for w, r in dense_to_sparse]
        is_nested, partial_rate, reach = False, 1, math.lcm(*(w for w, _ in branches))
    found[-1] = replace(found[-1], is_first=True)
    return BranchSchedule(tuple(found[::-1]), is_nested, partial_rate, reach)


def schedule_whole_segments(
    branches: Sequence[tuple[int, int]], tokens: int
) -> BranchSchedule | None:
    """That of the kernels for whole segments; None if they do not serve so many tokens.

    These must be whole segments, which have pairs of tiles of their own. Of a segment that reaches
    beyond the sequence there is only so much.
    """
    cut = [(min(w, tokens), r) for w, r in branches]
    schedule = schedule_branches(cut, has_blocks=False, max_ratios=GLUON_RATIOS)
    is_served = schedule.is_nested and all(
        tokens % (b.segment * b.rate) == 0 and (b.inner or b.segment) % (2 * TILE) == 0
        for b in schedule.branches
    )
    return schedule if is_served else None


def _chains(
    dense_to_sparse: Sequence[tuple[int, int]], max_ratios: Sequence[float]
) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = []
    for w, r in dense_to_sparse:
        limit = max_ratios[min(len(found), len(max_ratios)) - 1]
        if found and r <= limit * found[-1][0][1]:
            found[-1].append((w, r))
        else:
            found.append([(w, r)])
    return found


def _is_nested(chains: Sequence[Sequence[tuple[int, int]]]) -> bool:
    dense_to_sparse = [branch for chain in chains for branch in chain]
    return (
        all(w % v == 0 and r % s == 0 for (v, s), (w, r) in pairwise(dense_to_sparse))
        and (dense_to_sparse[-1][1] // dense_to_sparse[0][1]).bit_count() == 1
        and all(w % chain[-1][1] == 0 for chain in chains for w, _ in chain)
    )


def _with_own_pairs(chain: Sequence[tuple[int, int]]) -> list[Branch]:
    """The branches of a chain that visit pairs, the densest first.

    One whose segments are no longer than the inner ones has none of its own: the inner branch
    visits them all, and counts it.
    """
    found, inner = [], 0
    for at, (w, r) in enumerate(chain):
        if w > inner:
            ratios = tuple(outer // r for _, outer in chain[at + 1 :])
            found.append(Branch(r, w // r, inner // r, ratios))
        inner = w
    return found
