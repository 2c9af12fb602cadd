"""`longspan verify`: it agrees where a layout is right, and says where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.verify import _compare_numbers, _compare_weights

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.global_batch=4",
]


def test_a_layout_that_is_right_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    wsd = ["layout.offload=true", "train.schedule=wsd", "train.steps=90", "train.decay=50"]
    assert main(["verify", *SMALL, *wsd, "layout.shard=2", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"]
    assert report["layout"] == "shard 2, ZeRO stage 3"
    assert [found["name"] for found in report["comparisons"]] == ["loss", "grad_norm", "weights"]
    assert all(found["largest"] <= found["tolerance"] for found in report["comparisons"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare: set an axis, for example layout.shard=2"),
        (
            ["layout.shard=2", "layout.tensor=2", "train.precision=fp16"],
            '"fp16" with layout.tensor is not there yet',
        ),
        (["layout.shard=2", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["layout.shard=3"], "× 3 data-parallel ranks: use 6"),
        (["layout.sequence=3"], "layout.sequence  3 does not divide data.context"),
    ],
)
def test_wrong_input_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_first_wrong_step_is_named() -> None:
    expected = [{"step": n, "loss": 2.0} for n in (1, 2, 3)]
    found = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.1}, {"step": 3, "loss": 3.0}]
    comparison = _compare_numbers("loss", found, expected, 1e-5)
    assert comparison.first_wrong == "step 2: 2.1 against 2"
    assert comparison.largest == pytest.approx(0.5)
    nan = [{"step": n, "loss": float("nan")} for n in (1, 2, 3)]
    assert _compare_numbers("loss", nan, expected, 1e-5).first_wrong is not None


def test_the_first_wrong_parameter_is_named(tmp_path: Path) -> None:
    runs = {}
    for name, lr in (("right", "0.001"), ("wrong", "0.002")):
        runs[name] = tmp_path / name
        options = [*SMALL, "train.steps=2", "train.warmup=0", "checkpoint.every=1", "track.prompt="]
        assert main(["train", *options, f"train.lr={lr}", "--run-dir", str(runs[name])]) == 0
    comparison = _compare_weights(runs["wrong"], runs["right"], 2, 1e-4)
    assert comparison.first_wrong is not None
    assert comparison.first_wrong.startswith("step 1, ")
    assert _compare_weights(runs["right"], runs["right"], 2, 1e-4).first_wrong is None
