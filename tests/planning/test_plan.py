"""`longspan plan`: its output, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longspan import load_run, plan
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


def test_the_run_itself_is_among_the_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["model.linear=sketched", "model.sketch.keep=0.25", "--gpus", "4"]
    found = planned(capsys, *options, "train.micro_batch=1")
    (same,) = [
        x for x in found["alternatives"] if (x["linear"], x["fraction"]) == ("sketched", "1/4")
    ]
    (stage,) = found["stages"]
    assert same["parameters"] == found["parameters"]
    assert same["device_bytes"] == stage["on_device"]
    assert same["flops_per_token"] == found["matmul_flops"] + found["attention_flops"]
    assert found["precision"] == "bf16"


def test_each_pipeline_stage_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["layout.pipeline=2", "train.micro_batch=1"]
    assert main(["plan", *SMALL, *pipeline]) == 0
    text = capsys.readouterr().out
    assert "pipeline 0  pipeline 1\n" in text
    assert "2 processes" in text
    found = planned(capsys, *pipeline)
    assert len(found["stages"]) == 2
    total = sum(stage["parameters"] for stage in found["stages"])
    assert total == 4 * (found["parameters"] + 256 * 64)  # both stages have the tied embedding


def test_a_plan_names_the_activations(capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["data.context=1e12", "layout.sequence=2", "train.micro_batch=1", "--gpus", "2"]
    assert main(["plan", *SMALL, *huge]) == 0
    text = capsys.readouterr().out
    assert "500,000,000,000 tokens per micro-batch on a device" in text
    assert "activations: MLP" in text
    found = planned(capsys, *huge)
    assert found["micro_batch_tokens"] == 500_000_000_000
    (stage,) = found["stages"]
    assert stage["peak"]["activations"] > 0.8 * stage["allocated"]
    assert stage["allocated"] == sum(stage["peak"].values()) < stage["on_device"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus must be from 1 to 1,048,576, got 0"),
        (["--gpus", "3"], "train.global_batch  8 is not a multiple of"),
        (["engine.name=deepspeed"], "use engine.name=native"),
        (["layout.tensor=2", "--gpus", "3"], "layout"),
    ],
    ids=["none", "batch", "engine", "layout"],
)
def test_invalid_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    options = [*SMALL, "train.micro_batch=1", "train.compile=false"]
    assert main(["plan", *options, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_says_that_it_does_not_know_the_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "data.documents=isolate"]) == 0
    assert "documents      planned as one per sample" in capsys.readouterr().out


def test_auto_precision_is_planned_as_that_of_a_gpu() -> None:
    found = {p: plan(load_run(None, [f"train.precision={p}"]), 1) for p in ("auto", "bf16")}
    assert found["auto"] == found["bf16"]
