"""`longspan plan --check`: the plan against the training code in a world without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longspan.cli import main
from longspan.config import Run
from longspan.planning import check
from longspan.planning.check import check_plan
from longspan.planning.traffic import Traffic
from longspan.runfile import load_run

SMALL = [
    "model.hidden=64",
    "model.heads=4",
    "model.layers=8",
    "data.context=1024",
    "attention.segment_lengths=[64,1024]",
    "attention.dilation_rates=[1,4]",
    "train.precision=bf16",
]


def run_of(world: int, *options: str) -> Run:
    return load_run(None, [*SMALL, *options], world=world)


@pytest.mark.parametrize(
    ("world", "options", "ranks"),
    [
        (1, [], 1),
        (2, ["layout.replicate=2", "layout.shard=1", "train.global_batch=2"], 2),
        (
            1024,
            [
                "layout.pipeline=4",
                "layout.tensor=2",
                "layout.sequence=4",
                "layout.replicate=2",
                "train.global_batch=256",
            ],
            9,
        ),
        (
            4,
            [
                "model.layers=4",
                "model.learnable_sinks=true",
                'attention.layers=[{kind="window",window=40,repeat=2},{kind="dense"},{}]',
                "layout.pipeline=2",
                "layout.sequence=2",
                "train.global_batch=2",
                'train.freeze=["blocks.1.*","norm.*"]',
            ],
            4,
        ),
    ],
)
def test_the_plan_is_what_the_training_code_does(
    world: int, options: list[str], ranks: int
) -> None:
    found = check_plan(run_of(world, *options), world)
    assert found.differences == []
    assert len(found.ranks) == ranks
    assert found.tensors >= 9 * ranks
    assert "as planned" in str(found)


def test_differences_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a plan with an all-reduce too many, and a shard too large."""
    run = run_of(2, "layout.tensor=2")
    planned, parameters = check.communication, check.ModelSplit.parameters

    def too_many(*args: Any, **options: Any) -> list[Traffic]:
        first, *rest = planned(*args, **options)
        return [replace(first, calls=first.calls + 1), *rest]

    def too_large(split: Any, rank: int) -> list[Any]:
        first, *rest = parameters(split, rank)
        return [first._replace(local=first.local + 1), *rest]

    monkeypatch.setattr(check, "communication", too_many)
    monkeypatch.setattr(check.ModelSplit, "parameters", too_large)
    text = str(check_plan(run, 2))
    assert main(["plan", *SMALL, "layout.tensor=2", "--check"]) == 1
    assert "all_reduce of 2 ranks: 13 calls" in capsys.readouterr().out
    assert "ranks 0, 1 of 2 differ from the plan" in text
    assert "rank 1: embedding.weight has 8,192 local elements, planned were 8,193" in text
    assert "all_reduce of 2 ranks: 13 calls with" in text
    assert "planned were 14 with" in text
