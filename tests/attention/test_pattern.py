"""Costs counted by formula against the mask itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention import Dense, Dilated, Pattern, pattern_of
from longspan.config import Attention
from tests.attention.test_operator import dilated_patterns


@settings(max_examples=100, deadline=None)
@given(
    pattern=st.one_of(st.just(Dense()), dilated_patterns()),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 6),
    is_causal=st.booleans(),
)
def test_pairs_equal_the_sum_of_the_mask(
    pattern: Pattern, tokens: int, heads: int, is_causal: bool
) -> None:
    position = torch.arange(tokens)
    masks = [pattern.counts(position, position, head) for head in range(heads)]
    total = sum(int((mask.tril() if is_causal else mask).sum()) for mask in masks)
    assert pattern.pairs(tokens, heads, is_causal=is_causal) == total


def test_flops_follow_the_published_formula() -> None:
    # 4·H·D·N·(w/r²)/2 a branch, causal; exact counting adds the diagonal, 1 part in w/r.
    tokens, heads, head_dim = 131072, 16, 64
    pattern = Dilated((2048, 4096, 8192), (1, 2, 4))
    formula = sum(4 * heads * head_dim * tokens * (w / r**2) / 2 for w, r in pattern.branches)
    found = pattern.flops(tokens, heads, head_dim, is_causal=True)
    assert found == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "rates", "message"),
    [
        ((4, 8), (1,), "one entry per branch, got 2 and 1"),
        ((), (), "one entry per branch, got 0 and 0"),
        ((6,), (4,), "segment length 6 must be a multiple of its dilation rate 4: use 8"),
        ((0,), (1,), "at least 1, got 0 and 1"),
    ],
)
def test_impossible_branches_are_told(
    lengths: tuple[int, ...], rates: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Dilated(lengths, rates)


def test_pattern_of_a_run_file_section() -> None:
    assert pattern_of(Attention(kind="dense")) == Dense()
    dilated = Attention(segment_lengths=(4, 8), dilation_rates=(1, 2))
    assert pattern_of(dilated) == Dilated((4, 8), (1, 2))
