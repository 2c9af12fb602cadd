"""Sketched and low-rank layers against their formulas, on one rank and tensor-parallel."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

from longspan.costs import Cost
from longspan.parallel.tensor import FeatureParallel
from longspan.sketching import LowRankLinear, SKLinear
from longspan.sketching.layers import FactoredLinear
from longspan.sketching.signs import random_signs
from tests.collectives import Collectives
from tests.harness import Ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:SKLinear .* computes")  # the layers here are small


def reference(x: Tensor, layer: SKLinear) -> Tensor:
    """1/(2l) Σ (x S1 U1 + x U2 S2) + b, term by term, in float64."""
    k, count = layer.low_rank, layer.num_terms
    y = torch.zeros(*x.shape[:-1], layer.out_features, dtype=torch.float64)
    for i in range(count):
        term = slice(i * k, (i + 1) * k)
        s1, s2 = layer.s1[:, term].double(), layer.s2[term].double()
        u1, u2 = layer.u1[term].double() / k**0.5, layer.u2[:, term].double() / k**0.5
        y += (x.double() @ s1 @ u1 + x.double() @ u2 @ s2) / (2 * count)
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("terms", "rank"), [(1, 5), (3, 4)])
def test_forward_equals_the_formula(terms: int, rank: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = SKLinear(96, 80, terms, rank, bias=bias, seed=3)
    x = torch.randn(2, 7, 96)
    torch.testing.assert_close(layer(x).double(), reference(x, layer), rtol=1e-6, atol=1e-6)
    same = linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SKLinear(12, 8, 2, 2, dtype=torch.float64),
        lambda: SKLinear(12, 8, 1, 2, bias=False, dtype=torch.float64),
        lambda: LowRankLinear(12, 8, 3, dtype=torch.float64),
    ],
    ids=["sketched", "without bias", "low rank"],
)
def test_gradients_pass_gradcheck(make: Callable[[], FactoredLinear]) -> None:
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def applied(x: Tensor, *values: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)
        return out

    assert torch.autograd.gradcheck(applied, (x, *layer.parameters()))


def test_frozen_factors_get_no_gradient() -> None:
    layer = SKLinear(12, 8, 1, 2)
    x = torch.randn(5, 12, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.s2)
    layer.s1.requires_grad_(False)
    layer(x.detach()).square().sum().backward()
    assert layer.s1.grad is None
    torch.testing.assert_close(layer.s2.grad, expected)


@pytest.mark.parametrize(
    "layer",
    [lambda: SKLinear(1024, 768, 4, 32), lambda: LowRankLinear(1024, 768, 128)],
    ids=["sketched", "low rank"],
)
def test_initial_outputs_have_the_variance_of_a_dense_layer(layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 1024)
    dense = torch.stack([nn.Linear(1024, 768)(x).var() for _ in range(8)]).mean()
    ours = torch.stack([layer()(x).var() for _ in range(8)]).mean()
    assert abs(ours / dense - 1) < 0.02


def lowbias32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_signs_never_change() -> None:
    """Checkpoints do not store signs: how they are generated is part of the format."""
    digest = hashlib.sha256(b"12 u1").digest()
    low, high = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")
    words = [lowbias32(lowbias32((w + low) % 2**32) ^ high) for w in range(8)]
    expected = [2 * (word >> j & 1) - 1 for word in words for j in range(32)]
    assert random_signs("12 u1", 5, 50, CPU).flatten().tolist() == expected[:250]
    assert random_signs("0 u1", 2, 8, CPU).tolist() == [
        [-1, -1, 1, 1, -1, 1, -1, 1],
        [-1, 1, 1, 1, 1, -1, 1, 1],
    ]


def test_signs_look_random() -> None:
    u, other = (random_signs(key, 512, 512, CPU).double() for key in ("7 u1", "8 u1"))
    noise = 512**-0.5
    assert abs(float(u.mean())) < 4 * noise / 512**0.5
    assert abs(float((u * other).mean())) < 4 * noise / 512**0.5
    for pairs in (u @ u.T / 512, u.T @ u / 512):
        off = pairs[~torch.eye(512, dtype=torch.bool)]
        assert abs(float(off.std()) / noise - 1) < 0.02
        assert float(off.abs().max()) < 6 * noise
    # Neighbours in a row, and the bits of one word, are uncorrelated.
    for shift in (1, 8, 16, 31, 32):
        assert abs(float((u[:, shift:] * u[:, :-shift]).mean())) < 5 / (512 * 480) ** 0.5


def test_a_state_dict_has_the_seed_and_no_signs() -> None:
    torch.manual_seed(0)
    layer, x = SKLinear(24, 16, 2, 3, seed=11), torch.randn(4, 24)
    saved = layer.state_dict()
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "s1": (24, 6),
        "s2": (6, 16),
        "bias": (16,),
        "_extra_state": (2,),
    }
    with torch.device("meta"):
        other = SKLinear(24, 16, 2, 3)
    other.to_empty(device="cpu").load_state_dict(saved)
    assert torch.equal(other(x), layer(x))
    assert not torch.equal(SKLinear(24, 16, 2, 3, seed=12).u1, layer.u1)
    with pytest.raises(ValueError, match="expected a state with num_terms=3, got 2"):
        SKLinear(24, 16, 3, 2).load_state_dict(saved)
    stored = SKLinear(24, 16, 2, 3, seed=11, store_signs=True)
    assert torch.equal(stored.state_dict()["bits1"], layer.bits1)
    assert stored.bits1 is not None
    stored.load_state_dict({**stored.state_dict(), "bits1": ~stored.bits1})
    assert torch.equal(stored.double().u1, -layer.u1)  # the loaded signs, not those of the seed


@pytest.mark.parametrize("store_signs", [True, False])
@pytest.mark.parametrize("start", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [True, False])
def test_an_uninitialised_layer_loads_a_state_dict(
    store_signs: bool, start: str, assign: bool
) -> None:
    layer, x = SKLinear(24, 16, 2, 3, seed=11, store_signs=store_signs), torch.randn(4, 24)
    other = SKLinear(24, 16, 2, 3, seed=5, store_signs=store_signs, device=start)
    if start == "cpu" or not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(copy.deepcopy(layer.state_dict()), assign=assign)
    assert torch.equal(other(x), layer(x))


def test_weight_is_that_of_the_equivalent_dense_layer_and_differentiable() -> None:
    layer, x = SKLinear(12, 8, 2, 2, dtype=torch.float64), torch.randn(5, 12).double()
    wanted = [layer.s1, layer.s2]
    ours = torch.autograd.grad(layer(x).square().sum(), wanted)
    dense = linear(x, layer.weight, layer.bias)
    for a, b in zip(ours, torch.autograd.grad(dense.square().sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_signs_survive_copies_and_casts() -> None:
    layer = SKLinear(24, 16, 2, 3, seed=11)
    for other in (copy.deepcopy(layer), layer.double(), layer.to("cpu"), layer.half()):
        assert torch.equal(other.u1, random_signs("11 u1", 6, 16, CPU))
        assert other.bits1 is not None
        assert other.bits1.nbytes == 12  # a bit each


def test_bf16_error_is_at_most_twice_that_of_a_dense_layer() -> None:
    torch.manual_seed(0)
    layer, x = SKLinear(64, 64, 1, 16), torch.randn(32, 64)
    exact = reference(x, layer)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = layer(x), linear(x, layer.weight, layer.bias)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_fp16_gradients_do_not_overflow() -> None:
    """The scale is part of the matrix product: unscaled, these gradients are 64 times larger."""
    torch.manual_seed(0)
    layer, x = SKLinear(64, 64, 4, 64, bias=False), torch.randn(64, 64, requires_grad=True)
    dy = (16384 * torch.randn(64, 64) / 64).half()
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    y.backward(dy)
    exact = torch.autograd.grad(reference(x, layer), [layer.s1, layer.s2], dy.double())
    for ours, gradient in zip((layer.s1.grad, layer.s2.grad), exact, strict=True):
        assert ours is not None
        assert (ours - gradient).norm() < 1e-2 * gradient.norm()


def test_it_takes_the_inputs_that_a_dense_layer_takes() -> None:
    layer = SKLinear(12, 8, 1, 2)
    assert layer(torch.randn(12)).shape == (8,)
    assert layer(torch.randn(0, 12)).shape == (0, 8)
    assert layer.to("meta")(torch.empty(3, 12, device="meta")).shape == (3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert SKLinear(12, 8, 1, 2).double()(torch.randn(3, 12).double()).dtype == torch.float64
    moved = SKLinear(12, 8, 1, 2)
    with torch.inference_mode():
        moved.to("cpu")
    moved(torch.randn(3, 12)).sum().backward()


def test_it_compiles_with_fullgraph() -> None:
    torch.manual_seed(0)
    layer, x = SKLinear(24, 16, 2, 3), torch.randn(4, 24, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(compiled(x).square().sum(), wanted)
    for a, b in zip(ours, torch.autograd.grad(layer(x).square().sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_sketch_size_is_the_rank_of_one_term() -> None:
    for layer in (SKLinear(64, 64, 8), SKLinear(64, 64, sketch_size=8)):
        assert (layer.num_terms, layer.low_rank, layer.rank) == (1, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "sketch_size alone"),
        ({"num_terms": 2, "low_rank": 2, "sketch_size": 2}, "sketch_size alone"),
        ({"num_terms": 2, "sketch_size": 2}, "sketch_size alone"),
        ({"low_rank": 2}, "num_terms and low_rank"),
        ({"num_terms": 0, "low_rank": 2}, "num_terms >= 1, got 0"),
        ({"num_terms": 2, "low_rank": 0}, "rank >= 1, got 0"),
        ({"num_terms": 2, "low_rank": 2, "seed": 1 << 63}, "expected 0 <= seed < 2"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SKLinear(64, 64, **arguments)


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected x \(\.\.\., 64\), got \(2, 32\)"):
        SKLinear(64, 64, 1, 4)(torch.randn(2, 32))


def test_a_layer_that_costs_more_than_a_dense_one_warns() -> None:
    larger = "rank 512 stores 786,432 parameters where nn.Linear has 524,288; computes "
    with pytest.warns(UserWarning, match=larger):
        SKLinear(1024, 512, sketch_size=512)
    slower = (
        "SKLinear 500 -> 500 of rank 160 computes 640,000 FLOPs per token forward where nn.Linear "
        "has 500,000; computes 1,600,000 FLOPs per token in training where nn.Linear has 1,500,000$"
    )
    with pytest.warns(UserWarning, match=slower):
        SKLinear(500, 500, sketch_size=160)  # which stores less
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SKLinear(1024, 512, 2, 32)
        LowRankLinear(1024, 512, 128)


def test_costs_equal_the_flops_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layers = [SKLinear(24, 16, 2, 3), LowRankLinear(16, 12, 3)]
    model, dense = nn.Sequential(*layers, nn.Linear(12, 8)), Cost.dense(12, 8)
    x = torch.randn(5, 24, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    expected = forward.get_total_flops() / 5, backward.get_total_flops() / 5
    cost = layers[0].cost + layers[1].cost + dense
    assert (cost.forward, cost.backward) == expected


def compare_sharded(rank: int, world: int, kind: str) -> dict[str, Any]:
    """One layer on one rank and sharded by features: the largest difference and the bytes sent."""
    torch.manual_seed(0)
    layer: FactoredLinear = (
        SKLinear(24, 16, 2, 3, seed=5, dtype=torch.float64)
        if kind == "sketched"
        else LowRankLinear(24, 16, 6, dtype=torch.float64)
    )
    x, dy = torch.randn(7, 24).double(), torch.randn(7, 16).double()
    full_x = x.clone().requires_grad_()
    expected = layer(full_x)
    expected.backward(dy)
    assert full_x.grad is not None
    sharded = copy.deepcopy(layer)
    sharded.zero_grad()
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(sharded, mesh, FeatureParallel())
    local_x = x.chunk(world, 1)[rank].clone().requires_grad_()
    with Collectives() as forward:
        y = sharded(local_x)
    with Collectives() as backward:
        y.backward(dy.chunk(world, 1)[rank])
    assert local_x.grad is not None
    differences = [
        y - expected.chunk(world, 1)[rank],
        local_x.grad - full_x.grad.chunk(world, 1)[rank],
    ]
    for name, parameter in sharded.named_parameters():
        gradient = layer.get_parameter(name).grad
        assert gradient is not None
        differences.append(parameter.grad.full_tensor() - gradient)  # type: ignore[union-attr]
    return {
        "difference": max(float(x.abs().max()) for x in differences),
        "forward": dict(forward.bytes),
        "backward": dict(backward.bytes),
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "elements"), [("sketched", 2 * 2 * 3), ("low rank", 6)])
def test_sharded_by_features_it_all_reduces_only_the_product_with_the_first_factor(
    ranks: Ranks, world: int, kind: str, elements: int
) -> None:
    """2 · terms · rank elements per token in each direction, and nothing else."""
    tokens, width = 7, 8
    for found in ranks.run(compare_sharded, world, kind):
        assert found["difference"] < 1e-12
        assert found["forward"] == {"all_reduce": tokens * elements * width}
        assert found["backward"] == {"all_reduce": tokens * elements * width}


def test_a_shard_count_that_does_not_divide_the_features_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible by 5 ranks, got 24 and 20"):
        SKLinear(24, 20, 1, 2).shard(0, 5)


def train_replicated(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Weights after three data-parallel steps, and the signs."""
    torch.manual_seed(0)
    model = nn.Sequential(SKLinear(24, 16, 1, 4, seed=1), nn.ReLU(), SKLinear(16, 4, 1, 2, seed=2))
    module: nn.Module = model
    if world > 1:
        module = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        module(batch.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), model[0].u1  # type: ignore[return-value]


def test_layers_train_under_ddp(ranks: Ranks) -> None:
    expected, u1 = train_replicated(0, 1)
    for weights, local_u1 in ranks.run(train_replicated, 2):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(local_u1, u1)
