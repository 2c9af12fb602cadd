"""The block-sparse backward pass that stores dS: its index, its kernels, and when it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.attention import BlockSparse, Dilated, Pattern, attend, attend_oracle
from longspan.attention.kernels.block_index import chunked_block_index
from tests.attention.kernels.test_branch import DEVICES, assert_equals_oracle
from tests.attention.test_functional import (
    output_and_gradients,
    plain_low_precision,
    random_qkv,
)

dispatch = pytest.importorskip("longspan.attention.kernels.dispatch")
block_sparse = pytest.importorskip("longspan.attention.kernels.block_sparse")

TILE = 2 * 128 * 128  # bytes
PATTERNS = [
    BlockSparse(128, density=0.5),
    BlockSparse(128, density=1.0),
    BlockSparse(128),  # the diagonal blocks only
    BlockSparse(128, local_window=384, global_tokens=256),
    BlockSparse(128, local_window=256, density=0.1, stride=3, seed=5),
]
KERNELS = [pytest.param(True, id="gluon"), pytest.param(False, id="triton")]


def is_used(
    q: Tensor, k: Tensor, pattern: Pattern, ids: Any = None, is_causal: bool = True,
    has_documents: bool = False,
) -> bool:  # fmt: skip
    call = dispatch._call_of(q, k, ids, pattern, is_causal, 1.0, has_documents)
    return bool(call.has_block_sparse_backward)


@pytest.fixture(autouse=True)
def _short_sequences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "MIN_TOKENS", 0)
    monkeypatch.setattr(dispatch, "_calls", dispatch.Call)  # the cached one remembers the choice


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(block_sparse, "has_gluon", lambda device: False)
    elif not block_sparse.has_gluon(torch.device("cuda")):
        pytest.skip("Gluon was tested with Triton 3.6 and 3.7")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("max_pairs", [1, 7, 40, 1000])
def test_every_pair_has_its_tile(pattern: BlockSparse, max_pairs: int) -> None:
    blocks = torch.arange(16)
    index = chunked_block_index(pattern, 16, max_pairs, torch.device("cpu"))
    kept = pattern.blocks(blocks, blocks).tril()
    longest = int(kept.sum(1).max())
    assert index.max_tiles <= max(max_pairs, 2 * longest)
    by_query = {}
    for query in range(16):
        run = slice(*index.offsets[query : query + 2].tolist())
        assert index.keys[run].tolist() == kept[query].nonzero()[:, 0].tolist()
        for key, tile in zip(index.keys[run].tolist(), index.tiles[run].tolist(), strict=True):
            by_query[query, key] = tile
    by_key = {}
    for chunk in index.chunks:
        for key in range(16):
            run = slice(*chunk.offsets[key : key + 2].tolist())
            queries = chunk.queries[run].tolist()
            assert queries == sorted(queries)  # the diagonal block first
            assert all(chunk.begin <= query < chunk.end for query in queries)
            by_key |= {(query, key): run.start + i for i, query in enumerate(queries)}
    assert by_key == by_query
    assert len(by_key) == int(kept.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiles", [1000, 4])
def test_equals_the_oracle(device: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sparse, "SCRATCH_BYTES", 2 * tiles * TILE)
    pattern = BlockSparse(128, density=0.5)
    packed = torch.randn(2, 384, 2, 2, 64, device=device, dtype=torch.float16)
    q, v = (x.requires_grad_() for x in packed.unbind(2))
    k = torch.randn(2, 1, 384, 64, device=device, dtype=torch.float16).transpose(1, 2)
    qkv = (q, k.requires_grad_(), v[:, :, :1].detach().requires_grad_())
    assert is_used(q, k, pattern)
    assert_equals_oracle(qkv, pattern, 1e-3, scale=0.2)


def plain(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    return plain_low_precision(q, k, v, pattern, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tiles", [1000, 12])
def test_gradients_are_within_thrice_the_error_of_plain_code(
    kernel: None, dims: int, pattern: BlockSparse, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once; or one head at a time on two streams, with the queries in chunks."""
    monkeypatch.setattr(block_sparse, "SCRATCH_BYTES", 2 * tiles * TILE)
    qkv = random_qkv(2, 1024, 2, 1, dims, device="cuda", dtype=torch.bfloat16)
    assert is_used(*qkv[:2], pattern)
    grad = torch.randn_like(qkv[0])
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in qkv)
    ours = output_and_gradients(attend, qkv, grad, pattern)
    usual = output_and_gradients(plain, qkv, grad, pattern)
    oracle = output_and_gradients(attend_oracle, exact, grad.cpu(), pattern)
    for index, (found, other, expected) in enumerate(zip(ours, usual, oracle, strict=True)):
        allowed = (2 if index == 0 else 3) * (other.double().cpu() - expected).norm()
        assert (found.double().cpu() - expected).norm() <= allowed


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("dims", [64, 128])
def test_the_same_bits_each_time_and_in_a_cuda_graph(
    kernel: None, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sparse, "SCRATCH_BYTES", 2 * 300 * TILE)
    pattern = BlockSparse(128, density=0.5)
    qkv = random_qkv(1, 4096, 7, 7, dims, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(qkv[0])
    first, *others = (output_and_gradients(attend, qkv, grad, pattern) for _ in range(4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = output_and_gradients(attend, qkv, grad, pattern)
    for _ in range(2):
        graph.replay()
        others.append([x.clone() for x in captured])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_the_scratch_buffer_is_as_small_as_the_pattern_allows() -> None:
    def extra(pattern: BlockSparse) -> int:
        qkv = random_qkv(1, 16384, 8, 8, 64, device="cuda", dtype=torch.bfloat16)
        out = attend(*qkv, pattern)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, qkv, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before - 4 * qkv[0].nbytes

    for pattern in (BlockSparse(128, density=1.0), BlockSparse(128, density=0.1)):
        extra(pattern)  # the first call builds the block index
    assert extra(BlockSparse(128, density=1.0)) < block_sparse.SCRATCH_BYTES + (32 << 20)
    assert extra(BlockSparse(128, density=0.1)) < block_sparse.SCRATCH_BYTES // 2


@pytest.mark.parametrize("device", DEVICES)
def test_other_inputs_use_the_branch_kernels(device: str) -> None:
    pattern = BlockSparse(128, density=0.5)
    q = torch.empty(1, 512, 2, 64, dtype=torch.float16, device=device)
    ids = (torch.zeros(1, 512, dtype=torch.int64, device=device),) * 2
    assert is_used(q, q, pattern)
    assert is_used(q, q, Dilated((512,), (1,), pattern))
    assert not is_used(q, q, Dilated((256,), (1,), pattern))
    assert not is_used(q, q, Dilated((512,), (2,), pattern))
    assert not is_used(q, q, BlockSparse(64, density=0.5))
    assert not is_used(q, q, pattern, ids)
    assert not is_used(q, q, pattern, has_documents=True)
    assert not is_used(q, q, pattern, is_causal=False)
    assert not is_used(q[:, :500], q[:, :500], pattern)
    long = q[:, :1].expand(1, 2 * block_sparse.MAX_TOKENS, 2, 64)
    assert not is_used(long, long, pattern)
    assert not is_used(q.float(), q.float(), pattern)
    assert not is_used(q[..., :32], q[..., :32], pattern)
