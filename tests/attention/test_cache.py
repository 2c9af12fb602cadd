"""Decoding with a KV cache equals one pass over the sequence, while rows are dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention import BlockSparse, Dense, Dilated, KVCache, Pattern, attend
from tests.attention.test_functional import HEADS, PATTERNS, random_qkv


@settings(max_examples=40, deadline=None)
@given(pattern=PATTERNS, tokens=st.integers(1, 40), heads=HEADS, data=st.data())
def test_decoding_in_any_portions_equals_one_attend(
    pattern: Pattern, tokens: int, heads: tuple[int, int], data: st.DataObject
) -> None:
    q, k, v = (x.detach() for x in random_qkv(2, tokens, *heads, dtype=torch.float64))
    whole = attend(q, k, v, pattern)
    cache, outputs = KVCache(pattern), []
    while cache.length < tokens:
        portion = data.draw(st.integers(1, min(4, tokens - cache.length)))
        now = slice(cache.length, cache.length + portion)
        outputs.append(cache.attend(q[:, now], k[:, now], v[:, now]))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-10, atol=1e-11)


@settings(max_examples=100, deadline=None)
@given(pattern=PATTERNS, position=st.integers(1, 30), head=st.integers(0, 5))
def test_dropped_keys_are_never_seen_again(pattern: Pattern, position: int, head: int) -> None:
    keys = torch.arange(position)
    later = torch.arange(position, position + 80)
    seen = pattern.counts(later, keys, head).any(0)
    needed = pattern.may_see(keys, position, head)
    assert not (seen & ~needed).any()
    if isinstance(pattern, Dilated) and pattern.blocks is None:  # and every other key is seen
        assert torch.equal(seen, needed)


@pytest.mark.parametrize(
    ("pattern", "max_rows"),
    [
        (Dilated((8, 16), (1, 2)), 14),  # before 14 both heads have later queries
        (BlockSparse(4, local_window=8, global_tokens=4), 4 + 7),
        (Dense(), 100),
    ],
)
def test_the_cache_holds_no_more_than_the_pattern_needs(pattern: Pattern, max_rows: int) -> None:
    cache, held = KVCache(pattern), []
    for _ in range(100):
        cache.attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
        held.append(cache.rows)
    assert cache.length == 100
    assert max(held) == max_rows
