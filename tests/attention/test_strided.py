"""Strided views in memory-efficient attention, for GPUs before Ampere: its operators have no CPU
version, so that one is registered here which computes what they are documented to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan.attention import Dense, Dilated, choose_backend, merge, strided
from longspan.attention.functional import attend, strided_problem
from longspan.attention.mask import Mask
from longspan.attention.merge import has_flash_kernel
from longspan.attention.oracle import attend_oracle
from longspan.attention.pattern import Pattern
from longspan.attention.window import Window
from longspan.torch_internals import efficient_attention, efficient_attention_backward


def scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    found = q.double() @ k.double().mT * scale
    hidden = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
    return found.masked_fill(hidden, -torch.inf) if is_causal else found


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The log-sum-exp has rows of infinity up to a multiple of 32."""
    assert bias is None
    assert with_lse
    assert not dropout
    assert all(x.stride(3) == 1 and x.stride(2) % 8 == 0 for x in (q, k, v))
    found = scores(q, k, is_causal, scale)
    out = (found.softmax(-1) @ v.double()).to(q.dtype)
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), torch.inf)
    lse[..., : q.shape[2]] = found.logsumexp(-1)
    return out, lse, torch.empty(()), torch.empty(())


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor,
    _seed: Tensor, _offset: Tensor, dropout: float, wanted: Any, is_causal: bool = False, *,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the kernel is written: P by the log-sum-exp that is given, and the heads of `out`."""
    assert bias is None
    assert not dropout
    assert list(wanted) == [True, True, True, False]
    assert lse.is_contiguous()
    assert lse.shape[2] % 32 == 0
    assert lse[..., q.shape[2] :].isposinf().all()
    assert out.transpose(1, 2).is_contiguous()
    p = (scores(q, k, is_causal, scale) - lse[..., : q.shape[2], None].double()).exp()
    grad, delta = grad.double(), (grad.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (grad @ v.double().mT - delta) * scale
    found = ds @ k.double(), ds.mT @ q.double(), p.mT @ grad
    return *(x.to(q.dtype) for x in found), torch.empty(0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory-efficient attention in place of the kernel for CPUs."""
    kernels = efficient_attention, efficient_attention_backward
    for module in (merge, strided):
        monkeypatch.setattr(module, "sdpa_kernels", lambda _: kernels)
    name = "_scaled_dot_product_efficient_attention"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, efficient, "CPU")
        library.impl(f"{name}_backward", efficient_backward, "CPU")
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("pattern", "documents"),
    [
        (Dilated((16, 48), (1, 4), first_head=1), None),
        (Dilated((16, 32), (1, 2)), [0] * 17 + [1] * 30 + [2] * 23),
        (Dense(), [0] * 40 + [1] * 30),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_equals_the_oracle(
    pattern: Pattern, documents: list[int] | None, is_causal: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    ids = None if documents is None else torch.tensor([documents])
    options: dict[str, Any] = {"is_causal": is_causal, "documents": ids}
    grad = torch.randn_like(q)
    out = attend(q, k, v, pattern, backend="strided", **options)
    exact = attend_oracle(q, k, v, pattern, **options)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    right = [exact, *torch.autograd.grad(exact, (q, k, v), grad.double())]
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("on_cpu")
def test_partials_of_a_sequence_run_there_too() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    options: dict[str, Any] = {"is_causal": True, "scale": 0.3}
    out, lse = merge.attend_partial(q.detach(), k.detach(), v.detach(), **options)
    exact = attend_oracle(q, k, v, Dense(), scale=0.3)
    torch.testing.assert_close(out.double(), exact.detach().double(), rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(q)
    found = merge.partial_gradients(grad, *(x.detach() for x in (q, k, v)), out, lse, **options)
    right = torch.autograd.grad(exact, (q, k, v), grad.double())
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "name"),
    [
        ((7, 0), torch.float16, "strided"),
        ((7, 5), torch.float32, "strided"),
        ((7, 0), torch.bfloat16, "reference"),
        ((7, 0), torch.float64, "reference"),
    ],
)
def test_gpus_before_ampere_use_it(
    capability: tuple[int, int], dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        q = torch.empty(1, 64, 4, 32, device="cuda", dtype=dtype)
        assert choose_backend(q, q, Mask(Dilated((32, 64), (1, 2)))).name == name
        assert choose_backend(q, q, Mask(Window(8))).name == "reference"
        assert has_flash_kernel(q, 1.0) == (name == "strided")
        assert not has_flash_kernel(q, -1.0)


def test_what_it_does_not_support_is_explained() -> None:
    q = torch.randn(1, 32, 2, 8)
    assert strided_problem(q, q, Mask(Dilated((16,), (1,)))) is None
    assert strided_problem(q[:, -1:], q, Mask(Dense())) == "there are fewer queries than keys"
    window = strided_problem(q, q, Mask(Window(8)))
    assert window == "the pattern is neither dense nor dilated, on a CPU"
    with pytest.raises(ValueError, match="'strided' does not support this: the pattern is neither"):
        attend(q, q, q, Window(8), backend="strided")


def test_shapes_of_the_operators() -> None:
    """By torch's own rules for them, on the meta device."""
    q = torch.empty(2, 4, 40, 16, device="meta", dtype=torch.float16)
    out, lse = efficient_attention(q, q, q, is_causal=True, scale=0.3)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 40), torch.float32)
    grads = efficient_attention_backward(out, q, q, q, out, lse, is_causal=True, scale=0.3)
    assert all(x.shape == q.shape for x in grads)
