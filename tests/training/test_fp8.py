"""`train.fp8`: products of the blocks' linear layers in fp8.

The CPU multiplies fp8 tensors with the operator that GPUs do (`aten._scaled_mm`), so that what a
run on a CPU refuses can be tested on one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longspan.checkpoint import checkpoint_path, open_checkpoint
from longspan.config import Run
from longspan.create import create_model
from longspan.device import FP8_CAPABILITY, check_fp8, resolve
from longspan.errors import UserError
from longspan.models import build_decoder, parameter_shapes
from longspan.nn import eval_mode
from longspan.nn.fp8 import FP8Linear, convert_to_fp8
from longspan.parallel.apply import apply_to_blocks
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import COMPARED, run_of
from tests.slow import slow
from tests.steps import CPU, Steps, assert_same_steps, run_steps

Array = NDArray[np.float64]
FP8 = ["train.fp8=true", "train.device=auto", "train.precision=bf16"]
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Formats: bits of the mantissa, the least exponent of normal numbers, the largest number."""


def rounded(x: Array, kind: tuple[int, int, float]) -> Array:
    """x divided by the power of two that takes it into the range of fp8, rounded, and back."""
    bits, least, largest = kind
    scale = 2.0 ** np.floor(np.log2(largest / np.abs(x).max()))
    exponent = np.maximum(np.frexp(x * scale)[1] - 1, least)
    step = 2.0 ** (exponent - bits)
    found: Array = np.round(x * scale / step) * step / scale  # to even, as fp8 is
    return found


def of(x: Tensor) -> Array:
    found: Array = x.detach().cpu().double().numpy()
    return found


@pytest.mark.parametrize("tokens", [32, 21])
@pytest.mark.parametrize(
    ("device", "compiles", "tolerance"),
    [
        ("cpu", False, 1e-6),
        # Its units sum in fewer bits than float32.
        pytest.param("cuda", False, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", True, 1e-3, marks=pytest.mark.gpu),
    ],
)
def test_a_layer_computes_products_of_rounded_factors(
    device: str, compiles: bool, tolerance: float, tokens: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(48, 32))
    layer[0].weight.data.mul_(torch.logspace(-4, 1, 32)[:, None])
    x = torch.randn(2, tokens, 48).mul(torch.logspace(-6, 2, 48))
    gradient = torch.randn(2, tokens, 32) * 1e-4
    layer, x, gradient = layer.to(device), x.to(device).requires_grad_(), gradient.to(device)
    convert_to_fp8([layer])
    y = (torch.compile(layer, fullgraph=True) if compiles else layer)(x)
    y.backward(gradient)
    x8, w8 = rounded(of(x).reshape(-1, 48), E4M3), rounded(of(layer[0].weight), E4M3)
    g8 = rounded(of(gradient).reshape(-1, 32), E5M2)
    assert x.grad is not None
    expected = {
        "y": (of(y).reshape(-1, 32), x8 @ w8.T + of(layer[0].bias)),
        "gradient of x": (of(x.grad).reshape(-1, 48), g8 @ w8),
        "gradient of W": (of(layer[0].weight.grad), g8.T @ x8),
    }
    for name, (found, oracle) in expected.items():
        scale = np.linalg.norm(oracle, axis=-1, keepdims=True)
        assert np.abs(found - oracle).max() / scale.max() < tolerance, name
    assert not np.allclose(x8, of(x).reshape(-1, 48), rtol=1e-2)  # 8 bits are few
    with eval_mode(layer):
        exact = torch.nn.functional.linear(x, layer[0].weight, layer[0].bias)
        assert torch.equal(layer(x), exact)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_autocast_weights_are_rounded_to_bf16_first(backend: str) -> None:
    """And gradients keep their smallest rows: compiled too, with tokens to be filled up."""
    layer = nn.Sequential(nn.Linear(48, 32))
    x = torch.randn(2, 21, 48).bfloat16().float().requires_grad_()
    rows = torch.logspace(0, -8, 42)[:, None]
    gradient = (torch.randn(42, 32) * rows * 1e-8).bfloat16()
    convert_to_fp8([layer])
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    y.backward(gradient.view_as(y))
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    weight = layer[0].weight
    x8, w8 = rounded(of(x).reshape(-1, 48), E4M3), rounded(of(weight.bfloat16().float()), E4M3)
    g8 = rounded(of(gradient.float()), E5M2)
    for found, oracle in (
        (of(y.float()).reshape(-1, 32), x8 @ w8.T + of(layer[0].bias)),
        (of(x.grad).reshape(-1, 48), g8 @ w8),
        (of(weight.grad), g8.T @ x8),
    ):
        errors = np.linalg.norm(found - oracle, axis=-1) / np.linalg.norm(oracle, axis=-1)
        assert errors.max() < 2**-8  # bf16, twice


@pytest.mark.parametrize("largest", [0.0, 1e-36, 3e38])
def test_factors_of_any_magnitude_are_scaled(largest: float) -> None:
    layer = nn.Linear(16, 16, bias=False)
    convert_to_fp8([layer])
    assert type(layer) is FP8Linear
    layer.weight.data = torch.eye(16)
    x = torch.full((16, 16), largest)
    expected = x if largest > 1e-30 else torch.zeros_like(x)
    torch.testing.assert_close(layer(x), expected, rtol=2**-4, atol=0)


def in_fp8(world: int, *overrides: str) -> Run:
    run = run_of(world, *overrides, "train.device=cpu")
    return run.model_copy(update={"train": run.train.model_copy(update={"fp8": True})})


def steps_in_fp8(rank: int, world: int, overrides: list[str]) -> Steps:
    return run_steps(rank, world, in_fp8(world, *overrides), COMPARED)


LAYOUTS = [
    ["layout.replicate=2", "layout.shard=1"],
    ["layout.pipeline=2", "train.activation_checkpointing=full"],
    ["layout.sequence=2"],
    ["layout.zero=2", "train.chunk_tokens=16"],
]


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.zero=3", "train.activation_checkpointing=selective"],
        *(pytest.param(layout, marks=slow("parity")) for layout in LAYOUTS),
    ],
)
def test_no_layout_changes_what_is_rounded(ranks: Ranks, layout: list[str]) -> None:
    """To 1e-5 in float32, since scales are powers of two: values on other ranks do not matter."""
    single, plain = steps_in_fp8(0, 1, []), run_steps(0, 1, run_of(1), COMPARED)
    assert_same_steps(ranks.run(steps_in_fp8, 2, layout), single)
    difference = (single.losses[:, 0] / plain.losses[:, 0] - 1).abs()
    assert 1e-5 < difference.max() < 1e-2


def test_a_run_resumes_with_it_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was begun in bf16 goes on in fp8, and ends in bf16."""
    for place in ("longspan.device", "longspan.training.loop"):
        monkeypatch.setattr(f"{place}.check_fp8", lambda *_: None)  # of a CPU
    options = ["train.precision=bf16", "train.warmup_steps=1", "train.schedule=constant"]
    options.append("checkpoint.keep=3")
    modes = []
    original = FP8Linear.forward

    def count(layer: FP8Linear, x: Tensor) -> Tensor:
        modes.append(layer.training)
        return original(layer, x)

    monkeypatch.setattr(FP8Linear, "forward", count)
    for step, kind in enumerate((run_of, in_fp8, run_of), start=1):
        train(kind(1, *options, f"train.steps={step}"), tmp_path, resume=step > 1)
        assert set(modes) == ({True, False} if step == 2 else set())  # it trains, and evaluates
        modes.clear()
    folder = tmp_path / "checkpoints"
    first, second = (open_checkpoint(checkpoint_path(folder, step)) for step in (1, 2))
    for group in ("model", "optimizer"):
        assert first.shapes(group) == second.shapes(group)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_gradient(mode: str) -> None:
    def gradients(mode: str) -> dict[str, Tensor]:
        run = in_fp8(1, f"train.activation_checkpointing={mode}")
        model = build_decoder(run, CPU)
        names = parameter_shapes(model).keys()
        apply_to_blocks(model, run.train.model_copy(update={"compile": False}))
        tokens = torch.arange(64)[None] % run.model.vocab
        model(tokens, tokens.roll(-1)).backward()  # type: ignore[no-untyped-call]
        found = {
            n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()
        }
        assert found.keys() == names
        return {name: p.grad for name, p in found.items() if p.grad is not None}

    expected, found = gradients("none"), gradients(mode)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["train.precision=fp32"], 1, 'needs train.precision = "bf16", but it is "fp32"'),
        (["train.device=cpu"], 1, 'needs a GPU, but train.device is "cpu"'),
        (["engine.name=accelerate"], 1, 'needs engine.name = "native"'),
        (["model.linear=sketched"], 1, 'needs model.linear = "dense"'),
        (["model.lora.rank=4", "train.init_from=x"], 1, "not supported with model.lora"),
        (["model.ffn=200"], 1, "mlp.gate maps 128 features to 200"),
        (["layout.tensor=2"], 2, "not supported with layout.tensor = 2"),
        (["layout.pipeline=2", "layout.schedule=zbv", "model.layers=4"], 2, "zbv"),
    ],
)
def test_what_does_not_support_it_is_refused(options: list[str], world: int, message: str) -> None:
    with pytest.raises(UserError, match=f"(?m)^  train.fp8 .*{message}"):
        load_run(None, [*FP8, *options], world=world)


def test_devices_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(None, FP8, world=1)
    with pytest.raises(UserError, match="needs a GPU, but the device is a CPU"):
        resolve(run, CPU)
    with pytest.raises(UserError, match="needs a GPU, but the device is a CPU"):
        create_model("train.fp8=true", "data.context=64")
    assert resolve(run, torch.device("cuda")).train.fp8  # for a plan
    capability = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(UserError, match=r"capability 8\.9 or newer, but A100 has 8\.0"):
        check_fp8(run.train, torch.device("cuda", 0))
    capability[:] = FP8_CAPABILITY
    check_fp8(run.train, torch.device("cuda", 0))
