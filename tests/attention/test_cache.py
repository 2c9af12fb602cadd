"""Decoding with a KV cache equals the oracle over the sequence, while keys are dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    KVCache,
    KVCaches,
    Pattern,
    Window,
    attend_newest,
    attend_oracle,
)
from longspan.attention.packed import Packed
from tests.attention.test_functional import DEVICES, HEADS, PATTERNS, random_qkv


def decode(cache: KVCache, qkv: tuple[Tensor, ...], portions: list[int], **options: Any) -> Tensor:
    outputs = []
    for portion in portions:
        now = slice(cache.length, cache.length + portion)
        outputs.append(cache.attend(*(x[:, now] for x in qkv), **options))
    return torch.cat(outputs, 1)


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, heads=HEADS, first_head=st.integers(0, 3), data=st.data())
def test_decoding_in_any_portions_equals_the_oracle(
    pattern: Pattern, heads: tuple[int, int], first_head: int, data: st.DataObject
) -> None:
    portions = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 4]), min_size=1, max_size=50))
    if isinstance(pattern, Dilated):
        pattern = replace(pattern, first_head=first_head)
    qkv = tuple(x.detach() for x in random_qkv(2, sum(portions), *heads, dtype=torch.float64))
    sinks = torch.randn(heads[0]) if data.draw(st.booleans()) else None
    expected = attend_oracle(*qkv, pattern, is_causal=True, sink_logits=sinks)
    found = decode(KVCache(pattern, sum(portions)), qkv, portions, sink_logits=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    q, *kv = qkv
    heads_first = (x.transpose(1, 2) for x in kv)
    newest = attend_newest(q[:, -1:], *heads_first, pattern, sink_logits=sinks)
    torch.testing.assert_close(newest, expected[:, -1:], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "pattern",
    [Dense(), BlockSparse(64, 64, density=0.5), Dilated((64, 128), (1, 4))],
    ids=lambda pattern: type(pattern).__name__,
)
def test_decoding_in_bfloat16_accumulates_in_float32(pattern: Pattern, device: str) -> None:
    """The error is at most twice that of rounding the exact result once, as for `attend`."""
    torch.manual_seed(0)
    qkv = tuple(x.detach().bfloat16().to(device) for x in random_qkv(1, 300, 4, 2, 32))
    exact = attend_oracle(*(x.double().cpu() for x in qkv), pattern, is_causal=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = decode(KVCache(pattern, 300), qkv, [200, *[1] * 100])
    limit = (exact.bfloat16().double() - exact).abs().max()
    assert (found.cpu().double() - exact).abs().max() <= 2 * limit


@settings(max_examples=100, deadline=None)
@given(pattern=PATTERNS, position=st.integers(1, 30), head=st.integers(0, 5))
def test_dropped_keys_are_never_seen_again(pattern: Pattern, position: int, head: int) -> None:
    keys = torch.arange(position)
    later = torch.arange(position, position + 80)
    seen = pattern.counts(later, keys, head).any(0)
    sink, start = pattern.retained(position)
    assert 0 <= sink <= start <= position or (sink, start) == (0, 0)
    assert not seen[sink:start].any()


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        (Dense(), 2 * 300),
        (Window(20, sinks=4), 2 * 24),
        (BlockSparse(4, local_window=80, global_tokens=4), 2 * 84),
        (BlockSparse(4, stride=3), 2 * 300),
        # Of each branch, the positions of a segment that the head of a kv head reads.
        (Dilated((64, 128), (1, 2)), 2 * (64 + 64)),
        (Dilated((64, 512), (1, 32)), 2 * (64 + 10)),
    ],
)
def test_the_buffers_hold_what_the_pattern_needs_and_stay_where_they_are(
    pattern: Pattern, rows: int
) -> None:
    cache = KVCache(pattern, 300)
    found = set()
    for _ in range(300):
        cache.attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
        found.add((cache.rows, cache.keys.data_ptr(), cache.values.data_ptr()))
    assert {count for count, *_ in found} == {rows}
    assert len(found) == 1
    assert cache.bytes == 2 * (rows + 1) * 8 * 4
    with pytest.raises(ValueError, match="a KV cache of 300 tokens holds 300, and has no room for"):
        cache.attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))


def test_heads_of_a_kv_head_share_the_rows_that_both_read() -> None:
    cache = KVCache(Dilated((8, 32), (2, 4)), 64)
    cache.attend(torch.randn(1, 3, 12, 8), *(torch.randn(1, 3, 2, 8) for _ in range(2)))
    assert cache.rows == 2 * (2 * 8 // 2 + 4 * 32 // 4)  # 6 heads read 2, and 4 residues


@pytest.mark.parametrize(
    "pattern",
    [Dense(), Window(9, sinks=2), BlockSparse(4, density=0.5), Dilated((8, 32), (1, 4))],
    ids=lambda pattern: type(pattern).__name__,
)
def test_rows_of_a_batch_have_positions_of_their_own(pattern: Pattern) -> None:
    """Prompts of different lengths, decoded together, equal each decoded alone."""
    lengths, more, capacity = (5, 31, 17), 20, 51
    sequences = [
        tuple(torch.randn(1, length + more, heads, 8) for heads in (4, 2, 2)) for length in lengths
    ]
    together: KVCaches | None = None
    for row, (qkv, length) in enumerate(zip(sequences, lengths, strict=True)):
        alone = KVCaches([pattern], capacity)
        alone.layers[0].attend(*(x[:, :length] for x in qkv))
        alone.advance(torch.zeros(1, length))
        together = together or alone.repeat(len(lengths))
        together.load_row(row, alone)
    assert together is not None
    for step in range(more):
        newest = [
            torch.cat(
                [
                    qkv[i][:, length + step][:, None]
                    for qkv, length in zip(sequences, lengths, strict=True)
                ]
            )
            for i in range(3)
        ]
        found = together.layers[0].attend(*newest)
        together.advance(torch.zeros(len(lengths), 1))
        for row, (qkv, length) in enumerate(zip(sequences, lengths, strict=True)):
            seen = tuple(x[:, : length + step + 1] for x in qkv)
            expected = attend_oracle(*seen, pattern, is_causal=True)[:, -1]
            torch.testing.assert_close(
                found[row : row + 1, 0], expected.float(), rtol=1e-5, atol=1e-6
            )


def test_wrong_uses_are_errors() -> None:
    cache = KVCache(Dense(), 16)
    q, k, v = random_qkv(2, 3, 4, 2)
    with pytest.raises(ValueError, match=r"call it under torch.no_grad\(\)"):
        cache.attend(q, k, v)
    q, k, v = (x.detach() for x in (q, k, v))
    with pytest.raises(ValueError, match="as many queries as keys, got 1 and 3"):
        cache.attend(q[:, :1], k, v)
    cache.attend(q, k, v)
    with pytest.raises(ValueError, match="batch was 2 and is 1"):  # it would broadcast
        cache.attend(q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match=r"dtype was torch.float32 and is torch.bfloat16"):
        cache.attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with pytest.raises(ValueError, match=r"heads was 4 and is 2$"):
        cache.attend(q[:, :, :2], k, v)
    assert cache.length == 3
    with pytest.raises(ValueError, match="the capacity of a KV cache must be at least 1, got 0"):
        KVCache(Dense(), 0)
    with pytest.raises(TypeError, match="supports Dense, Dilated, BlockSparse and Window patterns"):
        KVCache(Packed(Dense(), (0, 2)), 4).attend(q, k, v)
