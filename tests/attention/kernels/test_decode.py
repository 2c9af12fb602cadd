"""The kernel of a decoding step equals plain code over the same buffers."""

from __future__ import annotations

import pytest
import torch

from longspan.attention import BlockSparse, Dense, Dilated, KVCaches, Pattern, Window
from longspan.attention import cache as cache_module
from tests.attention.test_functional import DEVICES

decode = pytest.importorskip("longspan.attention.kernels.decode")

PATTERNS = [
    Dense(),
    Window(20, sinks=3),
    Window(9, sinks=2, dilation=3),
    BlockSparse(8, local_window=24, global_tokens=8),
    BlockSparse(8, density=0.4),
    Dilated((32, 128), (1, 4)),
    Dilated((64, 96), (2, 3), first_head=1),  # some heads see nothing
    Dilated((64,), (2,), blocks=BlockSparse(4, 8)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(PATTERNS)))
@torch.no_grad()
def test_the_kernel_equals_plain_code(
    index: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern: Pattern = PATTERNS[index]
    heads, has_sinks = [((4, 4), False), ((6, 2), True), ((4, 2), True)][index % 3]
    monkeypatch.setattr(decode, "TILE", 32)
    monkeypatch.setattr(decode, "PROGRAMS", 16)
    caches: KVCaches | None = None
    for row, length in enumerate((90, 37)):  # rows of a batch at positions of their own
        q, k, v = (torch.randn(1, length, n, 24, device=device) for n in (*heads, heads[1]))
        alone = KVCaches([pattern], 140)
        alone.layers[0].attend(q, k, v)
        alone.advance(q[:, :, 0, 0])
        caches = caches or alone.repeat(2)
        caches.load_row(row, alone)
    assert caches is not None
    cache = caches.layers[0]
    sinks = torch.randn(heads[0], device=device) if has_sinks else None
    for _ in range(2):
        q, k, v = (torch.randn(2, 1, n, 24, device=device) for n in (*heads, heads[1]))
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_has_kernel", lambda q: False)
            expected = cache.attend(q, k, v, sink_logits=sinks)
        with monkeypatch.context() as patch:  # the same token again, to the same rows
            patch.setattr(cache_module, "_has_kernel", lambda q: True)
            found = cache.attend(q, k, v, sink_logits=sinks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        caches.advance(q[:, :, 0, 0])
