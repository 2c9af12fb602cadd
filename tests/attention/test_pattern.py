"""Costs and rows by formula equal those counted from the mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    KVCache,
    Pattern,
    pattern_of,
    picture,
)
from longspan.attention.packed import Packed
from longspan.attention.pattern import reach
from longspan.config import Attention
from tests.attention.test_functional import PATTERNS


@st.composite
def packed_patterns(draw: st.DrawFn) -> Packed:
    """Documents at any positions, also of one token."""
    starts = draw(st.sets(st.integers(1, 39), max_size=4))
    return Packed(draw(PATTERNS), (0, *sorted(starts)))


@settings(max_examples=100, deadline=None)
@given(
    pattern=PATTERNS | packed_patterns(),
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


@pytest.mark.parametrize("tokens", [1 << 14, (1 << 14) + 5])
def test_many_random_blocks_are_counted_by_their_share(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    pattern = BlockSparse(16, local_window=64, global_tokens=32, stride=9, density=0.1)
    exact = pattern.pairs(tokens, 2, is_causal=True)
    monkeypatch.setattr("longspan.attention.pattern.EXACT_BLOCKS", 1)
    assert pattern.pairs(tokens, 2, is_causal=True) == pytest.approx(exact, rel=1e-2)
    assert pattern.pairs(1 << 24, 2, is_causal=True) > 0  # a million blocks, in no time


@settings(max_examples=100, deadline=None)
@given(
    pattern=PATTERNS | packed_patterns(),
    tokens=st.integers(1, 40),
    head=st.integers(0, 5),
    data=st.data(),
)
def test_rows_and_coverage_equal_what_the_mask_says(
    pattern: Pattern, tokens: int, head: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    position = torch.arange(tokens)
    counts = pattern.counts(position, position, head)
    assert torch.equal(pattern.covers(position, head), counts.any(1))
    assert torch.equal(pattern.uncovered(tokens, head + 1)[:, head], ~counts.any(1))
    for is_causal in (False, True):
        mask = (counts.tril() if is_causal else counts)[start:stop]
        expected = position[mask.any(0)]
        found = pattern.key_rows(start, stop, tokens, head, is_causal=is_causal)
        assert found.tolist() == expected.tolist()


def test_block_sparse_within_dilated_segments_counts_rows_of_the_segment() -> None:
    # Segments of 16 at rate 2 have 8 rows; in blocks of 2 rows each sees its own block only, so
    # head 0 pairs positions {0, 2}, {4, 6}, … and nothing across.
    pattern = Dilated((16,), (2,), blocks=BlockSparse(2))
    position = torch.arange(32)
    seen = pattern.counts(position, position, 0).nonzero().tolist()
    assert [k for q, k in seen if q == 6] == [4, 6]
    assert [k for q, k in seen if q == 16] == [16, 18]
    assert len(seen) == 8 * 4


def test_each_option_of_block_sparse_adds_its_blocks() -> None:
    index = torch.arange(6)

    def blocks_seen(**options: int) -> list[str]:
        blocks = BlockSparse(16, **options).blocks(index, index)  # type: ignore[arg-type]
        return ["".join("x" if keep else "." for keep in row) for row in blocks.tolist()]

    assert blocks_seen() == ["x.....", ".x....", "..x...", "...x..", "....x.", ".....x"]
    assert blocks_seen(local_window=32)[2] == ".xxx.."
    assert blocks_seen(global_tokens=16)[0] == "xxxxxx"
    assert blocks_seen(global_tokens=16)[3] == "x..x.."
    assert blocks_seen(stride=3)[4] == ".x..x."


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_density_is_the_fraction_of_blocks_seen(density: float) -> None:
    index = torch.arange(200)
    pattern = BlockSparse(16, density=density, seed=3)
    blocks = pattern.blocks(index, index)
    off_diagonal = ~torch.eye(200, dtype=torch.bool)
    assert blocks[off_diagonal].double().mean().item() == pytest.approx(density, abs=0.01)
    # Rows and columns have the same density, seeds differ, a prefix has the prefix of the mask.
    for dim in (0, 1):
        assert blocks.double().mean(dim).std().item() < 2 * (density / 200) ** 0.5
    other = BlockSparse(16, density=density, seed=4).blocks(index, index)
    assert (blocks == other)[off_diagonal].double().mean().item() < 0.95
    assert torch.equal(pattern.blocks(index[:50], index[:50]), blocks[:50, :50])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"block_size": 8, "local_window": 20}, "multiple of block_size = 8, got 20: use 16"),
        ({"block_size": 8, "density": 1.5}, "0 to 1, got 1.5"),
        ({"block_size": 8, "stride": -1}, "stride must be at least 0"),
    ],
)
def test_wrong_blocks_are_errors(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSparse(**options)


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
def test_wrong_branches_are_errors(
    lengths: tuple[int, ...], rates: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Dilated(lengths, rates)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dilated(64, 1), r"segment_lengths must be a sequence .* e\.g\. \(64,\), got 64"),
        (lambda: Dilated((64,), 1), r"dilation_rates must be a sequence .* e\.g\. \(1,\), got 1"),
        (lambda: Dilated((64.0,), (1,)), r"sequence of integers, .* got \(64\.0,\)"),
        (lambda: Dilated("64", "1"), "sequence of integers, .* got '64'"),
        (lambda: Dilated((64,), (1,), 16), r"blocks must be BlockSparse\(\.\.\.\) or None, got 16"),
        (lambda: BlockSparse(16.0), r"block_size must be an integer, got 16\.0"),
        (lambda: BlockSparse(16, stride=1.5), r"stride must be an integer, got 1\.5"),
        (lambda: BlockSparse(16, density="0.1"), r"density must be a number .* got '0\.1'"),
        (lambda: KVCache((64, 1), 8), r"pattern must be Dense\(\), .* got tuple"),
        (lambda: picture((64, 1), 32), r"pattern must be Dense\(\), .* got tuple"),
    ],
)
def test_wrong_types_are_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_lists_become_tuples_so_that_a_pattern_can_be_hashed() -> None:
    pattern = Dilated([4, 8], torch.tensor([1, 2]))  # type: ignore[arg-type]
    assert pattern == Dilated((4, 8), (1, 2))
    assert hash(pattern) == hash(Dilated((4, 8), (1, 2)))


def test_pattern_of_a_run_file_section() -> None:
    assert pattern_of(Attention(kind="dense")) == Dense()
    dilated = Attention(segment_lengths=(4, 8), dilation_rates=(1, 2))
    assert pattern_of(dilated) == Dilated((4, 8), (1, 2))
    both = Attention(
        kind="dilated_block_sparse",
        segment_lengths=(8,),
        dilation_rates=(2,),
        block_size=2,
        stride=3,
    )
    assert pattern_of(both) == Dilated((8,), (2,), BlockSparse(2, stride=3))


REACHES = [
    (Dense(), 1, 256),
    (Dilated((16, 64), (1, 4)), 1, 61),  # the last token keeps every fourth, from 195
    (Dilated((16, 64), (1, 4)), 9, 64),
    (Dilated((16, 256), (1, 16)), 2, 256),
    (Dilated((32, 48), (1, 1)), 1, 32),
    (Dilated((32, 48), (1, 1)), 9, 64),
    (Dilated((16, 64), (1, 4), BlockSparse(4, local_window=8)), 1, 29),
    (BlockSparse(16), 9, 16),
    (BlockSparse(16, local_window=32), 3, 64),
    (BlockSparse(16, local_window=32), 99, 256),
    (BlockSparse(16, global_tokens=16), 1, 256),
    (BlockSparse(16, stride=3), 1, 256),
]


@pytest.mark.parametrize(("pattern", "layers", "expected"), REACHES)
def test_the_reach_is_that_of_the_mask(pattern: Pattern, layers: int, expected: int) -> None:
    """By powers of the matrix of which position sees which."""
    position = torch.arange(256)
    sees = sum(pattern.counts(position, position, head) for head in range(16)) > 0
    sees = (sees | torch.eye(256, dtype=torch.bool)).tril().double()
    depends = sees[-1]
    for _ in range(layers - 1):
        depends = ((depends @ sees) > 0).double()
    first = int(depends.nonzero()[0])
    assert 256 - first == reach([pattern] * layers, 256, 16)
    assert reach([pattern] * layers, 256, 16) == expected


def test_the_reach_of_random_blocks_is_an_upper_bound() -> None:
    """It takes every position between the earliest key and the last token for a dependency."""
    pattern, position = BlockSparse(16, density=0.2, seed=3), torch.arange(256)
    sees = pattern.counts(position, position, 0).tril().double()
    first = int((sees[-1] @ sees).nonzero()[0])
    assert 256 - first == 208 <= reach([pattern] * 2, 256, 1) == 240


def test_one_wide_layer_reaches_the_context() -> None:
    narrow, wide = Dilated((16, 64), (1, 4)), Dilated((16, 256), (1, 16))
    assert reach([narrow, narrow], 256, 16) == 64
    assert reach([narrow, wide], 256, 16) == reach([wide, narrow], 256, 16) == 256
