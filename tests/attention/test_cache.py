"""Decoding token by token equals one pass over the whole, with rows dropped on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention import BlockSparse, Dense, Dilated, KVCache, Pattern, attend
from tests.attention.test_functional import HEADS, PATTERNS, random_qkv


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, tokens=st.integers(1, 40), heads=HEADS, data=st.data())
def test_fed_in_any_portions_it_equals_one_attend(
    pattern: Pattern, tokens: int, heads: tuple[int, int], data: st.DataObject
) -> None:
    q, k, v = (x.detach() for x in random_qkv(2, tokens, *heads, dtype=torch.float64))
    whole = attend(q, k, v, pattern)
    cache, parts = KVCache(pattern), []
    while cache.length < tokens:
        portion = data.draw(st.integers(1, min(4, tokens - cache.length)))
        now = slice(cache.length, cache.length + portion)
        parts.append(cache.attend(q[:, now], k[:, now], v[:, now]))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(pattern=PATTERNS, position=st.integers(1, 30), head=st.integers(0, 5))
def test_what_is_denied_is_never_seen_again(pattern: Pattern, position: int, head: int) -> None:
    keys = torch.arange(position)
    later = torch.arange(position, position + 80)
    seen = pattern.counts(later, keys, head).any(0)
    awaited = pattern.awaits(keys, position, head)
    assert not (seen & ~awaited).any()
    if isinstance(pattern, Dilated) and pattern.blocks is None:  # and nothing is kept in vain
        assert torch.equal(seen, awaited)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (Dilated((8, 16), (1, 2)), 14),  # when 14 is next, both heads have a query to come
        (BlockSparse(4, local_window=8, global_tokens=4), 4 + 7),
        (Dense(), 100),
    ],
)
def test_it_holds_no_more_than_the_pattern_needs(pattern: Pattern, most: int) -> None:
    cache, held = KVCache(pattern), []
    for _ in range(100):
        cache.attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
        held.append(cache.rows)
    assert cache.length == 100
    assert max(held) == most
