"""Documents packed into windows: every token once, whole where it fits, full as best-fit has it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longspan.constants import IGNORE_INDEX
from longspan.data.packing import PackedSource, best_fit
from longspan.data.token_split import TokenSplit
from longspan.data.tokenizer import ByteTokenizer

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def plain_best_fit(lengths: list[int], capacity: int) -> Counter[int]:
    """How full the bins are, of best-fit decreasing as it is defined."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=capacity) - length)
    return Counter(capacity - room for room in rooms)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, more=st.integers(0, 20))
def test_bins_are_as_full_as_by_the_definition(lengths: list[int], more: int) -> None:
    capacity = max(lengths) + more
    bins = best_fit(np.array(lengths), capacity)
    loads = np.bincount(bins, weights=lengths).astype(int)
    assert Counter(loads.tolist()) == plain_best_fit(lengths, capacity)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, context=st.integers(1, 50))
def test_samples_are_whole_documents_where_they_fit(lengths: list[int], context: int) -> None:
    # No targets, and less than a sample, are refused.
    assume(max(lengths) > 1 and sum(lengths) >= context)
    stream = np.arange(1, sum(lengths) + 1) % 251
    split = TokenSplit([stream], np.cumsum(lengths))
    empty = TokenSplit([], np.zeros(0, dtype=np.int64))
    source = PackedSource({"train": split, "validation": empty}, context, ByteTokenizer(), 256, "")
    assert source.validation_samples(3) == []
    # What has to be there: each document, cut after every `context` tokens, with its targets.
    expected = Counter[tuple[int, ...]]()
    for start, end in zip(np.cumsum(lengths) - lengths, np.cumsum(lengths), strict=True):
        for first in range(start, end, context):
            tokens = stream[first : min(first + context, end)]
            targets = np.append(stream[first + 1 : end], IGNORE_INDEX)[: len(tokens)]
            expected[(*tokens, *targets)] += 1
    found = Counter[tuple[int, ...]]()
    for index in range(source.num_windows("train")):
        sample = source.sample(3, index)
        assert len(sample.tokens) == len(sample.targets) == context
        assert source.num_targets(3, index) == (sample.targets != IGNORE_INDEX).sum()
        assert sample.documents is not None
        borders = np.flatnonzero(np.diff(sample.documents)) + 1
        parts = (np.split(x, borders) for x in (sample.tokens, sample.targets, sample.documents))
        for tokens, targets, documents in zip(*parts, strict=True):
            if documents[0] >= 0:
                found[(*tokens, *targets)] += 1
            else:
                assert not tokens.any()
                assert (targets == IGNORE_INDEX).all()
    assert found == expected
    padding = 1 - sum(lengths) / (source.num_windows("train") * context)
    assert f"{padding:.1%} padding" in source.describe()
