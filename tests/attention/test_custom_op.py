"""The custom operator is registered completely, and equals the plain autograd function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Pattern,
    Window,
    attend,
    attend_oracle,
    merge,
)
from longspan.attention.custom_op import branch_attention, flatten, unflatten
from longspan.torch_internals import TorchDispatchMode
from tests.attention.test_functional import PATTERNS, output_and_gradients, random_qkv


@settings(max_examples=50, deadline=None)
@given(pattern=PATTERNS)
def test_flattening_a_pattern_loses_nothing(pattern: Pattern) -> None:
    assert unflatten(*flatten(pattern)) == pattern


def test_a_seed_of_any_size_draws_the_same_blocks() -> None:
    pattern, index = BlockSparse(32, density=0.4, seed=2**53 + 1), torch.arange(40)
    flat = unflatten(*flatten(pattern))
    assert isinstance(flat, BlockSparse)
    assert torch.equal(flat.blocks(index, index), pattern.blocks(index, index))


def test_the_operator_is_registered_completely() -> None:
    q, k, v = random_qkv(1, 12, 2, 2, dtype=torch.float64)
    flat = flatten(Dilated((4, 8), (1, 2)))
    sinks = torch.randn(2, dtype=torch.float64).requires_grad_()
    for logits in (None, sinks):
        mask = None, None, logits, *flat, True, 0.0, 0, 0
        torch.library.opcheck(branch_attention, (q, k, v, *mask, 0.3, "strided"))


class Operators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [
        (Dilated((4, 8), (1, 2), first_head=1), "strided"),
        (Dilated((16,), (2,)), "triton"),
        (Dense(), "triton"),
        (BlockSparse(32, local_window=64), "triton"),
        (Window(9, sinks=2, dilation=2), "triton"),
        (Window(9, sinks=2, dilation=2), "reference"),
    ],
)
def test_a_dispatch_mode_sees_the_operator_with_the_same_result(
    pattern: Pattern, backend: str
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("the kernels run on the GPU, where other tests compare them")
    qkv = random_qkv(1, 40, 2, 2, 16)
    grad = torch.randn_like(qkv[0])
    plain = output_and_gradients(attend, qkv, grad, pattern, backend=backend)
    with Operators() as operators:
        seen = output_and_gradients(attend, qkv, grad, pattern, backend=backend)
    assert {"branch_attention", "branch_attention_backward"} <= operators.names
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("strided", "cpu"),
        ("triton", "cpu"),
        *(pytest.param(x, "cuda", marks=pytest.mark.gpu) for x in ("triton", "strided")),
    ],
)
def test_sinks_are_merged_in_the_units_of_each_backend(
    backend: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    if torch.cuda.is_available() and (backend, device) == ("triton", "cpu"):
        pytest.skip("the kernels run on the GPU, where other tests compare them")
    monkeypatch.setattr(merge, "ROWS", 16)
    torch.manual_seed(0)
    pattern, sinks = Dilated((16, 32), (1, 2)), torch.linspace(-1, 3, 4, device=device)
    inputs = (*random_qkv(1, 40, 4, 2, 16, device=device), sinks.requires_grad_())
    grad = torch.randn_like(inputs[0])
    *qkv, _ = inputs
    out = attend(*qkv, pattern, sink_logits=sinks, backend=backend)
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    exact = attend_oracle(*qkv, pattern, sink_logits=sinks)
    right = [exact, *torch.autograd.grad(exact, inputs, grad.cpu().double())]
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.cpu().double(), y.cpu().double(), rtol=1e-4, atol=1e-5)
