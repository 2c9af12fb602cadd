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
    Pattern,
    attend_newest,
    attend_oracle,
)
from longspan.attention import cache as cache_module
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
    found = decode(KVCache(pattern), qkv, portions, sink_logits=sinks)
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
        found = decode(KVCache(pattern), qkv, [200, *[1] * 100])
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
    ("pattern", "needed"),
    [
        (Dilated((64, 128), (1, 2)), 128),
        (BlockSparse(4, local_window=80, global_tokens=4), 4 + 80),
        (Dense(), 300),
    ],
)
def test_the_buffers_exceed_what_the_pattern_needs_by_a_quarter(
    pattern: Pattern, needed: int
) -> None:
    cache, prompt, rows = KVCache(pattern), KVCache(pattern), []
    for _ in range(300):
        cache.attend(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
        rows.append(cache.rows)
    prompt.attend(*(torch.randn(1, 300, 2, 8) for _ in range(3)))
    assert cache.length == prompt.length == 300
    limit = needed * 5 // 4 + cache_module.SPARE_ROWS + 2
    assert needed <= max(rows) <= limit
    assert prompt.rows <= limit


@pytest.mark.parametrize(
    ("portion", "reads"),
    [(1, 0), (2, 1)],
    ids=["one token", "two tokens"],
)
def test_one_token_does_not_take_the_reference_path(
    monkeypatch: pytest.MonkeyPatch, portion: int, reads: int
) -> None:
    calls = []
    reference = cache_module.reference_attention

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return reference(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module, "reference_attention", counted)
    qkv = tuple(x.detach() for x in random_qkv(1, 20, 2, 2))
    for pattern in (Dense(), BlockSparse(4, 8), Dilated((8,), (2,), blocks=BlockSparse(2))):
        calls.clear()
        decode(KVCache(pattern), qkv, [10, portion])
        assert len(calls) == reads


def test_wrong_uses_are_errors() -> None:
    cache = KVCache(Dense())
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
