"""`longspan plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longspan.cli import main

SMALL = [
    "model.hidden=64",
    "model.heads=4",
    "model.layers=4",
    "data.context=64",
    "train.global_batch=8",
]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *SMALL, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_form_of_a_run_is_one_of_those_compared(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["model.linear=sketched", "model.sketch.keep=0.25", "--gpus", "4"]
    found = planned(capsys, *options, "train.micro_batch=1")
    (form,) = [f for f in found["forms"] if (f["linear"], f["share"]) == ("sketched", "1/4")]
    (stage,) = found["stages"]
    assert form["parameters"] == found["parameters"]
    assert form["device_bytes"] == stage["on_device"]
    assert form["flops_per_token"] == found["matrix_flops"] + found["attention_flops"]
    assert found["precision"] == "bf16"


def test_there_is_a_column_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["layout.pipeline=2", "train.micro_batch=1"]
    assert main(["plan", *SMALL, *pipeline]) == 0
    text = capsys.readouterr().out
    assert "pipeline 0  pipeline 1\n" in text
    assert "2 processes" in text
    found = planned(capsys, *pipeline)
    assert len(found["stages"]) == 2
    held = sum(stage["parameters"] for stage in found["stages"])
    assert held == 4 * (found["parameters"] + 256 * 64)  # the tied embedding is on both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--gpus", "3"], "train.global_batch  8 is not a multiple of"),
        (["engine.name=deepspeed"], "use engine.name=native"),
        (["layout.tensor=2", "--gpus", "3"], "layout"),
    ],
    ids=["none", "batch", "engine", "layout"],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    options = [*SMALL, "train.micro_batch=1", "train.compile=false"]
    assert main(["plan", *options, *arguments]) == 2
    assert message in capsys.readouterr().err
