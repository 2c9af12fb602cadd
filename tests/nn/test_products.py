"""Products of compiled blocks by algorithms of cuBLASLt that are chosen here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.nn import products
from longspan.nn.products import TILE_128x160, TILE_168x128, TILE_256x128, choice, product
from longspan.torch_internals import compiled_product


def test_the_choice_is_among_the_tiles_that_were_measured() -> None:
    offered = [23, TILE_256x128, TILE_128x160, TILE_168x128]
    for is_weight_gradient in (False, True):
        assert choice(offered, 1024, is_weight_gradient=is_weight_gradient) == 1
        assert choice([23, TILE_128x160], 2048, is_weight_gradient=is_weight_gradient) is None
    assert choice(offered, 768, is_weight_gradient=False) == 3
    assert choice(offered[:3], 768, is_weight_gradient=False) == 2
    assert choice(offered[:2], 768, is_weight_gradient=False) is None
    assert choice(offered, 768, is_weight_gradient=True) is None


def test_compiled_code_calls_it_within_the_context_alone() -> None:
    calls = []

    def spy(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        calls.append(tuple(a.shape))
        return torch.mm(a, b, out=out)

    compiled, a, b = torch.compile(torch.mm), torch.randn(64, 32), torch.randn(32, 16)
    with compiled_product(spy):
        torch.testing.assert_close(compiled(a, b), a @ b)
    assert calls == [(64, 32)]
    torch.testing.assert_close(compiled(a, b), a @ b)
    assert calls == [(64, 32)]


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("features", [(768, 2048), (1024, 2816), (2816, 1024), (2048, 2048)])
def test_products_equal_those_of_float64(features: tuple[int, int]) -> None:
    """Of a linear layer: its output, and the gradients of its input and of its weight."""
    inner, columns = features
    x = torch.randn(32_768, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(32_768, columns, device="cuda", dtype=torch.bfloat16)
    plans = []
    for a, b in ((x, weight.T), (grad, weight), (grad.T, x)):
        out = torch.full((a.shape[0], b.shape[1]), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert product(a, b, out=out) is out
        rows = torch.arange(0, a.shape[0], 61, device="cuda")
        exact = a[rows].double() @ b.double()
        assert (out[rows] - exact).norm() <= 2**-8 * exact.norm()
        plans.append(products._plan(*a.shape, b.shape[1], a.stride(), b.stride(), 0))
    assert any(plan is not None for plan in plans)


@pytest.mark.gpu
@needs_hopper
def test_other_products_are_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.randn(65_536, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    new = large.new_empty
    monkeypatch.setattr(products, "_plan", None)  # calling it would fail
    for a, b, out in (
        (large[:1024], weight, new(1024, 1024)),
        (large.float(), weight.float(), new(65_536, 1024).float()),
        (large[:, 1:1001], weight[:1000], new(65_536, 1024)),  # not aligned
        (large, weight[:1, :1].expand(1024, 1024), new(65_536, 1024)),
    ):
        assert torch.equal(product(a, b, out=out), torch.mm(a, b))
