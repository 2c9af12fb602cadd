"""Bad steps: skipped, counted, and after some in a row undone, on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import load, open_checkpoint
from longspan.errors import Diverged
from longspan.parallel.world import World
from longspan.training import loop, train
from longspan.training.guard import Guard
from longspan.training.state import State
from tests.harness import Ranks
from tests.parallel.test_apply import run_of

SHORT = ["train.global_batch=2", "model.layers=1", "train.schedule=constant", "checkpoint.keep=99"]


def poisoned(samples: set[int], factor: float = torch.nan) -> tuple[Any, Any, list[list[int]]]:
    """`next_samples` and `clip_gradients` for which gradients of some samples are multiplied, and
    the samples of each step.
    """
    seen: list[list[int]] = []
    real_next, real_clip = State.next_samples, loop.Placement.clip_gradients

    def next_samples(state: State, count: int) -> list[int]:
        seen.append(real_next(state, count))
        return seen[-1]

    def clip(placed: Any, model: Any, limit: float) -> Any:
        if samples & set(seen[-1]):
            for parameter in model.parameters():
                parameter.grad *= factor
        return real_clip(placed, model, limit)

    return next_samples, clip, seen


def train_poisoned(
    rank: int, world: int, run_dir: str, options: list[str], samples: set[int], factor: float
) -> list[list[int]]:
    real = State.next_samples, loop.Placement.clip_gradients
    next_samples, clip, seen = poisoned(samples, factor)
    State.next_samples, loop.Placement.clip_gradients = next_samples, clip  # type: ignore[method-assign]
    try:
        run = run_of(world, *SHORT, *options)
        train(run, Path(run_dir), world=World(rank, world, rank))
    finally:
        State.next_samples, loop.Placement.clip_gradients = real  # type: ignore[method-assign]
    return seen


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    groups = ("model", "optimizer")
    return {f"{g}/{n}": x for g in groups for n, x in load(path, g).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_step_that_is_no_number_changes_nothing(tmp_path: Path, optimizer: str) -> None:
    options = ["train.steps=4", "checkpoint.every=1", f"train.optimizer={optimizer}"]
    with torch.compiler.set_stance("force_eager"):
        train_poisoned(0, 1, str(tmp_path), options, {4}, torch.nan)
    assert same(tensors(tmp_path, 2), tensors(tmp_path, 3))
    assert not same(tensors(tmp_path, 3), tensors(tmp_path, 4))
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["skipped_steps"] for line in found] == [0, 0, 1, 1]
    assert found[2]["grad_norm"] is None


ROLLED = ["train.steps=7", "checkpoint.every=2", "train.max_skipped_steps=3"]


@pytest.mark.parametrize(("world", "layout"), [(1, []), (2, ["layout.zero=3"])])
def test_some_in_a_row_are_undone_and_their_samples_left_out(
    ranks: Ranks, tmp_path: Path, world: int, layout: list[str]
) -> None:
    run_dir, bad = tmp_path / "run", {6, 8, 10}
    arguments = (str(run_dir), [*ROLLED, *layout], bad, torch.nan)
    (seen, *others) = ranks.run(train_poisoned, world, *arguments)
    assert all(other == seen for other in others)
    # Steps 4, 5 and 6 are bad; the checkpoint of step 4 holds what step 3 had made.
    until = [[2 * i, 2 * i + 1] for i in range(6)]
    after = [[12, 13], [14, 15], [16, 17]]
    assert seen == [*until, *after]
    manifest = open_checkpoint(run_dir / "checkpoints/step-00000007").state
    assert manifest["skips"] == [[6, 12]]
    assert manifest["samples"] == 18
    said = [line["rolled_back"] for line in lines(run_dir) if "rolled_back" in line]
    assert said == ["3 bad steps in a row: back from step 6 to 4, leaving out the samples 6 to 11"]


def test_a_resumed_run_leaves_them_out_too(tmp_path: Path) -> None:
    """Stopped after it went back, and gone on with: as if it had not stopped."""
    bad = {6, 8, 10}
    train_poisoned(0, 1, str(tmp_path / "whole"), ROLLED, bad, torch.nan)
    train_poisoned(0, 1, str(tmp_path / "parts"), [*ROLLED, "train.steps=6"], bad, torch.nan)
    train(run_of(1, *SHORT, *ROLLED), tmp_path / "parts", resume=True)
    assert same(tensors(tmp_path / "whole", 7), tensors(tmp_path / "parts", 7))


def test_samples_left_out_are_passed_over() -> None:
    state = State.__new__(State)
    state.samples, state.skips = 5, [(6, 8), (9, 10), (0, 3)]
    assert state.next_samples(4) == [5, 8, 10, 11]


def test_it_ends_where_going_back_does_not_help(tmp_path: Path) -> None:
    options = [
        "train.steps=9",
        "checkpoint.every=2",
        "train.max_skipped_steps=2",
        "train.max_rollbacks=1",
    ]
    with pytest.raises(Diverged, match=r"after 1 ways back: lower train\.lr"):
        train_poisoned(0, 1, str(tmp_path), options, set(range(6, 99)), torch.nan)
    with pytest.raises(Diverged, match="and no checkpoint to go back to"):
        train_poisoned(0, 1, str(tmp_path / "a"), [*options, "checkpoint.every=0"], {0, 2}, 1e39)


def test_a_norm_that_stands_out_is_skipped_once_the_usual_one_is_known() -> None:
    guard = Guard(8.0, torch.device("cpu"))
    loss = torch.tensor(1.0)
    for norm in [100.0, *[1.0] * 30]:
        assert guard.judge(loss, torch.tensor(norm), overflows=False) == 0
    assert guard.judge(loss, torch.tensor(50.0), overflows=False) == 1
    assert guard.judge(loss, torch.tensor(torch.inf), overflows=False) == 1
    assert int(guard.streak) == 2
    again = Guard(8.0, torch.device("cpu"))
    again.set_usual(guard.usual())
    assert again.usual() == guard.usual()
    assert again.judge(loss, torch.tensor(2.0), overflows=False) == 0
    assert again.judge(loss, torch.tensor(50.0), overflows=False) == 1
    # A scaler of fp16 gradients meets infinite ones in the course of things.
    assert guard.judge(loss, torch.tensor(torch.inf), overflows=True) == 1  # it stands out
    lenient = Guard(0.0, torch.device("cpu"))
    assert lenient.judge(loss, torch.tensor(torch.inf), overflows=True) == 0
    assert lenient.judge(loss * torch.nan, torch.tensor(1.0), overflows=True) == 1
