"""The kernels for whole segments, in an interpreter on a CPU, equal the float64 oracle.

There they take float32. On a GPU `test_branch` compares them with Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from longspan.attention import Dense, Dilated, Pattern, attend, attend_oracle, custom_op
from tests.attention.context_parallel.test_chunks import doubling, walk_in_chunks

dispatch = pytest.importorskip("longspan.attention.kernels.dispatch")
call = pytest.importorskip("longspan.attention.kernels.call")
whole_segments = pytest.importorskip("longspan.attention.kernels.whole_segments")
pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels"),
]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tests.attention.kernels.gluon_interpreter import interpreted

    new_partial = whole_segments.WholeSegments._new_partial
    nans = lambda self, q: new_partial(self, q).fill_(torch.nan)  # noqa: E731  what is not written
    monkeypatch.setattr(whole_segments.WholeSegments, "_new_partial", nans)
    monkeypatch.setattr(call, "has_kernels", lambda *_: True)
    monkeypatch.setattr(dispatch, "_calls", dispatch.Call)
    monkeypatch.setattr(custom_op, "_backend", lambda _: "triton")
    with interpreted():
        yield


@pytest.mark.parametrize(
    ("pattern", "tokens", "batch", "heads", "kv_heads", "head_dim"),
    [
        (Dense(), 384, 1, 2, 1, 64),
        (Dilated((256, 512, 1024), (1, 2, 4), first_head=3), 1024, 2, 2, 2, 64),
        (Dilated((256, 512), (1, 2)), 1024, 1, 2, 1, 128),
        (Dilated((512, 1024), (2, 4)), 1024, 1, 3, 3, 64),  # rows that no branch keeps
        (doubling(256, 16384), 4096, 1, 1, 1, 64),  # two chains, segments beyond the sequence
        (doubling(256, 2048), 2048, 1, 1, 1, 128),
        # A rate beyond a tile, of which the kernel of the rate before counts a row.
        (Dilated((256, 4096, 4096), (1, 32, 4096), first_head=90), 4096, 1, 1, 1, 64),
        (Dilated((256, 256, 512), (1, 1, 2)), 512, 1, 1, 1, 64),
    ],
)
def test_equals_the_oracle(
    pattern: Pattern, tokens: int, batch: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    q, do, k, v = (
        # Samples are no whole number of rows of a rate apart.
        torch.randn(batch, tokens + 1, count, head_dim)[:, 1:]
        for count in (heads, heads, kv_heads, kv_heads)
    )
    assert dispatch._call_of(q, k, None, pattern, True, 0.2).whole_segments is not None
    out, lse = dispatch.forward(q, k, v, None, pattern, True, 0.2)
    found = out, *dispatch.backward(do, q, k, v, out, lse, None, pattern, True, 0.2)
    exact = tuple(x.double().requires_grad_() for x in (q, k, v))
    expected = attend_oracle(*exact, pattern, is_causal=True, scale=0.2)
    gradients = torch.autograd.grad(expected, exact, do.double())
    for a, b in zip(found, (expected, *gradients), strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_chunks_equal_the_whole() -> None:
    """Of a walk in chunks: each has its own rows by these kernels, and merges those before it."""
    torch.manual_seed(0)
    tokens, chunk, pattern = 8192, 4096, doubling(256, 16384)
    q, k, v, grad = (torch.randn(1, tokens, 1, 64) for _ in range(4))
    qkv = tuple(x.requires_grad_() for x in (q, k, v))
    whole = attend(q, k, v, pattern, backend="strided")
    expected = whole.detach(), *torch.autograd.grad(whole, qkv, grad)
    found = walk_in_chunks(qkv, grad, pattern, (*range(0, tokens, chunk), tokens), (), None)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
