"""Attention over a sequence that is walked in chunks equals the oracle, and keeps what it must."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Heads,
    Pattern,
    Shards,
    Window,
    attend,
    attend_oracle,
)
from longspan.attention.context_parallel.chunk_plan import kept_rows, open_rows, plan_chunk
from longspan.attention.context_parallel.chunks import ChunkAttention, Walk
from longspan.attention.context_parallel.sparse_kv import split_dilated
from longspan.attention.packed import Packed
from longspan.parallel.chunks import chunk_boundaries
from tests.attention.context_parallel.test_sharded import PATTERNS

CHUNKED = {name: x for name, x in PATTERNS.items() if not isinstance(x, Packed)}
EVEN, ODD = (0, 16, 32, 48, 64), (0, 5, 21, 22, 60)


def walk_in_chunks(
    qkv: tuple[Tensor, ...],
    grad: Tensor,
    pattern: Pattern,
    boundaries: tuple[int, ...],
    starts: tuple[int, ...],
    sinks: Tensor | None,
) -> list[Tensor]:
    """The output, and gradients of q, k, v and sinks."""
    walk, shards, outputs = Walk(), Shards(boundaries), dict[int, Tensor]()
    walk.begin(shards, starts)

    def attend_chunk(chunk: int, *, keeps: bool) -> Tensor:
        walk.enter(chunk, keeps=keeps)
        local = shards.local_range(chunk)
        inputs = (x[:, local.start : local.stop] for x in qkv)
        return ChunkAttention(walk, 0)(*inputs, pattern, sink_logits=sinks)

    inputs = [*qkv, *([] if sinks is None else [sinks])]
    with torch.no_grad():
        for chunk in range(shards.ranks - 1):
            outputs[chunk] = attend_chunk(chunk, keeps=True)
    sums = [torch.zeros_like(x) for x in inputs]
    for chunk in reversed(range(shards.ranks)):
        out, local = attend_chunk(chunk, keeps=False), shards.local_range(chunk)
        if chunk in outputs:
            assert torch.equal(out, outputs[chunk])
        outputs[chunk] = out.detach()
        grads = torch.autograd.grad(out, inputs, grad[:, local.start : local.stop])
        sums = [a + b for a, b in zip(sums, grads, strict=True)]
    walk.end()
    return [torch.cat([outputs[chunk] for chunk in range(shards.ranks)], dim=1), *sums]


@pytest.mark.parametrize("starts", [(), (0, 3, 30, 41)], ids=["one document", "documents"])
@pytest.mark.parametrize("boundaries", [EVEN, ODD, tuple(range(0, 15, 2))], ids=len)
@pytest.mark.parametrize("pattern", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunks_equal_the_oracle(
    pattern: Pattern, boundaries: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    """In float64: outputs and gradients, of grouped heads and learnable sinks too."""
    torch.manual_seed(0)
    tokens, batch = boundaries[-1], 1 if starts else 2
    starts = tuple(start for start in starts if start < tokens)
    q, k, v = (torch.randn(batch, tokens, heads, 4).double() for heads in (4, 2, 2))
    qkv, grad = tuple(x.requires_grad_() for x in (q, k, v)), torch.randn_like(q)
    sinks = torch.linspace(-1, 2, 4).double().requires_grad_()
    whole = Packed(pattern, starts) if starts else pattern
    expected = attend_oracle(*qkv, whole, is_causal=True, sink_logits=sinks)
    gradients = torch.autograd.grad(expected, (*qkv, sinks), grad)
    found = walk_in_chunks(qkv, grad, pattern, boundaries, starts, sinks)
    for a, b in zip(found, (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def doubling(shortest: int, tokens: int) -> Dilated:
    """Segments that double from `shortest` until one has all tokens, with as many rows each."""
    rates = [1 << i for i in range((tokens // shortest).bit_length())]
    return Dilated(tuple(shortest * r for r in rates), tuple(rates))


@pytest.mark.parametrize(
    ("tokens", "chunk", "heads", "head_dim"),
    [(8 << 20, 131072, 12, 64), (4 << 20, 32768, 16, 128)],
)
def test_all_chunks_have_kernels_for_whole_segments(
    tokens: int, chunk: int, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of branches that begin before a chunk or reach beyond it, with few rows in it."""
    call = pytest.importorskip("longspan.attention.kernels.call")
    monkeypatch.setattr(call, "has_kernels", lambda *_: True)
    pattern, cpu = doubling(2048, tokens), torch.device("cpu")
    shards, of_heads = Shards((*range(0, tokens, chunk), tokens)), Heads(heads, heads)
    patterns = [pattern]  # the first chunk is attended as if it were a sequence
    for number in (1, 2, 3, 4, 8, 16, shards.ranks // 2, shards.ranks - 1):
        plan = plan_chunk(pattern, shards, number, of_heads, cpu, cpu)
        split = split_dilated(pattern, shards.local_range(number), of_heads, plan, cpu)
        assert split is not None
        patterns.append(split.local)
    for local in patterns:
        inputs = 1, chunk, heads, 1, head_dim, torch.bfloat16, cpu, local
        kernels = call.Call(*inputs, True, False, False, 0.1).whole_segments
        assert kernels is not None
        longest = [branch.segment * branch.rate for branch in kernels.schedule.branches]
        assert max(longest) <= chunk


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_on_a_gpu_equal_the_whole(head_dim: int) -> None:
    torch.manual_seed(0)
    tokens, chunk, pattern = 32768, 4096, doubling(256, 32768)
    q, k, v, grad = (
        torch.randn(1, tokens, 3, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    qkv = tuple(x.requires_grad_() for x in (q, k, v))
    whole = attend(q, k, v, pattern)
    expected = whole.detach(), *torch.autograd.grad(whole, qkv, grad)
    boundaries = (*range(0, tokens, chunk), tokens)
    found = walk_in_chunks(qkv, grad, pattern, boundaries, (), None)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).float().norm() <= 4e-3 * b.float().norm()


@pytest.mark.parametrize("pattern", [Window(300, sinks=4), BlockSparse(64, local_window=256)])
def test_chunks_of_any_size_give_the_same_bits(pattern: Pattern) -> None:
    """Where the sums of a query do not depend on its chunk: those of a pattern without segments."""
    torch.manual_seed(0)
    qkv = tuple(torch.randn(3, 1, 1024, 1, 8))
    grad = torch.randn(1, 1024, 1, 8)
    inputs = tuple(x.requires_grad_() for x in qkv)
    found = [
        walk_in_chunks(inputs, grad, pattern, boundaries, (), None)[0]
        for boundaries in ((0, 1024), (0, 512, 1024), (0, 256, 512, 768, 1024))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_kept_rows_are_those_that_later_chunks_see(pattern: Pattern) -> None:
    """Compared with the mask, position by position."""
    shards, heads, everywhere = Shards(ODD), Heads(6, 3), torch.arange(ODD[-1])
    chunk_of = torch.searchsorted(torch.tensor(ODD), everywhere, right=True)
    kept = kept_rows(pattern, shards, heads)
    for key_head in range(3):
        counts = torch.stack(
            [pattern.counts(everywhere, everywhere, h) for h in heads.query_heads(key_head)]
        ).sum(0)
        counts *= everywhere[None, :] <= everywhere[:, None]
        later = (counts > 0) & (chunk_of[:, None] > chunk_of[None, :])
        assert kept[key_head].tolist() == everywhere[later.any(0)].tolist()
        seen_from = (counts[21:] > 0).any(0) & (everywhere < 21)
        found = open_rows(pattern, 21, shards.tokens, heads)[key_head]
        assert found.tolist() == everywhere[seen_from].tolist()


def test_the_longest_context_keeps_few_rows() -> None:
    """The plan of 134 million tokens, w/r = 2,048.

    Every other chunk ends inside a segment of 262,144 and keeps its rows of rate 128; of the rest
    every other one keeps those of rate 256, and so on: N/128 · (1/2 + 1/8 + …) per head.
    """
    lengths = tuple(2048 << i for i in range(17))
    pattern = Dilated(lengths, tuple(1 << i for i in range(17)))
    tokens, chunk = 1 << 27, 1 << 17
    shards = Shards(tuple(range(0, tokens + 1, chunk)))
    (kept,) = kept_rows(pattern, shards, Heads(1, 1))
    assert len(kept) == tokens // 128 * 2 // 3
    largest = max(len(open_rows(pattern, b, tokens, Heads(1, 1))[0]) for b in shards.boundaries[1:])
    assert largest <= 2048 * 10 // 2


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [(Window(7, sinks=5), 2 * 6 + 5), (Dense(), 32), (BlockSparse(8, local_window=16), 16)],
)
def test_only_what_is_seen_is_kept(pattern: Pattern, kept: int) -> None:
    (rows,) = kept_rows(pattern, Shards((0, 16, 32, 48)), Heads(1, 1))
    assert len(rows) == kept


def test_chunks_end_with_documents() -> None:
    assert chunk_boundaries((0,), 10, 4) == (0, 4, 8, 10)
    assert chunk_boundaries((0, 3, 5, 6), 10, 4) == (0, 3, 6, 10)
    assert chunk_boundaries((0, 2, 11), 14, 4) == (0, 2, 6, 10, 14)  # a long one is cut
    assert chunk_boundaries((0, 4, 8), 9, 4) == (0, 4, 8, 9)
    assert chunk_boundaries((0,), 4, 8) == (0, 4)
