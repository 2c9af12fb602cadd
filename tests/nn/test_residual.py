"""The residual stream added by the product of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.functional import linear

from longspan.config import Train
from longspan.nn import products, residual
from longspan.nn.products import chosen_products
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
    # What is left of it is the rounding of this: of a product rounded before the sum, nothing.
    onto = -linear(x, layer.weight.bfloat16()).detach()
    found, operators = added(layer, x, onto)
    assert ADDEND in operators
    exact_x, exact_onto = (tensor.double().requires_grad_() for tensor in (x, onto))
    weight = layer.weight.detach().bfloat16().double().requires_grad_()
    out = exact_onto + exact_x @ weight.T
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16().double()
    inputs = [exact_x, exact_onto, weight]
    exact = [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() <= 2**-8 * theirs.norm()


@pytest.mark.usefixtures("_are_chosen")
@pytest.mark.parametrize(
    "kind",
    [
        "bias",
        "float32",
        "few tokens",
        "wide",
        "widens",
        "subclass",
        "hook",
        "one sample",
        "not chosen",
    ],
)
def test_other_sums_are_left_to_the_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Subclass(nn.Linear):
        pass

    width = 72 if kind == "wide" else 24
    make = Subclass if kind == "subclass" else nn.Linear
    layer = make(width, 72 if kind == "widens" else 16, bias=kind == "bias")
    if kind == "hook":
        layer.register_forward_hook(lambda _layer, _inputs, out: 2 * out)
    x = torch.randn(1 if kind == "few tokens" else 2, 4, width, dtype=torch.bfloat16)
    samples = 1 if kind == "one sample" else len(x)
    dtype = torch.float if kind == "float32" else x.dtype
    onto = torch.randn(samples, 4, layer.out_features, dtype=dtype)
    if kind == "not chosen":
        monkeypatch.setattr(products, "_are_chosen", False)
    (out, *_), operators = added(layer, x, onto)
    assert ADDEND not in operators
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, onto + layer(x))


def test_the_context_decides_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, as far as this process knows; compiled code and what is not compiled."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(products, "LEAST_TOKENS", 8)
    monkeypatch.setattr(products, "FEATURES", range(8, 64))
    calls = []

    def spy(a: Tensor, b: Tensor, *, out: Tensor, addend: Tensor) -> Tensor:
        calls.append(a.shape)
        return torch.addmm(addend, a, b, out=out)

    monkeypatch.setattr(residual, "product", spy)
    layer, x, onto = nn.Linear(16, 24, bias=False), torch.randn(8, 16), torch.randn(8, 24)
    weight = layer.weight.detach().bfloat16()
    compiled = torch.compile(linear_onto, backend="aot_eager", fullgraph=True)

    def calls_of(function: Callable[..., Tensor]) -> int:
        calls.clear()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = function(onto.bfloat16(), layer, x.bfloat16())
            found = len(calls)
            exact = onto.bfloat16().double() + linear(x.bfloat16().double(), weight.double())
        assert (out - exact).norm() <= 2**-7 * exact.norm()
        return found

    gpu, bf16 = torch.device("cuda"), Train(precision="bf16", compile=True)
    assert calls_of(compiled) == 0
    with chosen_products(bf16, gpu):
        assert (calls_of(compiled), calls_of(linear_onto)) == (1, 0)
        with contextlib.suppress(KeyError), chosen_products(bf16, gpu):
            raise KeyError
        assert calls_of(compiled) == 1
    assert calls_of(compiled) == 0
    for train, device in (
        (bf16, torch.device("cpu")),
        (bf16.model_copy(update={"compile": False}), gpu),
        (bf16.model_copy(update={"precision": "fp32"}), gpu),
    ):
        with chosen_products(train, device):
            assert calls_of(compiled) == 0
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with chosen_products(bf16, gpu):
        assert calls_of(compiled) == 0


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_the_product_adds_on_a_gpu() -> None:
    """By cuBLASLt, rounded once, and by cuBLAS where it is not served, perhaps rounded twice."""
    for tokens in (32_768, 1024):
        x = torch.randn(tokens, 2816, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(1024, 2816, device="cuda", dtype=torch.bfloat16) / 50
        onto = -linear(x, weight)  # leaves what rounding the product before the sum would lose
        before = onto.clone()
        found = residual.product_onto(onto, x, weight)
        rows = torch.arange(0, tokens, 61, device="cuda")
        product = x[rows].double() @ weight.double().T
        exact = onto[rows].double() + product  # what rounding has left
        is_served = tokens >= products.LEAST_TOKENS
        bound = 2**-4 * exact.norm() if is_served else 2**-8 * product.norm()
        assert (found[rows] - exact).norm() <= bound
        assert torch.equal(onto, before)
        plan = products._plan(*x.shape, 1024, x.stride(), weight.T.stride(), 0)
        assert plan is not None or not is_served
