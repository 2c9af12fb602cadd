"""A sequence in shards on several ranks: the rows that travel, and the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    MultiheadDilatedAttention,
    Pattern,
)
from longspan.attention.exchange import Heads, Shards, outer_rows, rows_between
from longspan.attention.oracle import attend_oracle
from longspan.attention.sharded import attend_sharded
from tests.harness import Ranks

PATTERNS: dict[str, Pattern] = {
    "longnet": Dilated((8, 32, 64), (1, 4, 8)),
    "uneven": Dilated((6, 20, 45), (1, 2, 3)),
    "long": Dilated((64,), (2,)),
    "halves": Dilated((32,), (1,)),
    "some heads": Dilated((8, 32), (1, 4), first_head=3),
    "blocks in segments": Dilated((32, 64), (1, 2), blocks=BlockSparse(4, local_window=8)),
    "dense": Dense(),
    "block sparse": BlockSparse(8, local_window=16, global_tokens=8, sparsity=0.2),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shards", [Shards.even(64, 4), Shards((0, 5, 21, 22, 60)), Shards((0, 9))])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_what_travels_is_what_is_seen(pattern: Pattern, shards: Shards, is_causal: bool) -> None:
    """Against the mask itself, position by position: nothing is missing and nothing is needless."""
    heads, everywhere = Heads(6, 3), torch.arange(shards.tokens)
    for destination in range(shards.ranks):
        queries = torch.tensor(shards.of(destination))
        for key_head in range(3):
            seen = torch.zeros(shards.tokens, dtype=torch.bool)
            for head in heads.readers(key_head):
                counts = pattern.counts(queries, everywhere, head)
                if is_causal:
                    counts = counts * (everywhere[None, :] <= queries[:, None])
                seen |= counts.any(0)
            seen[queries] = False
            delivered = [
                rows_between(pattern, shards, source, destination, heads, is_causal)[key_head]
                for source in range(shards.ranks)
            ]
            for source, rows in enumerate(delivered):
                assert set(rows.tolist()) <= set(shards.of(source))
            assert torch.cat(delivered).tolist() == everywhere[seen].tolist()


def test_a_billion_tokens_on_a_thousand_ranks() -> None:
    """Each rank fetches some thousand rows of its million, and only from ranks before it."""
    tokens, ranks = 1 << 30, 1024
    pattern = Dilated(tuple(2048 << 2 * i for i in range(10)), tuple(1 << 2 * i for i in range(10)))
    shards, heads = Shards.even(tokens, ranks), Heads(12, 12)
    most = 0
    for rank in range(ranks):
        for rows in outer_rows(pattern, shards, rank, heads, True):
            most = max(most, len(rows))
            assert len(rows) == 0 or rows[-1] < shards.of(rank).start
    crossing = sum(w > tokens // ranks for w in pattern.segment_lengths)
    assert 0 < most <= crossing * 2048


def test_borders_that_do_not_rise_are_refused() -> None:
    for borders in ((0,), (1, 2), (0, 4, 4), (0, 5, 3)):
        with pytest.raises(ValueError, match="borders must rise"):
            Shards(borders)


CASES = [
    ("longnet", (0, 16, 32, 48, 64), 4, 4, True, False),
    ("longnet", (0, 16, 32, 48, 64), 4, 2, False, False),
    ("longnet", (0, 32, 64, 96, 128), 3, 1, True, True),
    ("halves", (0, 32, 48, 64), 2, 2, True, False),  # the first rank has nobody to talk to
    ("uneven", (0, 5, 21, 40, 61), 4, 2, True, False),
    ("uneven", (0, 5, 21, 40, 61), 4, 4, False, True),
    ("some heads", (0, 16, 32, 48, 64), 4, 4, True, False),
    ("blocks in segments", (0, 16, 32, 48, 64), 2, 2, True, False),
    ("dense", (0, 7, 16, 30, 33), 4, 2, True, True),
    ("dense", (0, 7, 16, 30, 33), 2, 2, False, False),
    ("block sparse", (0, 16, 20, 48, 64), 4, 4, True, False),
    ("block sparse", (0, 16, 20, 48, 64), 4, 1, False, True),
]


def inputs(tokens: int, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(2, tokens, n, 8) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v, grad


def documents_of(tokens: int) -> Tensor:
    borders = torch.tensor([[10, 25], [tokens // 2, tokens - 3]])
    return (torch.arange(tokens)[None, None, :] >= borders[:, :, None]).sum(1)


def attend_on_a_rank(rank: int, world: int, case: int, dtype: torch.dtype) -> list[Tensor]:
    name, borders, heads, key_heads, is_causal, has_documents = CASES[case]
    shards = Shards(borders)
    own = slice(shards.of(rank).start, shards.of(rank).stop)
    *qkv, grad = (x[:, own].to(dtype) for x in inputs(shards.tokens, heads, key_heads))
    qkv = [x.requires_grad_() for x in qkv]
    out = attend_sharded(
        *qkv,
        PATTERNS[name],
        group=torch.distributed.group.WORLD,
        shards=shards,
        is_causal=is_causal,
        documents=documents_of(shards.tokens) if has_documents else None,
    )
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0] for case in CASES])
def test_equals_the_oracle(ranks: Ranks, case: int) -> None:
    name, borders, heads, key_heads, is_causal, has_documents = CASES[case]
    *qkv, grad = inputs(borders[-1], heads, key_heads)
    qkv = [x.requires_grad_() for x in qkv]
    documents = documents_of(borders[-1]) if has_documents else None
    out = attend_oracle(*qkv, PATTERNS[name], is_causal=is_causal, documents=documents)
    expected = [out, *torch.autograd.grad(out, qkv, grad)]
    parts = ranks.run(attend_on_a_rank, len(borders) - 1, case, torch.float64)
    for found, right in zip(zip(*parts, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), right, rtol=1e-9, atol=1e-9)


def module_on_a_rank(rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
    x = inputs(64, 4, 4)[0].flatten(2)
    module = multihead(torch.distributed.group.WORLD)
    own = x.chunk(world, dim=1)[rank]
    out = module(own, own, own, is_causal=True)[0]
    out.square().sum().backward()
    gradients = {}
    for name, p in module.named_parameters():
        assert p.grad is not None
        torch.distributed.all_reduce(p.grad)
        gradients[name] = p.grad
    return out.detach(), gradients


def multihead(group: torch.distributed.ProcessGroup | None) -> MultiheadDilatedAttention:
    torch.manual_seed(1)
    return MultiheadDilatedAttention(
        32, 4, [8, 32, 64], [1, 4, 8], sequence_parallel=group, dtype=torch.float64
    )


def test_the_module_gives_what_it_gives_in_one_process(ranks: Ranks) -> None:
    x, module = inputs(64, 4, 4)[0].flatten(2), multihead(None)
    out = module(x, x, x, is_causal=True)[0]
    out.square().sum().backward()
    found = ranks.run(module_on_a_rank, 4)
    torch.testing.assert_close(torch.cat([part for part, _ in found], dim=1), out)
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[0][1][name], p.grad)


class Sent(TorchDispatchMode):
    """Counts the bytes that all-to-all takes from this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall" in func.__name__:
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


def bytes_sent(rank: int, world: int, name: str, tokens: int) -> tuple[int, int]:
    """Forward, and backward."""
    qkv = [torch.randn(1, tokens, 4, 8, requires_grad=True) for _ in range(3)]
    with Sent() as forward:
        out = attend_sharded(*qkv, PATTERNS[name], group=torch.distributed.group.WORLD)
    with Sent() as backward:
        out.sum().backward()
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("name", ["longnet", "long", "block sparse"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_as_many_bytes_are_sent_as_the_pattern_needs(ranks: Ranks, name: str, world: int) -> None:
    tokens, heads = 16, Heads(4, 4)
    shards = Shards.even(world * tokens, world)
    found = ranks.run(bytes_sent, world, name, tokens)
    row = 2 * 8 * 4  # a key and a value of eight float32
    for source in range(world):
        sent = [
            rows_between(PATTERNS[name], shards, source, destination, heads, True)
            for destination in range(world)
        ]
        assert found[source][0] == row * sum(len(rows) for to in sent for rows in to)
    assert sum(b for _, b in found) == sum(f for f, _ in found)  # each gradient goes back


def test_a_branch_inside_the_shards_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(bytes_sent, 2, "longnet", 64) == [(0, 0)] * 2
