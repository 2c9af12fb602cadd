"""The MLP in tiles against the MLP of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.nn import GatedMLP, RMSNorm, tiled_mlp
from tests.slow import slow

HIDDEN, FFN, TILE = 16, 24, 8
Function = Callable[[Tensor], Tensor]


def mlp_of(activation: str = "silu", *, bias: bool = False, norm: bool = False) -> GatedMLP:
    torch.manual_seed(0)
    sub_layer_norm = RMSNorm(FFN, 1e-5, 0.5) if norm else None
    mlp = GatedMLP(
        HIDDEN, FFN, lambda _, i, o: nn.Linear(i, o, bias=bias), sub_layer_norm, activation
    )
    return mlp.double()


def results(
    mlp: GatedMLP, x: Tensor, *, tile: int, function: Function | None = None
) -> list[Tensor]:
    """The output, and the gradients of x and of the parameters that are trained."""
    mlp.tile_tokens = tile
    mlp.zero_grad()
    x = x.clone().requires_grad_()
    y = (mlp if function is None else function)(x)
    y.double().square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in mlp.parameters() if p.requires_grad]
    return [y.detach(), *(g for g in (x.grad, *gradients) if g is not None)]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("has_all", [False, True])
def test_tiles_compute_the_same(activation: str, has_all: bool) -> None:
    mlp = mlp_of(activation, bias=has_all, norm=has_all)
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64)  # three tiles of 8 and one of 2
    expected, found = (results(mlp, x, tile=tile) for tile in (0, TILE))
    assert len(found) == len(expected) == (9 if has_all else 5)
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z)


def test_frozen_weights_have_no_gradient() -> None:
    mlp = mlp_of(bias=True, norm=True)
    for parameter in (mlp.up.weight, mlp.down.bias, mlp.norm.weight):
        parameter.requires_grad_(False)
    x = torch.randn(1, 20, HIDDEN, dtype=torch.float64)
    expected, found = (results(mlp, x, tile=tile) for tile in (0, TILE))
    assert len(found) == len(expected) == 6
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("holds_bf16", [False, True])
@pytest.mark.parametrize(
    ("device", "compiles"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_in_bf16_errors_are_those_of_the_whole(
    device: str, compiles: bool, holds_bf16: bool
) -> None:
    """Against float64; weights are rounded by autocast, or are bf16 themselves."""
    mlp = mlp_of().to(device)
    if holds_bf16:
        mlp = mlp.to(torch.bfloat16)
    exact = mlp_of().to(device)
    exact.load_state_dict(mlp.state_dict())
    mlp = mlp if holds_bf16 else mlp.float()
    x = torch.randn(1, 256, HIDDEN, device=device).bfloat16()
    expected = results(exact, x.double(), tile=0)

    def errors(tile: int) -> list[float]:
        function: Function | None = torch.compile(mlp, fullgraph=True) if compiles else None
        with torch.autocast(device, torch.bfloat16):
            found = results(mlp, x if holds_bf16 else x.float(), tile=tile, function=function)
        return [
            float((y.double() - z).norm() / z.norm()) for y, z in zip(found, expected, strict=True)
        ]

    for of_tiles, of_whole in zip(errors(TILE), errors(0), strict=True):
        assert of_tiles <= 1.2 * of_whole


def test_no_product_has_more_rows_than_a_tile_and_none_is_computed_a_third_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under activation checkpointing of a block that the MLP ends: gate and up twice."""
    rows: list[int] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(tiled_mlp, "linear", linear)
    mlp = mlp_of()

    def block(x: Tensor) -> Tensor:
        return x + mlp(2 * x)

    def recomputed(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
        return y

    x = torch.randn(1, 20, HIDDEN, dtype=torch.float64)
    expected = results(mlp, x, tile=0, function=block)
    assert not rows
    found = results(mlp, x, tile=TILE, function=recomputed)
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z)
    assert rows == 2 * (4 * [8] + 2 * [4])


@slow("compile")
def test_compiled_tiles_are_the_same() -> None:
    mlp = mlp_of("gelu", bias=True, norm=True)
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64)
    compiled: Function = torch.compile(mlp, fullgraph=True)
    expected = results(mlp, x, tile=0)
    for y, z in zip(results(mlp, x, tile=TILE, function=compiled), expected, strict=True):
        torch.testing.assert_close(y, z)
