"""The kernels of sliding windows equal the float64 oracle: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from longspan.attention import Mask, Window, attend_oracle, choose_backend
from longspan.attention.context_parallel.kv_exchange import remote_rows
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.kernels.spans import Span, shard_spans
from longspan.attention.packed import Packed, document_starts
from tests.attention.kernels.test_branch import DEVICES, assert_equals_oracle
from tests.attention.test_functional import output_and_gradients, random_qkv

window = pytest.importorskip("longspan.attention.kernels.window")

CASES = [
    # pattern, tokens, is_causal, has_documents, has_padding
    (Window(40, sinks=36), 130, True, False, False),  # loops without masks, two tiles of sinks
    (Window(9, sinks=4), 35, False, True, True),
    (Window(5, sinks=7, dilation=2), 40, True, False, True),
    (Window(40, sinks=2), 34, True, True, False),  # wider than some documents
]
GPU_CASES = [
    (Window(40), 100, True, False, False),
    (Window(10, sinks=7, dilation=3), 80, True, True, True),
    (Window(4, sinks=5, dilation=2), 33, False, True, False),
    (Window(1, sinks=1), 34, True, True, False),
]
"""More combinations, which the interpreter would be slow to run."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("pattern", "tokens", "is_causal", "has_documents", "has_padding"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.gpu) for case in GPU_CASES)],
)
def test_equals_the_oracle(
    device: str, pattern: Window, tokens: int, is_causal: bool, has_documents: bool,
    has_padding: bool,
) -> None:  # fmt: skip
    batch, options = 2 if has_padding else 1, dict[str, torch.Tensor]()
    if has_documents:
        options["documents"] = torch.stack([torch.arange(tokens) // n for n in (13, 29)[:batch]])
    if has_padding:
        options["key_padding_mask"] = (torch.rand(batch, tokens) < 0.2).to(device)
    qkv = random_qkv(batch, tokens, 2, 1, 16, device=device)
    assert_equals_oracle(qkv, pattern, 2e-6, is_causal=is_causal, scale=0.3, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "pattern", [Window(300, sinks=70), Window(100, sinks=9, dilation=3)], ids=["window", "dilated"]
)
def test_tiles_of_16_bit_inputs(dims: int, pattern: Window) -> None:
    qkv = random_qkv(1, 1411, 4, 2, dims, device="cuda", dtype=torch.bfloat16)
    documents = (torch.arange(1411) // 900)[None]
    assert choose_backend(*qkv[:2], Mask(pattern, documents=documents)).name == "triton"
    assert_equals_oracle(qkv, pattern, 4e-3, documents=documents)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_the_queries_that_see_sinks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MIN_CHUNK", 8)
    monkeypatch.setattr(window, "_sinks", window._sinks.__wrapped__)  # not the cached one
    monkeypatch.setattr(window, "_sink_table", window._sink_table.__wrapped__)
    monkeypatch.setattr(window, "_key_table", window._key_table.__wrapped__)
    pattern = Window(5, sinks=3)
    spans = (Span(0, 0, 0, 0, 0, 40),)
    assert len(window._sinks(spans, pattern, 32, True).items) == 5  # of the 35 later queries
    qkv = random_qkv(1, 40, 2, 1, 16, device=device)
    assert_equals_oracle(qkv, pattern, 2e-6)


SHARDED = [
    (Window(6, sinks=2), [0, 9, 21], 2),
    (Window(20, sinks=3), [0, 15], 3),  # windows reach the beginning of a document
    (Window(5, sinks=3, dilation=2), [0, 7], 2),
]


@pytest.mark.parametrize(("pattern", "starts", "ranks"), SHARDED)
def test_shards_with_their_remote_rows_equal_the_oracle(
    pattern: Window, starts: list[int], ranks: int
) -> None:
    """As in sequence parallelism: the queries of a shard over received and local keys."""
    if torch.cuda.is_available():
        pytest.skip("runs in the interpreter")
    tokens = 30
    packed = Packed(pattern, tuple(starts))
    q, k, v = random_qkv(1, tokens, 2, 1, 16)
    grad = torch.randn_like(q)
    documents = packed.ids(tokens)[None]
    assert document_starts(documents[0]) == packed.starts
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    expected = output_and_gradients(
        attend_oracle, exact, grad.double(), pattern, documents=documents, scale=0.3
    )
    shards, heads = Shards.even(tokens, ranks), Heads(2, 1)
    found = []
    for rank in range(ranks):
        local = shards.local_range(rank)
        remote = remote_rows(packed, shards, rank, heads, True)[0]
        spans = shard_spans(packed, remote, local)
        assert spans is not None
        rows = torch.cat([remote, torch.tensor(local)])
        assert len(rows) < tokens or rank == ranks - 1
        found.append(
            window.attend_spans(q[:, local], k[:, rows], v[:, rows], None, pattern, 0.3, spans)
        )
    out = torch.cat(found, dim=1)
    ours = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    for x, y in zip(ours, expected, strict=True):
        assert (x.double() - y).norm() <= 2e-6 * y.norm()


def test_remote_rows_with_gaps_are_left_to_the_reference() -> None:
    pattern = Window(3, dilation=4)  # shards of two tokens see every fourth row
    shards = Shards.even(32, 16)
    remote = remote_rows(pattern, shards, 9, Heads(1, 1), True)[0]
    assert shard_spans(pattern, remote, shards.local_range(9)) is None
