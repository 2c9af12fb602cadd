"""8-bit moments: nearly the same losses, and the same checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.checkpoint import load
from longspan.config import Run
from longspan.engines.optimizer import build_optimizer
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
