"""Fits against independent solvers; what conversion preserves, refuses and reports."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.sketching import LowRankLinear, SKLinear, report, sketch, to_dense
from longspan.sketching.fitting import fit_low_rank, fit_sketched, random_sketch
from longspan.sketching.layers import FactoredLinear, seed_of
from longspan.sketching.signs import pack_signs

METHODS = ["svd", "least_squares", "sketch"]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def sketched(inputs: int, outputs: int, num_terms: int, rank: int, seed: int = 0) -> SKLinear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return SKLinear(inputs, outputs, num_terms, rank, bias=False, seed=seed)


def effective_weight(layer: nn.Module, inputs: int) -> Tensor:
    """W (in, out), from the layer's outputs."""
    with torch.no_grad():
        w: Tensor = layer(torch.eye(inputs))
        return w if layer.bias is None else w - layer.bias


def anisotropic_moment(rows: int, features: int) -> tuple[Tensor, Tensor]:
    """The moment of anisotropic inputs, and Z with ZᵀZ = moment + 1e-6 of its mean diagonal."""
    x = torch.randn(rows, features) @ torch.randn(features, features)
    moment = x.T @ x / rows
    ridge = (1e-6 * moment.diagonal().mean()).sqrt() * torch.eye(features)
    return moment, torch.cat([x / math.sqrt(rows), ridge])


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_low_rank_fit_has_the_error_of_the_truncated_svd(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    a, b = fit_low_rank(weight, 5)
    tail = torch.linalg.svdvals(weight)[5:].norm()
    torch.testing.assert_close((weight.T - a @ b).norm(), tail, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.norm(dim=0), b.norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [5, 40])  # a singular moment, and a regular one
def test_the_calibrated_low_rank_fit_is_optimal_on_the_inputs(rows: int) -> None:
    weight = torch.randn(9, 12)
    moment, z = anisotropic_moment(rows, 12)
    a, b = fit_low_rank(weight, 4, moment)
    tail = torch.linalg.svdvals(z @ weight.T)[4:].norm()
    torch.testing.assert_close((z @ (weight.T - a @ b)).norm(), tail, rtol=1e-8, atol=0)


def test_indefinite_and_zero_moments_can_be_fitted() -> None:
    weight = torch.randn(6, 64)
    x = torch.randn(1, 64).float() * 100 + torch.randn(8, 64).float() * 1e-3
    moment = x.T @ x
    assert torch.linalg.eigvalsh(moment.double())[0] < 0
    moment[0, 0] -= 1e-3 * moment.diagonal().mean()  # far from positive semidefinite
    a, b = fit_low_rank(weight, 2, moment)
    assert (x.double() @ (weight.T - a @ b)).norm() < 1e-2 * (x.double() @ weight.T).norm()
    for found, plain in zip(
        fit_low_rank(weight, 2, torch.zeros(64, 64)), fit_low_rank(weight, 2), strict=True
    ):
        torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("num_terms", "rank"), [(1, 2), (2, 1), (1, 6), (2, 4)])
@pytest.mark.parametrize("rows", [None, 3, 30])
@pytest.mark.parametrize("dependent", [False, True])
def test_the_sketched_fit_is_the_least_squares_solution(
    num_terms: int, rank: int, rows: int | None, dependent: bool
) -> None:
    weight = torch.randn(5, 7)  # ranks >= 6 can represent any W
    layer = sketched(7, 5, num_terms, rank, seed=3)
    if dependent:
        u1, u2 = layer.u1, layer.u2
        u1[1], u2[:, 1] = -u1[0], u2[:, 0]
        layer.bits1, layer.bits2 = pack_signs(u1), pack_signs(u2)
    moment, z = (None, torch.eye(7)) if rows is None else anisotropic_moment(rows, 7)
    fit_sketched(weight, layer, moment)

    # vec(Z (S1 V1 + V2 S2)) = [Z ⊗ V1ᵀ | Z V2 ⊗ 1] [vec S1 ; vec S2]
    factor = 1 / (2 * num_terms * math.sqrt(rank))
    v1, v2 = layer.u1 * factor, layer.u2 * factor
    left = torch.cat([torch.kron(z, v1.T.contiguous()), torch.kron(z @ v2, torch.eye(5))], dim=1)
    right = (z @ weight.T).flatten()
    solution = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution
    best = (left @ solution).reshape(-1, 5)
    found = z @ effective_weight(layer, 7)
    torch.testing.assert_close(found, best, rtol=0, atol=1e-9 * float(best.norm()))
    assert max(layer.s1.abs().max(), layer.s2.abs().max()) < 1e5
    if num_terms * rank >= 6:
        torch.testing.assert_close(found, z @ weight.T, rtol=0, atol=1e-9 * float(best.norm()))
    else:
        assert (found - z @ weight.T).norm() > 1e-2 * best.norm()


def test_the_least_squares_fit_depends_only_on_the_total_rank() -> None:
    weight = torch.randn(24, 40)
    one, two = sketched(40, 24, 1, 16, seed=5), sketched(40, 24, 2, 8, seed=5)
    fit_sketched(weight, one)
    fit_sketched(weight, two)
    torch.testing.assert_close(
        effective_weight(one, 40), effective_weight(two, 40), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("inputs", "num_terms", "rank"), [(256, 1, 32), (256, 4, 8), (64, 2, 16)])
def test_the_random_sketch_has_the_error_of_its_formula(
    inputs: int, num_terms: int, rank: int
) -> None:
    weight = torch.randn(256, inputs)
    layer = sketched(inputs, 256, num_terms, rank)
    random_sketch(weight, layer)
    error = (weight.T - effective_weight(layer, inputs)).norm() / weight.norm()
    expected = math.sqrt((inputs + 256 - 2) / (4 * num_terms * rank))
    assert float(error) == pytest.approx(expected, rel=0.05)


def test_the_random_sketch_is_unbiased() -> None:
    weight, count = torch.randn(6, 5), 300
    total = torch.zeros(5, 6)
    for seed in range(count):
        layer = sketched(5, 6, 2, 2, seed)
        random_sketch(weight, layer)
        total += effective_weight(layer, 5)
    error = (total / count - weight.T).norm() / weight.norm()
    assert float(error) < 2 * math.sqrt(9 / (4 * 4 * count))


def test_errors_at_a_quarter_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    w = model[0].weight.detach().T
    errors = {}
    for method in METHODS:
        converted = copy.deepcopy(model)
        found = sketch(converted, 0.25, method)
        errors[method] = found.rows[0].weight_error
        assert found.after.stored * 4 == found.before.stored == 256 * 256
        expected = (w - effective_weight(converted[0], 256)).norm() / w.norm()
        assert errors[method] == pytest.approx(float(expected), rel=1e-10)
    assert errors["svd"] < errors["least_squares"] < 1 < errors["sketch"]
    # The signs do not depend on W: they span an eighth of its rows and of its columns.
    assert errors["least_squares"] == pytest.approx(7 / 8, rel=0.02)
    assert errors["sketch"] == pytest.approx(math.sqrt(510 / (4 * 32)), rel=0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.ModuleList([nn.Linear(24, 16, bias=False)])

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        out: Tensor = self.down[0](self.dropout(torch.tanh(self.up(x) + shift)))
        return out


@pytest.mark.parametrize("method", METHODS)
def test_calibration_fits_to_the_inputs_and_reports_the_error_on_them(method: Any) -> None:
    dense = Net()
    batches: list[Any] = [(torch.randn(3, 5, 12) @ torch.randn(12, 12), 0.3) for _ in range(4)]
    batches.append(torch.randn(7, 12))
    dense.down.eval()
    plain, calibrated = copy.deepcopy(dense), copy.deepcopy(dense)
    without = sketch(plain, 0.5, method)
    found = sketch(calibrated, 0.5, method, calibration=batches)
    assert calibrated.dropout.training
    assert not calibrated.down.training
    assert not any(m._forward_pre_hooks for m in calibrated.modules())

    def layer_inputs(name: str) -> Tensor:
        inputs: list[Tensor] = []
        copied = copy.deepcopy(dense).eval()
        copied.get_submodule(name).register_forward_pre_hook(
            lambda _, args: inputs.append(args[0].flatten(0, -2))
        )
        for batch in batches:
            copied(*batch) if isinstance(batch, tuple) else copied(batch)
        return torch.cat(inputs).detach()

    for before, after in zip(without.rows, found.rows, strict=True):
        x = layer_inputs(after.name)
        w = effective_weight(dense.get_submodule(after.name), x.shape[1])
        losses = []
        for model in (plain, calibrated):
            converted = effective_weight(model.get_submodule(after.name), x.shape[1])
            losses.append(float((x @ (w - converted)).norm() / (x @ w).norm()))
        assert before.activation_error is None
        assert after.activation_error == pytest.approx(losses[1], rel=1e-9)
        if method == "sketch":
            assert losses[1] == losses[0]
        else:
            assert losses[1] < 0.97 * losses[0]
            assert after.weight_error > before.weight_error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_conversion_preserves_everything_but_the_weight(method: Any, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    model.up.weight.requires_grad_(False)
    model.down.eval()
    bias, random = model.up.bias, torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sketch(model, 0.9, method)
    assert torch.equal(torch.get_rng_state(), random)
    assert isinstance(model.up, LowRankLinear if method == "svd" else SKLinear)
    assert model.up.bias is bias
    assert model.down[0].bias is None
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "up.bias",
        "down.0.s1",
        "down.0.s2",
    }
    assert model.up.training
    assert not model.down[0].training
    to_dense(model)
    assert type(model.up) is nn.Linear
    assert model.up.bias is bias
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "up.bias",
        "down.0.weight",
    }
    assert not model.down[0].training


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_to_dense_preserves_the_outputs(method: Any, dtype: torch.dtype, tolerance: float) -> None:
    model, x = Net().to(dtype).eval(), torch.randn(9, 12, dtype=dtype)
    sketch(model, 0.5, method)
    assert sum(isinstance(m, FactoredLinear) for m in model.modules()) == 2
    expected = model(x)
    to_dense(model)
    assert not any(isinstance(m, FactoredLinear) for m in model.modules())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=tolerance)


def test_a_shared_layer_stays_shared() -> None:
    layer = LowRankLinear(8, 8, 2)
    layer.s1.requires_grad_(False)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(3, 8)
    expected = model(x)
    to_dense(model)
    assert model[0] is model[2]
    assert model[0].bias.requires_grad
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="use its weight"):
        to_dense(layer)


def test_each_layer_has_a_seed_derived_from_its_name() -> None:
    assert seed_of(0, "up") == 0x4D000CC8CD8F9FDD >> 8  # from `printf "0 up" | sha256sum`
    assert len({seed_of(s, n) for s in range(9) for n in "ab"}) == 18
    for seed in (0, 7):
        model = Net()
        sketch(model, 0.5, "least_squares", seed=seed)
        assert isinstance(model.up, SKLinear)
        fresh = SKLinear(12, 24, 1, model.up.rank, seed=seed_of(seed, "up"))
        assert torch.equal(model.up.u1, fresh.u1)


def factored_names(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, FactoredLinear)]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        ("*", ["up", "down.0"]),
        ("down.*", ["down.0"]),
        (["down.?", "u[pq]"], ["up", "down.0"]),
        ("up", ["up"]),
    ],
)
def test_globs_select_the_layers(globs: Any, expected: list[str]) -> None:
    model = Net()
    assert [row.name for row in sketch(model, layers=globs).rows] == expected
    assert factored_names(model) == expected


def test_ranks_may_be_given() -> None:
    for rank, kinds in [
        (3, ["low rank 3", "low rank 3"]),
        ({"up": 2}, ["low rank 2", "low rank 4"]),  # 24 · 16 / 40 · 0.5 = 4.8
        ({"d*": 1, "*": 5}, ["low rank 5", "low rank 1"]),
        ({"*": 5, "d*": 1}, ["low rank 5", "low rank 5"]),
    ]:
        assert [row.kind for row in sketch(Net(), rank=rank).rows] == kinds
    model = Net()
    found = sketch(model, method="least_squares", num_terms=2, rank=5)
    assert [row.kind for row in found.rows] == ["2 terms of rank 2"] * 2
    assert model.up.rank == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, "expected 0 < keep <= 1, got 0.0"),
        ({"keep": 1.5}, "got 1.5"),
        ({"keep": math.nan}, "got nan"),
        ({"method": "qr"}, "'svd', 'least_squares', 'sketch'.*got 'qr'"),
        ({"num_terms": 0, "method": "sketch"}, "num_terms >= 1.*got 0"),
        ({"num_terms": 2}, "1 with method='svd', got 2"),
        ({"layers": "mlp.*"}, r"got 'mlp.\*'; the first of 2 are: up, down.0"),
        ({"layers": ["up", "dropout"]}, "got 'dropout'"),
        ({"rank": {"mlp": 3}}, "got 'mlp'"),
        ({"rank": -1}, "ranks >= 0, got -1"),
        ({"calibration": []}, "at least one calibration batch"),
        (
            {"calibration": [torch.full((1, 12), math.inf, dtype=torch.float64)]},
            "check the calibration inputs for inf and NaN",
        ),
        ({"layers": "up", "calibration": [torch.ones(2, 3, dtype=torch.float64)]}, None),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(
    arguments: dict[str, Any], message: str | None
) -> None:
    model = Net()
    modules = list(model.modules())
    with pytest.raises(ValueError if message else RuntimeError, match=message):
        sketch(model, **arguments)
    assert list(model.modules()) == modules
    assert all(m.training and not m._forward_pre_hooks for m in modules)


def test_a_bare_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="in the model, got '\\*'; the first of 0 are: none"):
        sketch(nn.Linear(8, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.read = nn.Linear(16, 8)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.embedding(tokens))
        x = self.attention(x, x, x)[0]
        return torch.cat([self.head(x), F.linear(x, self.read.weight)], -1)


def test_layers_that_cannot_be_converted_stay_dense_with_the_reason() -> None:
    model, tokens = Tied().eval(), torch.randint(32, (2, 5))
    found = sketch(model, calibration=[tokens])
    notes = {row.name: row.note for row in found.rows if row.kind == "dense"}
    assert notes["head"] == "left dense: its weight is shared with embedding.weight"
    assert notes["read"] == "left dense: calibration never ran it"
    assert notes["attention.out_proj"].startswith(
        "left dense: its type is NonDynamicallyQuantizable"
    )
    assert factored_names(model) == ["inner"]
    assert model(tokens).shape == (2, 5, 40)


def test_layers_that_would_not_become_smaller_stay_dense() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2), nn.Linear(16, 48))
    found = sketch(model, 1.0, rank={"0": 8, "1": 0})
    assert [row.note for row in found.rows] == [
        "left dense: rank 8 has 256 parameters, nn.Linear has 256",
        "left dense: its rank is 0",
        "left dense: rank 12 has 768 parameters, nn.Linear has 768",
    ]
    assert factored_names(model) == []
    assert found.before == found.after
    few = sketch(model, 0.1, "sketch", num_terms=4)  # 16 · 48 · 0.1 / 64 = 1.2 for four terms
    assert [row.note for row in few.rows] == ["left dense: its rank is 0"] * 3


def test_a_layer_with_fewer_parameters_but_more_flops_is_converted_with_a_note() -> None:
    model = nn.Sequential(nn.Linear(20, 20))
    row = sketch(model, 0.9, "least_squares").rows[0]
    assert row.kind == "1 term of rank 9"
    assert (row.before.stored, row.after.stored) == (400, 360)
    assert (row.before.forward, row.after.forward) == (800, 1440)
    assert row.note == "more FLOPs than nn.Linear"
    assert factored_names(model) == ["0"]


def test_sketched_layers_larger_than_dense_ones_are_reported() -> None:
    sizes = [(1024, 512, 512), (512, 256, 307), (256, 128, 179), (128, 10, 102)]
    with pytest.warns(UserWarning, match="parameters where nn.Linear has"):
        model = nn.Sequential(*(SKLinear(i, o, sketch_size=k) for i, o, k in sizes))
    found = report(model)
    assert [row.kind for row in found.rows] == [f"1 term of rank {k}" for *_, k in sizes]
    for row, stored, dense in zip(
        found.rows, [786432, 235776, 68736, 14076], [524288, 131072, 32768, 1280], strict=True
    ):
        assert row.note == "more parameters than nn.Linear"
        assert f"{dense:,} -> {stored:,}" in str(found)
        assert (row.before.forward, row.after.forward) == (2 * dense, 4 * stored)
        assert row.weight_error is row.activation_error is None
        layer = model[int(row.name)]
        counted = sum(p.numel() for n, p in layer.named_parameters() if n != "bias")
        assert (row.before.stored, row.after.stored) == (dense, counted)
    assert found.after.stored == 786432 + 235776 + 68736 + 14076


def test_the_report_is_a_table_and_a_dictionary() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    found = sketch(model, rank={"0": 4, "1": 0}, calibration=[torch.randn(50, 16)])
    head, first, second, total = str(found).splitlines()
    column = head.index("note")
    assert first.split() == [
        *["0", "low", "rank", "4", "256", "->", "128", "50.0%", "512", "->", "256", "50.0%"],
        f"{found.rows[0].weight_error:.4f}",
        f"{found.rows[0].activation_error:.4f}",
    ]
    assert second[column:] == "left dense: its rank is 0"
    assert total.split() == [
        *["total", "2", "layers", "288", "->", "160", "55.6%", "576", "->", "320", "55.6%"]
    ]
    assert first.index("128") == total.index("160")
    as_json = json.loads(json.dumps(found.as_dict()))
    assert as_json["totals"]["after"] == {"stored": 160, "forward": 320, "backward": 640}
    assert as_json["rows"][1]["weight_error"] is None
    assert as_json["rows"][0]["activation_error"] == found.rows[0].activation_error
    again = report(model)
    assert [row.kind for row in again.rows] == ["low rank 4", "dense"]
    assert again.after == found.after
    assert str(report(nn.ReLU())).splitlines()[-1].split()[:3] == ["total", "0", "layers"]
