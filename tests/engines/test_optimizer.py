"""8-bit moments: nearly the same losses, and the same checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.optim import AdamW8bit

from longspan.checkpoint import load
from longspan.config import Run
from longspan.engines.eight_bit import EightBitAdamW
from longspan.engines.optimizer import build_optimizer, step_unless
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks

EIGHT_BIT = "train.optimizer=adamw8bit"


def run_of(*overrides: str, world: int = 1, steps: int = 40) -> Run:
    """A run that ends after `steps`, which may lie within its warmup."""
    small = [
        "model.hidden=64",
        "model.heads=2",
        "data.context=256",
        "attention.segment_lengths=[256]",
        "attention.dilation_rates=[1]",
        "train.steps=40",
        "train.warmup_steps=5",
        "train.lr=0.003",
        "train.global_batch=2",
        "train.schedule=constant",
        "track.log_every=1",
        "track.prompt=",
        "checkpoint.keep=10",
    ]
    run = load_run(None, [*small, *overrides], world=world)
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def train_eagerly(run: Run, run_dir: Path, *, resume: bool = False, world: World | None = None):  # type: ignore[no-untyped-def]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes long
        return train(run, run_dir, resume=resume, world=world)


def test_8_bit_moments_train_like_32_bit_moments(tmp_path: Path) -> None:
    train(run_of(), tmp_path / "32")
    train_eagerly(run_of(EIGHT_BIT), tmp_path / "8")
    exact, found = losses(tmp_path / "32"), losses(tmp_path / "8")
    assert exact[-1] < 0.7 * exact[0]
    last, expected = sum(found[-10:]) / 10, sum(exact[-10:]) / 10
    assert last == pytest.approx(expected, rel=0.01)
    assert found != exact


def final(run_dir: Path, steps: int) -> dict[str, torch.Tensor]:
    return load(run_dir / "checkpoints" / f"step-{steps:08d}", "model")


def test_no_weight_jumps_whose_gradient_was_far_below_others_of_its_block() -> None:
    """Its second moment, 1e-8 of the largest one, is below the smallest code."""
    layer = torch.nn.Linear(64, 64, bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, run_of(EIGHT_BIT).train)
    (lr,) = {group["lr"] for group in optimizer.param_groups}
    with torch.compiler.set_stance("force_eager"):
        for small in (1e-4, 0.0):  # at the second step there is its first moment alone
            gradient = torch.full((64, 64), small)
            gradient[::4, 0] = 1.0
            layer.weight.grad = gradient
            optimizer.step()
    change = (layer.weight.detach() - before).abs()
    assert lr < change[0, 0] < 2.5 * lr
    assert change.max() < 2.5 * lr


def eight_bit_pair(dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], Any, Any]:
    """Parameters, a matrix whose moments have 8 bits and a vector, with our optimizer; torchao's,
    with the same codes, of copies of them.
    """
    shapes = (64, 96), (24,)
    ours = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    class Reference(EightBitAdamW):
        step = AdamW8bit.step

    is_rounded = dtype == torch.bfloat16
    found = (
        kind([{"params": parameters}], is_rounded=is_rounded, **options)
        for kind, parameters in ((EightBitAdamW, ours), (Reference, theirs))
    )
    return ours, *found


def bits(optimizer: Any) -> list[torch.Tensor]:
    """Parameters and moments."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            moments = state["exp_avg"], state["exp_avg_sq"]
            found += [p.detach(), *(m.dequantize() if hasattr(m, "codes") else m for m in moments)]
    return [x.clone() for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_steps_are_those_of_torchao(dtype: torch.dtype) -> None:
    _, ours, theirs = eight_bit_pair(dtype)
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            for a, b in zip(*(o.param_groups[0]["params"] for o in (ours, theirs)), strict=True):
                a.grad = (torch.randn(a.shape) * 10.0 ** torch.randint(-4, 1, a.shape)).to(dtype)
                b.grad = a.grad.clone()
            for optimizer in (ours, theirs):
                torch.manual_seed(step)  # of what bf16 is rounded by
                optimizer.step()
    for a, b in zip(bits(ours), bits(theirs), strict=True):
        assert torch.equal(a, b)


def test_a_skipped_step_changes_no_bit() -> None:
    parameters, optimizer, _ = eight_bit_pair(torch.float32)
    with torch.compiler.set_stance("force_eager"):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
        before = bits(optimizer)
        for p in parameters:
            p.grad = torch.full_like(p, math.nan)
        step_unless(torch.tensor(1.0), optimizer)
        assert all(map(torch.equal, bits(optimizer), before))
        assert all(state["step"] == 1 for state in optimizer.state.values())
        for p in parameters:
            p.grad = torch.randn_like(p)
        step_unless(torch.tensor(0.0), optimizer)
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert not any(map(torch.equal, bits(optimizer), before))


def test_a_run_resumes_with_the_same_8_bit_moments(tmp_path: Path) -> None:
    """Checkpoints hold them in 32 bits; rounded to 8 again, a few in 100,000 lie between two."""
    train_eagerly(run_of(EIGHT_BIT, steps=6), tmp_path / "whole")
    train_eagerly(run_of(EIGHT_BIT, steps=3), tmp_path / "resumed")
    train_eagerly(run_of(EIGHT_BIT, steps=6), tmp_path / "resumed", resume=True)
    whole, resumed = final(tmp_path / "whole", 6), final(tmp_path / "resumed", 6)
    for name, weight in whole.items():
        assert (resumed[name] - weight).norm() <= 1e-5 * weight.norm(), name


def train_rank(rank: int, world: int, steps: int, run_dir: str) -> None:
    run = run_of(EIGHT_BIT, world=world, steps=steps)
    train_eagerly(run, Path(run_dir), world=World(rank, world, rank))


def test_sharded_8_bit_moments_resume_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """To within 8-bit precision: small shards stay in 32 bits, the full tensors do not."""
    train_eagerly(run_of(EIGHT_BIT, steps=6), tmp_path / "whole")
    ranks.run(train_rank, 2, 3, str(tmp_path / "resumed"))
    train_eagerly(run_of(EIGHT_BIT, steps=6), tmp_path / "resumed", resume=True)
    whole, resumed = final(tmp_path / "whole", 6), final(tmp_path / "resumed", 6)
    for name, weight in whole.items():
        assert (resumed[name] - weight).norm() <= 5e-3 * weight.norm(), name
