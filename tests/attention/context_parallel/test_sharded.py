"""Attention over a sharded sequence equals the oracle and communicates only what is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Pattern,
    Window,
    choose_shards,
    choose_strategy,
)
from longspan.attention.context_parallel import ring
from longspan.attention.context_parallel.kv_exchange import rows_to_send
from longspan.attention.context_parallel.sharded import attend_sharded
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.modules import MultiheadDilatedAttention
from longspan.attention.oracle import attend_oracle
from longspan.attention.packed import Packed
from longspan.torch_internals import TorchDispatchMode
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
    "window": Window(7, sinks=5),
    "dilated window": Window(4, sinks=2, dilation=3),
    "packed": Packed(Dilated((8, 32), (1, 4)), (0, 3, 30, 41)),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shards", [Shards.even(64, 4), Shards((0, 5, 21, 22, 60)), Shards((0, 9))])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_rows_sent_are_the_rows_seen(pattern: Pattern, shards: Shards, is_causal: bool) -> None:
    """Compared with the mask, position by position: no row is missing and none is extra."""
    heads, everywhere = Heads(6, 3), torch.arange(shards.tokens)
    for destination in range(shards.ranks):
        queries = torch.tensor(shards.local_range(destination))
        for key_head in range(3):
            seen = torch.zeros(shards.tokens, dtype=torch.bool)
            for head in heads.query_heads(key_head):
                counts = pattern.counts(queries, everywhere, head)
                if is_causal:
                    counts = counts * (everywhere[None, :] <= queries[:, None])
                seen |= counts.any(0)
            seen[queries] = False
            delivered = [
                rows_to_send(pattern, shards, source, destination, heads, is_causal)[key_head]
                for source in range(shards.ranks)
            ]
            for source, rows in enumerate(delivered):
                assert set(rows.tolist()) <= set(shards.local_range(source))
            assert torch.cat(delivered).tolist() == everywhere[seen].tolist()


def test_boundaries_that_do_not_increase_are_errors() -> None:
    for boundaries in ((0,), (1, 2), (0, 4, 4), (0, 5, 3)):
        with pytest.raises(ValueError, match="boundaries must increase"):
            Shards(boundaries)


@dataclass(frozen=True)
class Case:
    pattern: str
    boundaries: tuple[int, ...]
    heads: int
    key_heads: int
    strategy: str
    is_causal: bool = True
    masks: tuple[str, ...] = ()
    is_zigzag: bool = False
    scale: float | None = None

    @property
    def shards(self) -> Shards:
        return Shards(self.boundaries, self.is_zigzag)

    def options(self) -> dict[str, Any]:
        tokens, found = self.boundaries[-1], dict[str, Any]()
        if "documents" in self.masks:
            borders = torch.tensor([[10, 25], [tokens // 2, tokens - 3]])
            at = torch.arange(tokens)[None, None, :] >= borders[:, :, None]
            found["documents"] = at.sum(1)
        if "padding" in self.masks:
            found["key_padding_mask"] = torch.arange(2 * tokens).view(2, -1) % 5 == 2
        if "dropout" in self.masks:
            found |= {"dropout_p": 0.3, "dropout_seed": 5}
        if "sinks" in self.masks:
            found["sink_logits"] = torch.linspace(-1, 2, self.heads).double().requires_grad_()
        return {"is_causal": self.is_causal, "scale": self.scale, **found}


EVEN, ODD, FULL = (0, 16, 32, 48, 64), (0, 5, 21, 40, 61), ("documents", "padding", "dropout")
CASES = [
    Case("longnet", EVEN, 4, 4, "sparse_kv"),
    Case("longnet", EVEN, 4, 2, "sparse_kv", is_causal=False),
    Case("longnet", (0, 32, 64, 96, 128), 3, 1, "sparse_kv", masks=("documents",)),
    Case("longnet", (0, 64, 128), 4, 2, "local"),
    Case("longnet", (0, 64, 128), 4, 2, "sparse_kv", masks=("padding",)),
    Case("longnet", (0, 64), 4, 2, "local", masks=FULL),
    Case("longnet", (0, 16, 32, 48, 61), 8, 2, "sparse_kv"),  # some heads have one row more
    Case("longnet", EVEN, 4, 2, "sparse_kv", scale=-0.3),
    Case("halves", (0, 32, 48, 64), 2, 2, "sparse_kv"),  # the first rank communicates with no other
    Case("uneven", ODD, 4, 2, "sparse_kv"),
    Case("uneven", ODD, 4, 4, "sparse_kv", is_causal=False, masks=FULL),
    Case("some heads", EVEN, 4, 4, "sparse_kv"),
    Case("blocks in segments", EVEN, 2, 2, "sparse_kv"),
    Case("dense", (0, 7, 16, 30, 33), 3, 1, "ring"),
    Case("dense", (0, 7, 16, 30, 33), 2, 2, "ring", is_causal=False),
    Case("dense", (0, 7, 16, 30, 33), 8, 2, "ring"),
    Case("dense", (0, 4, 9, 12, 16, 20, 21, 30, 33), 2, 1, "ring", is_zigzag=True),
    Case("dense", (0, 4, 9, 12, 16, 20, 21, 30, 33), 4, 4, "ring", is_zigzag=True),
    Case("dense", (0, 7, 16, 30, 33), 4, 4, "ulysses"),
    Case("dense", tuple(range(0, 45, 5)), 8, 4, "ulysses", False, ("documents", "padding")),
    Case("dense", (0, 7, 16, 30, 33), 4, 4, "ulysses", is_causal=False, scale=-0.3),
    Case("dense", (0, 7, 16, 30, 33), 4, 2, "sparse_kv", masks=FULL),
    Case("block sparse", (0, 16, 20, 48, 64), 3, 3, "sparse_kv"),
    Case(
        "block sparse",
        (0, 16, 20, 48, 64),
        3,
        1,
        "sparse_kv",
        is_causal=False,
        masks=("documents",),
    ),
    Case("block sparse", (0, 16, 20, 48, 64), 4, 1, "ulysses", masks=("documents",)),
    Case("longnet", EVEN, 8, 2, "ulysses", masks=("documents",)),
    Case("some heads", EVEN, 4, 4, "ulysses", is_causal=False, masks=("documents", "padding")),
    Case("block sparse", EVEN, 8, 8, "ulysses", is_causal=False),
    Case("window", EVEN, 4, 2, "sparse_kv", masks=("sinks",)),
    Case("longnet", EVEN, 8, 2, "sparse_kv", masks=("sinks",)),
    Case("longnet", (0, 64, 128), 4, 2, "local", masks=("sinks",)),
    Case("longnet", EVEN, 8, 2, "ulysses", masks=("documents", "sinks")),
    Case("dense", (0, 7, 16, 30, 33), 8, 2, "ring", masks=("sinks",)),
    Case("dilated window", ODD, 3, 1, "sparse_kv", is_causal=False, masks=("documents",)),
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
    options = case.options()
    inputs_of = [*qkv, *([options["sink_logits"]] if "sinks" in case.masks else [])]
    out = attend_sharded(*qkv, PATTERNS[case.pattern], group=group, shards=shards, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs_of, grad[:, shards.positions(rank)])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.pattern}-{case.strategy}")
def test_equals_the_oracle(ranks: Ranks, case: Case) -> None:
    pattern, shards = PATTERNS[case.pattern], case.shards
    *qkv, grad = inputs(shards.tokens, case.heads, case.key_heads)
    qkv = [x.requires_grad_() for x in qkv]
    options = {**case.options(), "scale": 1.0 if case.scale is None else case.scale}
    sinks = options.pop("sink_logits", None)
    options.pop("dropout_seed", None)
    assert choose_strategy(qkv[0], qkv[1], pattern, shards, **options).name == case.strategy
    out = attend_oracle(*qkv, pattern, **{**case.options(), "sink_logits": sinks})
    expected = [out, *torch.autograd.grad(out, [*qkv, *([] if sinks is None else [sinks])], grad)]
    outputs = ranks.run(attend_on_a_rank, shards.ranks, case)
    if sinks is not None:  # of which each rank has a share
        shares = torch.stack([output.pop() for output in outputs])
        torch.testing.assert_close(shares.sum(0), expected.pop(), rtol=1e-9, atol=1e-9)
    for found, right in zip(zip(*outputs, strict=True), expected, strict=True):
        order = torch.cat([shards.positions(rank) for rank in range(shards.ranks)])
        torch.testing.assert_close(torch.cat(found, dim=1), right[:, order], rtol=1e-9, atol=1e-9)


GPU_CASES = {
    "dilated": (Dilated((128, 512, 1024), (1, 4, 8)), False, "sparse_kv"),
    "ring": (Dense(), True, "ring"),
    "ulysses": (Dense(), False, "ulysses"),
    "block sparse": (BlockSparse(64, local_window=128), False, "sparse_kv"),
    "block sparse ulysses": (BlockSparse(64, local_window=64, density=0.6), False, "ulysses"),
}


def gpu_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 1024, 4, 64, device="cuda").bfloat16() for _ in range(4)]


def attend_on_a_gpu(rank: int, world: int, name: str) -> list[Tensor]:
    """All ranks on one device; gloo also transfers CUDA tensors."""
    pattern, is_zigzag, strategy = GPU_CASES[name]
    shards = Shards.even(1024, world, is_zigzag=is_zigzag)
    *qkv, grad = (x[:, shards.positions(rank).cuda()] for x in gpu_inputs())
    qkv = [x.requires_grad_() for x in qkv]
    assert choose_strategy(qkv[0], qkv[1], pattern, shards).name == strategy
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
    outputs = ranks.run(attend_on_a_gpu, 4, name)
    ours = [torch.cat(found, dim=1) for found in zip(*outputs, strict=True)]
    for index, (found, usual, expected) in enumerate(zip(ours, plain, oracle, strict=True)):
        allowed = (2 if index == 0 else 3) * (usual.double().cpu() - expected).norm()
        assert (found.double() - expected[:, order]).norm() <= allowed


def module_on_a_rank(rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
    x = inputs(64, 4, 4)[0].flatten(2)
    module = multihead(torch.distributed.group.WORLD)
    local = x.chunk(world, dim=1)[rank]
    out = module(local, local, local, is_causal=True)[0]
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


def test_the_module_equals_one_process(ranks: Ranks) -> None:
    x, module = inputs(64, 4, 4)[0].flatten(2), multihead(None)
    out = module(x, x, x, is_causal=True)[0]
    out.square().sum().backward()
    found = ranks.run(module_on_a_rank, 4)
    torch.testing.assert_close(torch.cat([part for part, _ in found], dim=1), out)
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[0][1][name], p.grad)


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to others."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all" in func.__name__:
            rows, _, send_counts, _ = args
            to_others = sum(send_counts) - send_counts[torch.distributed.get_rank()]
            self.bytes += rows.nbytes // max(1, len(rows)) * to_others
        if "ring_attention" in func.__name__:  # a custom operator, which hides its all-to-alls
            with self:
                return ring.forward_rounds(*args)
        return func(*args, **(kwargs or {}))


def bytes_sent(
    rank: int, world: int, name: str, tokens: int, is_zigzag: bool, heads: int
) -> tuple[int, int, dict[str, int]]:
    """Forward and backward bytes, and the collectives that torch counted."""
    qkv = [torch.randn(1, tokens, heads, 8, requires_grad=True) for _ in range(3)]
    shards = Shards.even(world * tokens, world, is_zigzag=is_zigzag)
    with CommDebugMode() as collectives:
        with SentBytes() as forward:
            out = attend_sharded(
                *qkv, PATTERNS[name], group=torch.distributed.group.WORLD, shards=shards
            )
        with SentBytes() as backward:
            out.sum().backward()
    counts = {str(op): count for op, count in collectives.get_comm_counts().items()}
    return forward.bytes, backward.bytes, counts


ROW = 2 * 8 * 4  # a key and a value of 8 float32 elements


@pytest.mark.parametrize("name", ["longnet", "long", "block sparse"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_sent_are_those_the_pattern_needs(ranks: Ranks, name: str, world: int) -> None:
    tokens, heads = 16, Heads(4, 4)
    shards = Shards.even(world * tokens, world)
    found = ranks.run(bytes_sent, world, name, tokens, False, 4)
    for source in range(world):
        sent = [
            rows_to_send(PATTERNS[name], shards, source, destination, heads, True)
            for destination in range(world)
        ]
        assert found[source][0] == ROW * sum(len(rows) for to in sent for rows in to)
        assert list(found[source][2].values()) == [2]  # one all-to-all forward, one backward
    assert sum(b for _, b, _ in found) == sum(f for f, _, _ in found)  # each gradient is returned


@pytest.mark.parametrize("is_zigzag", [False, True])
def test_a_ring_sends_the_keys_that_are_seen(ranks: Ranks, is_zigzag: bool) -> None:
    """Counted position by position: a key is sent to each rank that has a later query."""
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
    assert sum(b for _, b, _ in found) == 2 * total  # the keys again, and their gradients


def test_segments_inside_shards_send_nothing(ranks: Ranks) -> None:
    assert ranks.run(bytes_sent, 2, "longnet", 64, False, 4) == [(0, 0, {})] * 2


def test_zigzag_shards_have_equal_work() -> None:
    shards = Shards.even(64, 4, is_zigzag=True)
    work = [int((shards.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
    assert sorted(torch.cat([shards.positions(rank) for rank in range(4)]).tolist()) == [*range(64)]


def test_shards_are_chosen_by_received_bytes() -> None:
    """With few key heads a ring receives less than Ulysses, and its shards are zigzag."""
    assert choose_shards(Dense(), 64, 4, Heads(8, 1)).is_zigzag
    assert not choose_shards(Dense(), 64, 4, Heads(8, 8)).is_zigzag
    assert not choose_shards(Dense(), 63, 4, Heads(8, 1)).is_zigzag
    assert not choose_shards(PATTERNS["longnet"], 64, 4, Heads(8, 1)).is_zigzag


def gradient_of_queries_only(rank: int, world: int) -> Tensor:
    """On some of these ranks the shards are aligned for kernels, on others they are not."""
    shards = Shards((0, 16, 40, 64))
    q, k, v = (x[:, shards.positions(rank)] for x in inputs(64, 2, 2)[:3])
    group = torch.distributed.group.WORLD
    out = attend_sharded(
        q.requires_grad_(), k, v, Dilated((16, 32), (1, 2)), group=group, shards=shards
    )
    out.sum().backward()
    assert q.grad is not None
    return q.grad


def test_keys_without_gradients(ranks: Ranks) -> None:
    q, k, v, _ = inputs(64, 2, 2)
    attend_oracle(q.requires_grad_(), k, v, Dilated((16, 32), (1, 2))).sum().backward()
    found = torch.cat(ranks.run(gradient_of_queries_only, 3, timeout=60), dim=1)
    torch.testing.assert_close(found, q.grad, rtol=1e-9, atol=1e-9)


def inference_before_training(rank: int, world: int) -> None:
    qkv = [torch.randn(1, 16, 3, 8) for _ in range(3)]
    group = torch.distributed.group.WORLD
    for pattern in PATTERNS.values():
        with torch.inference_mode():
            attend_sharded(*qkv, pattern, group=group)
        attend_sharded(*(x.requires_grad_() for x in qkv), pattern, group=group).sum().backward()


def test_an_exchange_planned_in_inference_mode_works_in_training(ranks: Ranks) -> None:
    ranks.run(inference_before_training, 2)


def errors_on_a_rank(rank: int, world: int) -> list[str]:
    q, k = torch.zeros(1, 16, 4, 8), torch.zeros(1, 16, 3, 8)
    documents = torch.zeros(1, 16, dtype=torch.int64)
    messages = []
    for keys, options in (
        (k, {}),
        (q[:, :8], {}),
        (q, {"documents": documents}),
        (q, {"shards": Shards.even(40, 2)}),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            attend_sharded(q, keys, keys, Dense(), group=torch.distributed.group.WORLD, **options)
        messages.append(str(caught.value))
    return messages


def test_wrong_inputs_are_errors(ranks: Ranks) -> None:
    assert ranks.run(errors_on_a_rank, 2)[0] == [
        "the number of key heads must divide the 4 query heads, got 3",
        "expected 2 ranks and, on rank 0, 16 tokens of q and k, got 2 ranks, 16 and 8 tokens",
        "documents must be (batch, keys) = (1, 32), got (1, 16)",
        "expected 2 ranks and, on rank 0, 20 tokens of q and k, got 2 ranks, 16 and 16 tokens",
    ]


def test_zigzag_shards_need_causal_dense_attention() -> None:
    q, shards = torch.zeros(1, 16, 4, 8), Shards.even(64, 4, is_zigzag=True)
    with pytest.raises(ValueError, match="zigzag shards need causal dense attention"):
        choose_strategy(q, q, PATTERNS["longnet"], shards)
