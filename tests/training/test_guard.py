"""Skipped steps: counted, and after several in a row rolled back, on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import load, open_checkpoint
from longspan.data.prefetch import Prefetcher, StepData
from longspan.engines import native
from longspan.errors import Diverged
from longspan.parallel.world import World
from longspan.training import train
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from tests.harness import Ranks
from tests.parallel.test_apply import run_of

SHORT = ["train.global_batch=2", "model.layers=1", "train.schedule=constant", "checkpoint.keep=99"]


def train_with_bad_samples(
    rank: int,
    world: int,
    run_dir: str,
    options: list[str],
    samples: set[int],
    factor: float,
    prefetches: bool = True,
) -> list[list[int]]:
    """Train with the gradients of steps on some samples multiplied; returns each step's samples."""
    seen: list[list[int]] = []
    real_read, real_clip = Prefetcher.read, native.clip_grad_norm

    def read(data: Prefetcher, indices: list[int], following: list[int]) -> StepData:
        seen.append(indices)
        return real_read(data, indices, following if prefetches else [])

    def clip(model: Any, *arguments: Any) -> Any:
        if samples & set(seen[-1]):
            for parameter in model.parameters():
                parameter.grad *= factor
        return real_clip(model, *arguments)

    Prefetcher.read, native.clip_grad_norm = read, clip  # type: ignore[method-assign,assignment]
    try:
        run = run_of(world, *SHORT, *options)
        train(run, Path(run_dir), world=World(rank, world, rank))
    finally:
        Prefetcher.read, native.clip_grad_norm = real_read, real_clip  # type: ignore[method-assign]
    return seen


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    groups = ("model", "optimizer")
    return {f"{g}/{n}": x for g in groups for n, x in load(path, g).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_step_with_nan_gradients_changes_nothing(tmp_path: Path, optimizer: str) -> None:
    options = ["train.steps=4", "checkpoint.every=1", f"train.optimizer={optimizer}"]
    with torch.compiler.set_stance("force_eager"):
        train_with_bad_samples(0, 1, str(tmp_path), options, {4}, torch.nan)
    assert same(tensors(tmp_path, 2), tensors(tmp_path, 3))
    assert not same(tensors(tmp_path, 3), tensors(tmp_path, 4))
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["skipped_steps"] for line in found] == [0, 0, 1, 1]
    assert found[2]["grad_norm"] is None


ROLLBACK = ["train.steps=7", "checkpoint.every=2", "train.max_skipped_steps=3"]


@pytest.mark.parametrize(("world", "layout"), [(1, []), (2, ["layout.zero=3"])])
def test_several_in_a_row_are_rolled_back_and_their_samples_skipped(
    ranks: Ranks, tmp_path: Path, world: int, layout: list[str]
) -> None:
    run_dir, bad = tmp_path / "run", {6, 8, 10}
    arguments = (str(run_dir), [*ROLLBACK, *layout], bad, torch.nan)
    (seen, *others) = ranks.run(train_with_bad_samples, world, *arguments)
    assert all(other == seen for other in others)
    # Steps 4, 5 and 6 are skipped; the checkpoint of step 4 holds the weights of step 3.
    until = [[2 * i, 2 * i + 1] for i in range(6)]
    after = [[12, 13], [14, 15], [16, 17]]
    assert seen == [*until, *after]
    manifest = open_checkpoint(run_dir / "checkpoints/step-00000007").state
    assert manifest["skips"] == [[6, 12]]
    assert manifest["samples"] == 18
    messages = [line["rolled_back"] for line in lines(run_dir) if "rolled_back" in line]
    assert messages == [
        "3 skipped steps in a row: rolled back from step 6 to 4, skipping samples 6 to 11"
    ]


def test_a_resumed_run_skips_them_too(tmp_path: Path) -> None:
    """A run that is stopped after a rollback and resumed ends as if it had not stopped."""
    bad = {6, 8, 10}
    train_with_bad_samples(0, 1, str(tmp_path / "whole"), ROLLBACK, bad, torch.nan)
    stopped = [*ROLLBACK, "train.steps=6"]
    train_with_bad_samples(0, 1, str(tmp_path / "resumed"), stopped, bad, torch.nan)
    train(run_of(1, *SHORT, *ROLLBACK), tmp_path / "resumed", resume=True)
    whole = tensors(tmp_path / "whole", 7)
    assert same(whole, tensors(tmp_path / "resumed", 7))
    # Nor do samples that were read ahead before the rollback get into it.
    train_with_bad_samples(0, 1, str(tmp_path / "a"), ROLLBACK, bad, torch.nan, prefetches=False)
    assert same(whole, tensors(tmp_path / "a", 7))


def test_skipped_samples_are_left_out() -> None:
    state = TrainState.__new__(TrainState)
    state.samples, state.skips = 5, [(6, 8), (9, 10), (0, 3)]
    assert state.next_samples(4) == [5, 8, 10, 11]


def test_a_run_ends_where_a_rollback_does_not_help(tmp_path: Path) -> None:
    options = [
        "train.steps=9",
        "checkpoint.every=2",
        "train.max_skipped_steps=2",
        "train.max_rollbacks=1",
    ]
    with pytest.raises(Diverged, match=r"after 1 rollback: lower train\.lr"):
        train_with_bad_samples(0, 1, str(tmp_path), options, set(range(6, 99)), torch.nan)
    options.append("checkpoint.every=0")
    with pytest.raises(Diverged, match="and there is no checkpoint"):
        train_with_bad_samples(0, 1, str(tmp_path / "a"), options, {0, 2}, 1e39)


def test_a_spike_of_the_norm_is_skipped_once_the_average_is_known() -> None:
    guard = Guard(8.0, torch.device("cpu"))
    loss = torch.tensor(1.0)
    for norm in [100.0, *[1.0] * 30]:
        assert guard.must_skip(loss, torch.tensor(norm), may_overflow=False) == 0
    assert guard.must_skip(loss, torch.tensor(50.0), may_overflow=False) == 1
    assert guard.must_skip(loss, torch.tensor(torch.inf), may_overflow=False) == 1
    assert int(guard.skipped_in_a_row) == 2
    again = Guard(8.0, torch.device("cpu"))
    again.load_norm_average(guard.norm_average())
    assert again.norm_average() == guard.norm_average()
    assert again.must_skip(loss, torch.tensor(2.0), may_overflow=False) == 0
    assert again.must_skip(loss, torch.tensor(50.0), may_overflow=False) == 1
    # With fp16 loss scaling infinite gradients are expected now and then.
    assert guard.must_skip(loss, torch.tensor(torch.inf), may_overflow=True) == 1  # a spike
    lenient = Guard(0.0, torch.device("cpu"))
    assert lenient.must_skip(loss, torch.tensor(torch.inf), may_overflow=True) == 0
    assert lenient.must_skip(loss * torch.nan, torch.tensor(1.0), may_overflow=True) == 1
