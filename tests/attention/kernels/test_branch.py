"""The Triton kernels equal the float64 oracle: on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Mask,
    Pattern,
    attend,
    attend_oracle,
    choose_backend,
)
from longspan.attention.custom_op import branch_attention, flatten
from longspan.attention.kernels.schedule import (
    GLUON_RATIOS,
    TRITON_RATIOS,
    schedule_branches,
    schedule_whole_segments,
)
from tests.attention.test_functional import dilated_patterns, output_and_gradients, random_qkv

dispatch = pytest.importorskip("longspan.attention.kernels.dispatch")
branch = pytest.importorskip("longspan.attention.kernels.branch")
call = pytest.importorskip("longspan.attention.kernels.call")
rows = pytest.importorskip("longspan.attention.kernels.rows")
launch = pytest.importorskip("longspan.attention.kernels.launch")
HAS_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="runs on the GPU instead")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def assert_equals_oracle(
    qkv: tuple[Tensor, Tensor, Tensor], pattern: Pattern, tolerance: float, **options: Any
) -> None:
    grad = torch.randn_like(qkv[0])
    ours = output_and_gradients(attend, qkv, grad, pattern, backend="triton", **options)
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in qkv)
    there = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    oracle = output_and_gradients(attend_oracle, exact, grad.cpu(), pattern, **there)
    for found, expected in zip(ours, oracle, strict=True):
        error = (found.double().cpu() - expected).norm()
        assert error <= tolerance * expected.norm() + 1e-5  # the latter for values near zero


NESTED = Dilated((32, 64, 128), (1, 2, 4))
SHORT = Dilated((16, 32), (1, 2))
CASES: list[tuple[Pattern, int, int, int, int, bool, bool]] = [
    # pattern, tokens, heads, kv_heads, dims, is_causal, has_ids
    (Dense(), 70, 2, 2, 16, True, False),
    (NESTED, 128, 3, 3, 16, True, False),  # full segments: loops without masks
    (Dilated((32, 64), (1, 2)), 83, 4, 2, 16, True, True),
    (Dilated((32, 128), (1, 4)), 90, 3, 1, 24, False, True),
    (Dilated((32, 128), (1, 4)), 128, 2, 2, 16, False, False),
    (Dilated((32, 32), (1, 1)), 40, 2, 2, 16, True, False),  # the same branch twice counts twice
    (Dilated((32, 32, 64, 64), (1, 2, 4, 8)), 80, 3, 3, 16, True, False),  # two without own pairs
    (Dilated((64, 128, 128), (1, 64, 128)), 150, 2, 2, 16, True, False),  # two chains
    (Dilated((64, 64), (1, 64)), 130, 1, 1, 16, False, False),
    (Dilated((12, 30), (3, 2)), 77, 3, 3, 16, True, True),  # not nested
    (Dilated((64,), (4,)), 100, 3, 3, 8, True, False),  # rows that no branch keeps
    (BlockSparse(32, local_window=64, stride=3), 136, 2, 1, 16, True, False),
    (BlockSparse(64, density=0.4, seed=3), 200, 1, 1, 16, False, True),
    (Dilated((96, 192), (1, 2), BlockSparse(32, density=0.3)), 200, 2, 2, 16, True, False),
]
GPU_CASES = [(*case, not has_ids) for *case, has_ids in CASES]
"""The other half of the combinations, which the interpreter would be slow to run."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("pattern", "tokens", "heads", "kv_heads", "dims", "is_causal", "has_ids"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.gpu) for case in GPU_CASES)],
)
def test_equals_the_oracle(
    device: str, pattern: Pattern, tokens: int, heads: int, kv_heads: int, dims: int,
    is_causal: bool, has_ids: bool,
) -> None:  # fmt: skip
    batch, options = 1, dict[str, Tensor]()
    if has_ids:
        batch = 2
        options["documents"] = (torch.rand(2, tokens) < 0.03).cumsum(1).to(device) - 1
        options["key_padding_mask"] = (torch.rand(2, tokens) < 0.2).to(device)
    qkv = random_qkv(batch, tokens, heads, kv_heads, dims, device=device)
    assert_equals_oracle(qkv, pattern, 2e-6, is_causal=is_causal, scale=0.3, **options)


@pytest.mark.skipif(HAS_GPU, reason="would compile each example")
@settings(max_examples=2, deadline=None)
@given(pattern=dilated_patterns(), tokens=st.integers(1, 30), is_causal=st.booleans())
def test_any_dilated_pattern_equals_the_oracle(
    pattern: Dilated, tokens: int, is_causal: bool
) -> None:
    qkv = random_qkv(1, tokens, 2, 2)
    assert_equals_oracle(qkv, pattern, 2e-6, is_causal=is_causal)


@pytest.mark.parametrize("device", DEVICES)
def test_long_sequences_are_processed_in_slabs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = Dilated((32, 64), (1, 2))
    qkv = random_qkv(1, 150, 2, 2, 16, device=device)
    whole = attend(*qkv, pattern, backend="triton")
    monkeypatch.setattr("longspan.attention.kernels.schedule.PARTIAL_BYTES", 1)
    monkeypatch.setattr(dispatch, "_calls", dispatch.Call)  # the cached one remembers its slabs
    documents = (torch.arange(150, device=device) // 35)[None]
    assert_equals_oracle(qkv, pattern, 2e-6, documents=documents)
    torch.testing.assert_close(attend(*qkv, pattern, backend="triton"), whole, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_document_is_a_run_of_equal_ids(device: str) -> None:
    qkv = random_qkv(1, 24, 2, 2, 16, device=device)
    documents = torch.tensor([[5] * 8 + [2] * 9 + [5] * 7], device=device)
    assert_equals_oracle(qkv, Dense(), 2e-6, documents=documents)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_any_strides(device: str) -> None:
    packed = torch.randn(1, 35, 3, 2, 17, device=device)  # rows are not 16-byte aligned
    q, k, v = (x[..., 1:].requires_grad_() for x in packed.unbind(2))
    assert_equals_oracle((q, k, v), SHORT, 2e-6)
    out = attend(q, k, v, SHORT, backend="triton")
    expanded = torch.autograd.grad(out.sum(), q)[0]  # a gradient of stride 0
    torch.testing.assert_close(
        expanded, torch.autograd.grad(attend(q, k, v, SHORT), q, torch.ones_like(out))[0]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_shape_with_other_strides(device: str) -> None:
    """Launches are cached: a later call may differ in strides and alignment."""
    for _ in range(2):
        plain = random_qkv(1, 32, 2, 2, 16, device=device)
        assert_equals_oracle(plain, SHORT, 2e-6)
        packed = torch.randn(1, 32, 2, 3, 16, device=device)
        q, k, v = (x.requires_grad_() for x in packed.unbind(3))
        assert_equals_oracle((q, k, v), SHORT, 2e-6)
        shifted = [torch.randn(1 + 32 * 2 * 16, device=device)[1:] for _ in range(3)]
        q, k, v = (x.view(1, 32, 2, 16).requires_grad_() for x in shifted)
        assert_equals_oracle((q, k, v), SHORT, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [2048, 1411])
def test_tiles_of_16_bit_inputs(dims: int, tokens: int) -> None:
    qkv = random_qkv(1, tokens, 4, 4, dims, device="cuda", dtype=torch.bfloat16)
    for pattern in (Dilated((256, 512, 1024), (1, 2, 4)), BlockSparse(128, density=0.3)):
        assert choose_backend(*qkv[:2], Mask(pattern)).name == "triton"
        assert_equals_oracle(qkv, pattern, 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sample_may_be_so_long_that_its_stride_has_64_bits(dtype: torch.dtype) -> None:
    """As a view of one sample, which does not take the memory."""
    pattern = Dilated((256, 512, 1024), (1, 2, 4))
    short = random_qkv(1, 1024, 4, 4, 64, device="cuda", dtype=dtype)
    long = tuple(
        x.detach().as_strided(x.shape, (2**32, *x.stride()[1:])).requires_grad_() for x in short
    )
    grad = torch.randn_like(short[0])
    found, expected = (output_and_gradients(attend, x, grad, pattern) for x in (long, short))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 2**-9 * theirs.norm()  # dQ is summed in any order


@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "tokens"), [(64, 2048), (64, 4224), (64, 2049), (128, 2048)])
def test_dense_attention_of_16_bit_inputs(dims: int, tokens: int) -> None:
    qkv = random_qkv(2, tokens, 4, 2, dims, device="cuda", dtype=torch.bfloat16)
    is_ours = dims == 64 and tokens % 128 == 0 and launch.has_gluon(qkv[0].device)
    assert choose_backend(*qkv[:2], Mask(Dense())).name == ("triton" if is_ours else "sdpa")
    assert_equals_oracle(qkv, Dense(), 4e-3)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_the_same_input_gives_the_same_bits_if_asked_for() -> None:
    qkv = random_qkv(1, 4096, 4, 4, 64, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(qkv[0])
    first, *others = (
        output_and_gradients(attend, qkv, grad, Dilated((256, 1024), (1, 4))) for _ in range(4)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize(
    "pattern",
    [
        Dilated((256, 512, 1024), (1, 2, 4)),
        Dilated((1024, 4096), (1, 4), first_head=3),
        Dilated((2048, 4096), (1, 16)),
        Dilated((512, 1024), (2, 4)),  # rows that no branch keeps
    ],
)
def test_kernels_for_whole_segments_equal_the_general_ones(
    pattern: Dilated, dims: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the rounding of P, which one scales by counts before and the other after the maximum is
    subtracted; views, two samples, GQA.
    """
    parts = torch.randn(2, 4096, 12, dims, device="cuda", dtype=dtype)
    q, k, v = parts[:, :, :6], parts[:, :, 6:9], parts[:, :, 9:]
    do = torch.randn_like(q)
    (out, lse, dq, dk, dv), (out_2, lse_2, dq_2, dk_2, dv_2) = _by_both_kernels(
        q, k, v, do, pattern, monkeypatch
    )
    torch.testing.assert_close(lse, lse_2, rtol=0, atol=2e-5)
    for ours, general in ((out, out_2), (dq, dq_2), (dk, dk_2), (dv, dv_2)):
        tolerance = torch.finfo(dtype).eps / 4
        assert (ours - general).float().norm() <= tolerance * general.float().norm()


def _by_both_kernels(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, pattern: Dilated, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Tensor, ...]]:
    """The output, its log-sum-exp and the gradients by the kernels for whole segments, then not."""
    results = []
    for has_kernels in (True, False):
        if not has_kernels:
            monkeypatch.setattr(call, "has_kernels", lambda *_: False)
            monkeypatch.setattr(dispatch, "_calls", dispatch.Call)
        chosen = dispatch._call_of(q, k, None, pattern, True, 0.2)
        assert (chosen.whole_segments is not None) is has_kernels
        out, lse = dispatch.forward(q, k, v, None, pattern, True, 0.2)
        gradients = dispatch.backward(do, q, k, v, out, lse, None, pattern, True, 0.2)
        results.append((out, lse, *gradients))
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [64, 128])
def test_whole_segments_count_pairs_at_rates_beyond_a_tile(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The general kernels visit such a pattern branch by branch: the float32 log-sum-exp agrees."""
    pattern = Dilated((16384, 16384, 32768), (1, 64, 128), first_head=90)
    q, k, v, do = (
        torch.randn(1, 32768, 3, dims, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    (_, lse, *ours), (_, lse_2, *general) = _by_both_kernels(q, k, v, do, pattern, monkeypatch)
    torch.testing.assert_close(lse, lse_2, rtol=0, atol=1e-4)
    for x, y in zip(ours, general, strict=True):
        assert (x - y).float().norm() <= 4e-3 * y.float().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_activation_checkpointing_gives_the_same_bits(device: str) -> None:
    qkv = random_qkv(1, 40, 2, 2, 16, device=device)
    grad = torch.randn_like(qkv[0])

    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(attend, q, k, v, SHORT, backend="triton", use_reentrant=False)

    kept = output_and_gradients(attend, qkv, grad, SHORT, backend="triton")
    again = output_and_gradients(recomputed, qkv, grad)
    for found, expected in zip(again, kept, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_registered_completely(device: str) -> None:
    q, k, v = random_qkv(1, 16, 1, 1, 16, device=device)
    ids = torch.arange(16, device=device)[None] // 9
    flat = flatten(Dilated((16,), (1,)))
    mask = ids, ids, None, *flat, True, 0.0, 0, 0
    torch.library.opcheck(branch_attention, (q, k, v, *mask, 0.3, "triton"))


def test_the_kernels_compile_for_a_gpu() -> None:
    """The compiler may reject what the interpreter accepts; it needs no GPU.

    Each kernel once; all configurations with LONGSPAN_KERNELS=1 (`make kernels`).
    """
    script = Path(__file__).parent / "compile_kernels.py"
    options = ["--all"] if os.environ.get("LONGSPAN_KERNELS") else []
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, str(script), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("max_ratios", [TRITON_RATIOS, GLUON_RATIOS, (2.0, 4.0)])
@pytest.mark.parametrize(
    ("segments", "rates"),
    [
        ((32, 64, 128), (1, 2, 4)),
        ((16, 64), (2, 8)),
        ((8, 8), (1, 1)),
        ((32, 32, 64, 64), (1, 2, 4, 8)),
        ((64, 64, 128, 256, 256, 256), (1, 2, 4, 8, 32, 64)),
    ],
)
def test_nested_branches_visit_pairs_as_often_as_they_count(
    segments: tuple[int, ...], rates: tuple[int, ...], max_ratios: tuple[float, ...]
) -> None:
    """The counts of the kernels, from the schedule, are those of the pattern; each chain visits a
    pair once. A branch takes over the partial results of the rows that the one before it keeps.
    """
    head, position = 5, torch.arange(256)
    expected = Dilated(segments, rates).counts(position, position, head)
    schedule = schedule_branches(tuple(zip(segments, rates, strict=True)), False, max_ratios)
    assert schedule.is_nested
    total, visits, before = torch.zeros_like(expected), torch.zeros_like(expected), None
    for branch in schedule.branches:
        residue = head % branch.rate
        row, shift = torch.arange(256 // branch.rate), (residue - head) // branch.rate
        count = sum(((row + shift) % ratio == 0).long() for ratio in (1, *branch.ratios))
        is_visited = row[:, None] // branch.segment == row // branch.segment
        if branch.inner:
            is_visited &= row[:, None] // branch.inner != row // branch.inner
        here = (residue + branch.rate * row)[:, None], residue + branch.rate * row
        total[here] += is_visited * torch.minimum(count[:, None], count)
        visits[here] += is_visited
        if before is not None:
            keeps = here[1] % before == head % before
            assert torch.equal((row + shift) % branch.partial_ratio == 0, keeps)
        before = branch.rate
    assert torch.equal(total, expected)
    chains = sum(branch.inner == 0 for branch in schedule.branches)
    assert int(visits.max()) == chains
    assert torch.equal(visits > 0, expected > 0)


def test_rates_form_chains_and_branches_without_pairs_of_their_own_are_left_out() -> None:
    rates = [1 << i for i in range(10)]
    schedule = schedule_branches([(2048 * r, r) for r in rates], False, GLUON_RATIOS)
    assert [b.rate for b in schedule.branches if b.inner == 0] == [32, 1]
    assert [b.ratios[-1:] for b in schedule.branches[-2:]] == [(8,), (16,)]
    assert [b.rate for b in schedule.branches] == rates[::-1]
    schedule = schedule_branches([(min(2048 * r, 65536), r) for r in rates], False, GLUON_RATIOS)
    assert [b.rate for b in schedule.branches] == rates[5::-1]
    assert schedule.branches[0].ratios == (2, 4, 8, 16)


def test_a_pattern_that_is_not_nested_visits_all_pairs() -> None:
    others = [((12, 30), (3, 2)), ((8, 12), (1, 2)), ((96, 96), (1, 48)), ((48, 96), (1, 32))]
    for segments, rates in [*others, ((24, 48, 96), (1, 2, 16))]:
        schedule = schedule_branches(Dilated(segments, rates).branches, False)
        assert not schedule.is_nested
        assert all(branch.inner == 0 and not branch.ratios for branch in schedule.branches)


@pytest.mark.parametrize(
    ("segments", "rates", "tokens", "is_served"),
    [
        ((512, 2048), (1, 4), 4096, True),
        ((512, 2048), (1, 4), 1024, True),
        ((512, 2048), (1, 4), 512, True),  # of which one branch has all pairs
        ((512, 2048), (1, 4), 3072, False),  # half a segment
        ((128, 512), (1, 4), 512, False),  # 32 rows of the sparser branch are in an inner segment
        ((128, 256), (1, 2), 256, False),  # and 64 here
        ((128, 192), (1, 2), 384, False),  # not nested
    ],
)
def test_whole_segments_are_multiples_of_two_tiles(
    segments: tuple[int, ...], rates: tuple[int, ...], tokens: int, is_served: bool
) -> None:
    branches = Dilated(segments, rates).branches
    assert (schedule_whole_segments(branches, tokens) is not None) is is_served


def test_unsupported_inputs_are_errors() -> None:
    device = "cuda" if HAS_GPU else "cpu"
    q, k, v = random_qkv(1, 32, 2, 2, 16, device=device)
    with pytest.raises(ValueError, match="multiple of 32, got 24; use 'reference'"):
        attend(q, k, v, BlockSparse(24), backend="triton")
    with pytest.raises(ValueError, match="fewer queries than keys"):
        attend(q[:, :4], k, v, NESTED, backend="triton")
    with pytest.raises(ValueError, match=r"torch\.float64 is not supported by the kernels"):
        attend(q.double(), k.double(), v.double(), NESTED, backend="triton")


def test_a_compilation_that_takes_long_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = threading.Event()
    monkeypatch.setattr(launch, "ANNOUNCED_AFTER_S", 0.0)
    monkeypatch.setattr(launch, "print", lambda *_, **__: printed.set(), raising=False)
    with launch._announced("compiling"):
        assert printed.wait(60)


@pytest.mark.gpu
def test_kernels_are_reused_for_other_shapes() -> None:
    kernels = (branch.forward, rows.backward_preprocess, branch.backward_dq, branch.backward_dkdv)
    pattern = Dilated((64, 256), (1, 4))

    def compiled_after(batch: int, tokens: int) -> int:
        qkv = random_qkv(batch, tokens, 12, 12, 64, device="cuda", dtype=torch.bfloat16)
        attend(*qkv, pattern).sum().backward()
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    even, uneven = compiled_after(1, 4096), compiled_after(1, 4100)
    assert uneven > even
    others = [(4, 512), (1, 8192), (3, 4099), (1, 7001), (2, 300)]
    assert {compiled_after(*shape) for shape in others} == {uneven}
