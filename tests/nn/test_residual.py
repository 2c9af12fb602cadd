"""The residual stream added by the product of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from longspan.nn import products, residual
from longspan.nn.residual import linear_onto

ADDEND = "longspan.product_onto.default"


@pytest.fixture
def _are_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As within `chosen_products`, for small layers; on a CPU torch computes the products."""
    monkeypatch.setattr(products, "_are_chosen", True)
    monkeypatch.setattr(products, "LEAST_TOKENS", 8)
    monkeypatch.setattr(products, "FEATURES", range(8, 64))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def added(layer: nn.Module, x: Tensor, onto: Tensor) -> tuple[list[Tensor], set[str]]:
    """The sum and its gradients, by compiled code, and the operators of its graphs."""
    operators: set[str] = set()

    def record(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        operators.update(str(node.target) for node in graph.graph.nodes)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    backend = aot_autograd(fw_compiler=record)
    x, onto = (tensor.clone().requires_grad_() for tensor in (x, onto))
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(linear_onto, backend=backend, fullgraph=True)(onto, layer, x)
    inputs = [x, onto, *layer.parameters()]
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)], operators


@pytest.mark.usefixtures("_are_chosen")
def test_sum_and_gradients_equal_those_of_float64() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=False)
    x = torch.randn(2, 8, 24, dtype=torch.bfloat16)
    onto = 100 * torch.randn(2, 8, 16, dtype=torch.bfloat16)
    found, operators = added(layer, x, onto)
    assert ADDEND in operators
    exact_x, exact_onto = (tensor.double().requires_grad_() for tensor in (x, onto))
    weight = layer.weight.detach().bfloat16().double().requires_grad_()
    out = exact_onto + exact_x @ weight.T
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16().double()
    inputs = [exact_x, exact_onto, weight]
    exact = [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
    for ours, theirs in zip(found, exact, strict=True):
        # One rounding to bf16: of the sum, not of the product before it.
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-3)


@pytest.mark.usefixtures("_are_chosen")
@pytest.mark.parametrize(
    "kind", ["bias", "float32", "few tokens", "wide", "subclass", "not chosen"]
)
def test_other_sums_are_left_to_the_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Subclass(nn.Linear):
        pass

    width = 72 if kind == "wide" else 24
    make = Subclass if kind == "subclass" else nn.Linear
    layer = make(width, 16, bias=kind == "bias")
    x = torch.randn(1 if kind == "few tokens" else 2, 4, width, dtype=torch.bfloat16)
    onto = torch.randn(*x.shape[:2], 16, dtype=torch.float if kind == "float32" else x.dtype)
    if kind == "not chosen":
        monkeypatch.setattr(products, "_are_chosen", False)
    (out, *_), operators = added(layer, x, onto)
    assert ADDEND not in operators
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, onto + layer(x))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_the_product_adds_on_a_gpu() -> None:
    """By cuBLASLt, and where it is not served by cuBLAS."""
    for tokens in (32_768, 1024):
        x = torch.randn(tokens, 2816, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(1024, 2816, device="cuda", dtype=torch.bfloat16) / 50
        onto = 10 * torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        before = onto.clone()
        found = residual.product_onto(onto, x, weight)
        rows = torch.arange(0, tokens, 61, device="cuda")
        exact = onto[rows].double() + x[rows].double() @ weight.double().T
        assert (found[rows] - exact).norm() <= 2**-8 * exact.norm()
        assert torch.equal(onto, before)
