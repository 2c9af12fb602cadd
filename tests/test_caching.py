"""Caches bounded by bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longspan import caching
from longspan.attention import BlockSparse
from longspan.attention.context_parallel import kv_exchange, sparse_kv
from longspan.attention.kernels import block_index as indices
from longspan.caching import ByteCache, cached_up_to, tensor_bytes

CPU = torch.device("cpu")


def test_the_least_recently_used_go_when_their_bytes_exceed_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    monkeypatch.setattr(caching, "ENTRY_BYTES", 0)

    @cached_up_to(3000)
    def floats(count: int) -> Tensor:
        calls.append(count)
        return torch.zeros(count)

    first = floats(250)  # 1,000 bytes
    floats(251)
    assert floats(250) is first
    floats(249)
    assert floats.held_bytes == 3000
    floats(10)  # 251 was used longest ago
    assert floats.held_bytes == 3000 - 1004 + 40
    assert floats(250) is first
    assert calls == [250, 251, 249, 10]
    floats(251)
    assert calls[-1] == 251
    huge = floats(10_000)  # alone, and kept while it is the newest
    assert (floats.held_bytes, floats(10_000)) == (40_000, huge)


def test_bytes_are_those_of_storages_wherever_they_are() -> None:
    @dataclass
    class Pair:
        a: Tensor
        b: dict[str, list[Tensor]]

    x = torch.zeros(100)
    assert (
        tensor_bytes(Pair(x, {"views": [x[:10], x.view(10, 10)], "more": [torch.zeros(1)]})) == 404
    )
    assert tensor_bytes((x, x, 3, None, "text")) == 400


def test_threads_share_a_cache() -> None:
    barrier = threading.Barrier(8)
    cache = ByteCache(lambda count: torch.full((count,), count), 5000)

    def use(seed: int) -> None:
        barrier.wait()
        for step in range(500):
            count = (seed * 31 + step * 17) % 40 + 1
            assert cache(count).tolist() == [count] * count

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    held = sum(size for _, size in cache._entries.values())
    assert cache.held_bytes == held <= 5000


def test_arguments_and_entries_without_tensors_count() -> None:
    cache = ByteCache(lambda x, y: None, 10 * caching.ENTRY_BYTES)
    for number in range(100):
        cache(number, None)
    assert cache.held_bytes == 10 * caching.ENTRY_BYTES
    cache(torch.zeros(1024), None)
    assert cache.held_bytes == 10 * caching.ENTRY_BYTES  # five entries, and 4 KiB of one
    assert len(cache._entries) == 6


def test_block_indices_of_many_lengths_stay_within_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pattern = BlockSparse(block_size=128, local_window=512, global_tokens=128)
    monkeypatch.setattr(indices.block_index, "_max_bytes", 20_000)
    for count in range(8, 72):
        indices.block_index(pattern, count, True, False, CPU)
    assert 0 < indices.block_index.held_bytes <= 20_000


def test_every_cache_of_tensors_is_bounded_by_bytes() -> None:
    caches = [indices.block_index, indices.chunked_block_index]
    caches += [kv_exchange.remote_rows, kv_exchange.plan_exchange, sparse_kv.split_dilated]
    for cache in caches:
        assert isinstance(cache, ByteCache)
        assert cache._max_bytes <= 1 << 30
