"""A sequence in shards on several ranks: the rows that travel, and the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    MultiheadDilatedAttention,
    Pattern,
    best_shards,
    choose_way,
    ring,
)
from longspan.attention.context_parallel.kv_exchange import rows_between
from longspan.attention.context_parallel.sharded import attend_sharded
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.oracle import attend_oracle
from tests.attention.test_functional import output_and_gradients, plain_low_precision
from tests.harness import Ranks

PATTERNS: dict[str, Pattern] = {
    "longnet": Dilated((8, 32, 64), (1, 4, 8)),
    "uneven": Dilated((6, 20, 45), (1, 2, 3)),
    "long": Dilated((64,), (2,)),
    "halves": Dilated((32,), (1,)),
    "some heads": Dilated((8, 32), (1, 4), first_head=3),
    "blocks in segments": Dilated((32, 64), (1, 2), blocks=BlockSparse(4, local_window=8)),
    "dense": Dense(),
    "block sparse": BlockSparse(8, local_window=16, global_tokens=8, density=0.2),
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


def test_borders_that_do_not_rise_are_refused() -> None:
    for borders in ((0,), (1, 2), (0, 4, 4), (0, 5, 3)):
        with pytest.raises(ValueError, match="borders must rise"):
            Shards(borders)


@dataclass(frozen=True)
class Case:
    pattern: str
    borders: tuple[int, ...]
    heads: int
    key_heads: int
    way: str
    is_causal: bool = True
    masks: tuple[str, ...] = ()
    is_zigzag: bool = False
    scale: float | None = None

    @property
    def shards(self) -> Shards:
        return Shards(self.borders, self.is_zigzag)

    def options(self) -> dict[str, Any]:
        tokens, found = self.borders[-1], dict[str, Any]()
        if "documents" in self.masks:
            borders = torch.tensor([[10, 25], [tokens // 2, tokens - 3]])
            at = torch.arange(tokens)[None, None, :] >= borders[:, :, None]
            found["documents"] = at.sum(1)
        if "padding" in self.masks:
            found["key_padding_mask"] = torch.arange(2 * tokens).view(2, -1) % 5 == 2
        if "dropout" in self.masks:
            found |= {"dropout_p": 0.3, "dropout_seed": 5}
        return {"is_causal": self.is_causal, "scale": self.scale, **found}


EVEN, ODD, FULL = (0, 16, 32, 48, 64), (0, 5, 21, 40, 61), ("documents", "padding", "dropout")
CASES = [
    Case("longnet", EVEN, 4, 4, "rows"),
    Case("longnet", EVEN, 4, 2, "rows", is_causal=False),
    Case("longnet", (0, 32, 64, 96, 128), 3, 1, "rows", masks=("documents",)),
    Case("longnet", (0, 64, 128), 4, 2, "nothing"),
    Case("longnet", (0, 64, 128), 4, 2, "rows", masks=("padding",)),
    Case("longnet", (0, 64), 4, 2, "nothing", masks=FULL),
    Case("longnet", (0, 16, 32, 48, 61), 8, 2, "rows"),  # a rest of a row for some heads
    Case("longnet", EVEN, 4, 2, "rows", scale=-0.3),
    Case("halves", (0, 32, 48, 64), 2, 2, "rows"),  # the first rank has nobody to talk to
    Case("uneven", ODD, 4, 2, "rows"),
    Case("uneven", ODD, 4, 4, "rows", is_causal=False, masks=FULL),
    Case("some heads", EVEN, 4, 4, "rows"),
    Case("blocks in segments", EVEN, 2, 2, "rows"),
    Case("dense", (0, 7, 16, 30, 33), 3, 1, "ring"),
    Case("dense", (0, 7, 16, 30, 33), 2, 2, "ring", is_causal=False),
    Case("dense", (0, 7, 16, 30, 33), 8, 2, "ring"),
    Case("dense", (0, 4, 9, 12, 16, 20, 21, 30, 33), 2, 1, "ring", is_zigzag=True),
    Case("dense", (0, 4, 9, 12, 16, 20, 21, 30, 33), 4, 4, "ring", is_zigzag=True),
    Case("dense", (0, 7, 16, 30, 33), 4, 4, "heads"),
    Case("dense", tuple(range(0, 45, 5)), 8, 4, "heads", False, ("documents", "padding")),
    Case("dense", (0, 7, 16, 30, 33), 4, 4, "heads", is_causal=False, scale=-0.3),
    Case("dense", (0, 7, 16, 30, 33), 4, 2, "rows", masks=FULL),
    Case("block sparse", (0, 16, 20, 48, 64), 3, 3, "rows"),
    Case("block sparse", (0, 16, 20, 48, 64), 4, 1, "rows", is_causal=False, masks=("documents",)),
    Case("block sparse", EVEN, 8, 8, "heads", is_causal=False),
]


def inputs(tokens: int, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(2, tokens, n, 8) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v, grad


def attend_on_a_rank(rank: int, world: int, case: Case) -> list[Tensor]:
    shards = case.shards
    *qkv, grad = inputs(shards.tokens, case.heads, case.key_heads)
    qkv = [x[:, shards.positions(rank)].requires_grad_() for x in qkv]
    group = torch.distributed.group.WORLD
    out = attend_sharded(*qkv, PATTERNS[case.pattern], group=group, shards=shards, **case.options())
    return [out.detach(), *torch.autograd.grad(out, qkv, grad[:, shards.positions(rank)])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.pattern}-{case.way}")
def test_equals_the_oracle(ranks: Ranks, case: Case) -> None:
    pattern, shards = PATTERNS[case.pattern], case.shards
    *qkv, grad = inputs(shards.tokens, case.heads, case.key_heads)
    qkv = [x.requires_grad_() for x in qkv]
    options = {**case.options(), "scale": 1.0 if case.scale is None else case.scale}
    options.pop("dropout_seed", None)
    assert choose_way(qkv[0], qkv[1], pattern, shards, **options).name == case.way
    out = attend_oracle(*qkv, pattern, **case.options())
    expected = [out, *torch.autograd.grad(out, qkv, grad)]
    parts = ranks.run(attend_on_a_rank, shards.ranks, case)
    for found, right in zip(zip(*parts, strict=True), expected, strict=True):
        order = torch.cat([shards.positions(rank) for rank in range(shards.ranks)])
        torch.testing.assert_close(torch.cat(found, dim=1), right[:, order], rtol=1e-9, atol=1e-9)


GPU_CASES = {
    "dilated": (Dilated((128, 512, 1024), (1, 4, 8)), False, "rows"),
    "ring": (Dense(), True, "ring"),
    "heads": (Dense(), False, "heads"),
    "block sparse": (BlockSparse(64, local_window=128), False, "rows"),
    "block sparse by heads": (BlockSparse(64, local_window=64, density=0.6), False, "heads"),
}


def gpu_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 1024, 4, 64, device="cuda").bfloat16() for _ in range(4)]


def attend_on_a_gpu(rank: int, world: int, name: str) -> list[Tensor]:
    """All ranks on one device, joined by gloo, which carries a GPU's tensors too."""
    pattern, is_zigzag, way = GPU_CASES[name]
    shards = Shards.even(1024, world, is_zigzag=is_zigzag)
    *qkv, grad = (x[:, shards.positions(rank).cuda()] for x in gpu_inputs())
    qkv = [x.requires_grad_() for x in qkv]
    assert choose_way(qkv[0], qkv[1], pattern, shards).name == way
    out = attend_sharded(*qkv, pattern, group=torch.distributed.group.WORLD, shards=shards)
    return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, qkv, grad))]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_is_within_the_error_of_plain_code_on_a_gpu(ranks: Ranks, name: str) -> None:
    pattern, is_zigzag, _ = GPU_CASES[name]
    shards = Shards.even(1024, 4, is_zigzag=is_zigzag)
    order = torch.cat([shards.positions(rank) for rank in range(4)])
    *qkv, grad = gpu_inputs()
    qkv = [x.requires_grad_() for x in qkv]
    plain = output_and_gradients(plain_low_precision, tuple(qkv), grad, pattern, is_causal=True)
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in qkv)
    oracle = output_and_gradients(attend_oracle, exact, grad.cpu(), pattern, is_causal=True)
    parts = ranks.run(attend_on_a_gpu, 4, name)
    ours = [torch.cat(found, dim=1) for found in zip(*parts, strict=True)]
    for index, (found, usual, expected) in enumerate(zip(ours, plain, oracle, strict=True)):
        allowed = (2 if index == 0 else 3) * (usual.double().cpu() - expected).norm()
        assert (found.double() - expected[:, order]).norm() <= allowed


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
    """Counts the bytes that this rank gives to the others."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all" in func.__name__:
            rows, _, given, _ = args
            to_others = sum(given) - given[torch.distributed.get_rank()]
            self.bytes += rows.nbytes // max(1, len(rows)) * to_others
        if "ring_attention" in func.__name__:  # an operator that hides what is within
            with self:
                return ring._forward(*args)
        return func(*args, **(kwargs or {}))


def bytes_sent(
    rank: int, world: int, name: str, tokens: int, is_zigzag: bool, heads: int
) -> tuple[int, int, dict[str, int]]:
    """Forward, backward, and which collectives torch saw."""
    qkv = [torch.randn(1, tokens, heads, 8, requires_grad=True) for _ in range(3)]
    shards = Shards.even(world * tokens, world, is_zigzag=is_zigzag)
    with CommDebugMode() as collectives:
        with Sent() as forward:
            out = attend_sharded(
                *qkv, PATTERNS[name], group=torch.distributed.group.WORLD, shards=shards
            )
        with Sent() as backward:
            out.sum().backward()
    counts = {str(op): count for op, count in collectives.get_comm_counts().items()}
    return forward.bytes, backward.bytes, counts


ROW = 2 * 8 * 4  # a key and a value of eight float32


@pytest.mark.parametrize("name", ["longnet", "long", "block sparse"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_as_many_bytes_are_sent_as_the_pattern_needs(ranks: Ranks, name: str, world: int) -> None:
    tokens, heads = 16, Heads(4, 4)
    shards = Shards.even(world * tokens, world)
    found = ranks.run(bytes_sent, world, name, tokens, False, 4)
    for source in range(world):
        sent = [
            rows_between(PATTERNS[name], shards, source, destination, heads, True)
            for destination in range(world)
        ]
        assert found[source][0] == ROW * sum(len(rows) for to in sent for rows in to)
        assert list(found[source][2].values()) == [2]  # one there, one back
    assert sum(b for _, b, _ in found) == sum(f for f, _, _ in found)  # each gradient goes back


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_a_ring_sends_the_keys_that_are_seen(ranks: Ranks, is_zigzag: bool) -> None:
    """Counted position by position: a key goes to each rank that has a later query."""
    world, tokens = 4, 16
    shards = Shards.even(world * tokens, world, is_zigzag=is_zigzag)
    found = ranks.run(bytes_sent, world, "dense", tokens, is_zigzag, 3)
    for source, (forward, _, _) in enumerate(found):
        seen = [
            int((shards.positions(source) < shards.positions(reader).max()).sum())
            for reader in range(world)
            if reader != source
        ]
        assert forward == 3 * ROW * sum(seen)
    total = sum(f for f, _, _ in found)
    assert sum(b for _, b, _ in found) == 2 * total  # keys once more, and their gradients


def test_a_branch_inside_the_shards_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(bytes_sent, 2, "longnet", 64, False, 4) == [(0, 0, {})] * 2


def test_pairs_of_pieces_see_as_much_on_every_rank() -> None:
    shards = Shards.even(64, 4, is_zigzag=True)
    work = [int((shards.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
    assert sorted(torch.cat([shards.positions(rank) for rank in range(4)]).tolist()) == [*range(64)]


def test_the_cut_follows_the_bytes() -> None:
    """Few key heads: the ring moves less than an exchange for heads, and is cut in pairs."""
    assert best_shards(Dense(), 64, 4, Heads(8, 1)).is_zigzag
    assert not best_shards(Dense(), 64, 4, Heads(8, 8)).is_zigzag
    assert not best_shards(Dense(), 63, 4, Heads(8, 1)).is_zigzag
    assert not best_shards(PATTERNS["longnet"], 64, 4, Heads(8, 1)).is_zigzag


def only_queries_learn(rank: int, world: int) -> Tensor:
    """Ranks of which one can take kernels and the others cannot."""
    shards = Shards((0, 16, 40, 64))
    q, k, v = (x[:, shards.positions(rank)] for x in inputs(64, 2, 2)[:3])
    group = torch.distributed.group.WORLD
    out = attend_sharded(
        q.requires_grad_(), k, v, Dilated((16, 32), (1, 2)), group=group, shards=shards
    )
    out.sum().backward()
    assert q.grad is not None
    return q.grad


def test_keys_need_no_gradient(ranks: Ranks) -> None:
    q, k, v, _ = inputs(64, 2, 2)
    attend_oracle(q.requires_grad_(), k, v, Dilated((16, 32), (1, 2))).sum().backward()
    found = torch.cat(ranks.run(only_queries_learn, 3, timeout=60), dim=1)
    torch.testing.assert_close(found, q.grad, rtol=1e-9, atol=1e-9)


def first_without_training(rank: int, world: int) -> None:
    qkv = [torch.randn(1, 16, 3, 8) for _ in range(3)]
    group = torch.distributed.group.WORLD
    for pattern in PATTERNS.values():
        with torch.inference_mode():
            attend_sharded(*qkv, pattern, group=group)
        attend_sharded(*(x.requires_grad_() for x in qkv), pattern, group=group).sum().backward()


def test_what_was_planned_without_gradients_serves_with_them(ranks: Ranks) -> None:
    ranks.run(first_without_training, 2)


def refused_on_a_rank(rank: int, world: int) -> list[str]:
    q, k = torch.zeros(1, 16, 4, 8), torch.zeros(1, 16, 3, 8)
    documents = torch.zeros(1, 16, dtype=torch.int64)
    said = []
    for keys, options in (
        (k, {}),
        (q[:, :8], {}),
        (q, {"documents": documents}),
        (q, {"shards": Shards.even(40, 2)}),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            attend_sharded(q, keys, keys, Dense(), group=torch.distributed.group.WORLD, **options)
        said.append(str(caught.value))
    return said


def test_what_does_not_fit_is_told(ranks: Ranks) -> None:
    assert ranks.run(refused_on_a_rank, 2)[0] == [
        "the number of key heads must divide the 4 query heads, got 3",
        "expected 2 ranks and, on rank 0, 16 tokens of q and k, got 2 ranks, 16 and 8 tokens",
        "documents must be (batch, keys) = (1, 32), got (1, 16)",
        "expected 2 ranks and, on rank 0, 20 tokens of q and k, got 2 ranks, 16 and 16 tokens",
    ]


def test_pairs_are_refused_where_they_have_no_use() -> None:
    q, shards = torch.zeros(1, 16, 4, 8), Shards.even(64, 4, is_zigzag=True)
    with pytest.raises(ValueError, match="paired shards are for causal dense attention"):
        choose_way(q, q, PATTERNS["longnet"], shards)
