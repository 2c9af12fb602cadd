"""`train.parameter_precision`: bf16 matrices, updated with stochastic rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from longspan.checkpoint import load
from longspan.config import Train
from longspan.engines.optimizer import build_optimizer
from longspan.errors import UserError
from longspan.planning import memory_per_rank
from longspan.runfile import load_run
from tests.engines.test_optimizer import EIGHT_BIT, final, losses, run_of, train_eagerly
from tests.slow import slow

BF16 = [
    "train.precision=bf16",
    "train.parameter_precision=bf16",
    EIGHT_BIT,
    "train.micro_batch=2",
]


@slow("parity")
def test_losses_fall_like_those_of_float32_parameters(tmp_path: Path) -> None:
    train_eagerly(run_of("train.micro_batch=2"), tmp_path / "fp32")
    train_eagerly(run_of(*BF16), tmp_path / "bf16")
    exact, found = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert exact[-1] < 0.7 * exact[0]
    last, expected = sum(found[-10:]) / 10, sum(exact[-10:]) / 10
    assert last == pytest.approx(expected, rel=0.03)


def test_a_checkpoint_holds_bf16_matrices_and_float32_moments(tmp_path: Path) -> None:
    """A resumed run rounds as the whole one does: the generator is saved as well."""
    short = ["data.context=64", "attention.segment_lengths=[64]"]
    train_eagerly(run_of(*BF16, *short, steps=2), tmp_path / "whole")
    train_eagerly(run_of(*BF16, *short, steps=1), tmp_path / "resumed")
    train_eagerly(run_of(*BF16, *short, steps=2), tmp_path / "resumed", resume=True)
    whole, resumed = final(tmp_path / "whole", 2), final(tmp_path / "resumed", 2)
    for name, weight in whole.items():
        assert weight.dtype == (torch.bfloat16 if weight.dim() > 1 else torch.float32), name
        # But for scales of 8-bit moments, which are restored to within rounding.
        assert (resumed[name] != weight).float().mean() < 0.01 or weight.dim() == 1, name
    moments = load(tmp_path / "whole" / "checkpoints" / "step-00000002", "optimizer")
    assert {x.dtype for x in moments.values()} == {torch.float32}
    train_eagerly(run_of(*short, steps=3), tmp_path / "whole", resume=True)  # or in float32
    assert {x.dtype for x in final(tmp_path / "whole", 3).values()} == {torch.float32}


def test_rounding_is_unbiased() -> None:
    """Steps of 1/16 of the spacing of bf16 numbers: rounded to nearest, nothing would move."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    step = 2**-7 / 16  # the spacing above 1 is 2^-7
    options = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "lr": step}
    train = Train(optimizer="adamw8bit", parameter_precision="bf16", precision="bf16", **options)
    with torch.compiler.set_stance("force_eager"):
        optimizer = build_optimizer(model, train)
        torch.manual_seed(0)
        for _ in range(8):
            model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step()
    moved = model.weight.detach().float() - 1
    assert set(moved.unique().tolist()) <= {n * 2**-7 for n in range(9)}
    # Of 4,096 weights, each moves by a spacing with probability 1/16 in each of 8 steps.
    error = 2**-7 * (8 / 16 * 15 / 16 / 4096) ** 0.5
    assert moved.mean().item() == pytest.approx(8 * step, abs=4 * error)


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["train.precision=fp32"], 1, 'needs train.precision = "bf16", but it is "fp32"'),
        (["train.optimizer=adamw"], 1, 'needs train.optimizer = "adamw8bit"'),
        (["engine.name=accelerate"], 1, 'needs engine.name = "native"'),
        (["layout.shard=2", "train.micro_batch=1"], 2, "needs one process"),
        (["layout.offload=true"], 1, "not supported with layout.offload"),
        (["train.micro_batch=1"], 1, "needs one micro-batch per step"),
        (["train.halve_on_oom=true"], 1, "is not supported with train.halve_on_oom"),
        (["train.chunk_tokens=64"], 1, "not supported with train.chunk_tokens"),
        (["model.lora.rank=4"], 1, "not supported with model.lora"),
        (["model.linear=sketched"], 1, 'needs model.linear = "dense"'),
    ],
)
def test_what_does_not_honour_it_is_refused(options: list[str], world: int, message: str) -> None:
    with pytest.raises(UserError, match=f"(?m)^  train.parameter_precision .*{message}"):
        load_run(None, [*BF16, "train.global_batch=2", *options], world=world)


def test_six_bytes_per_parameter_are_planned() -> None:
    options = ["model.preset=1.3b", "data.context=1024", "train.global_batch=2", *BF16]
    (found,) = memory_per_rank(load_run(None, options), 1)
    count = found.parameters // 2
    assert found.gradients == found.parameters
    assert found.optimizer == pytest.approx(2 * count, rel=0.05)
    assert "16-bit copies of weights" not in found.peak
