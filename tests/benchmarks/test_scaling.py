"""`longspan bench scaling`: its arithmetic, what it compares, and a tiny run on real processes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longspan.benchmarks.scaling import (
    Setting,
    base_run,
    compared,
    efficiency,
    plan_points,
    shares,
)
from longspan.cli import main
from longspan.runfile import dump_run, load_run
from longspan.tracking.trace import RankSummary, StepTimes, Summary
from tests.slow import slow

STRONG = Setting("strong", ("ddp", "fsdp", "tensor", "sequence"), (1, 2, 4), "cpu", 2, 10)


def test_efficiency_by_hand() -> None:
    """8 s alone; on 4 processes 2.5 s for the same work, and 10 s for four times the work."""
    assert efficiency("strong", 4, 8.0, 2.5) == pytest.approx(0.8)
    assert efficiency("weak", 4, 8.0, 10.0) == pytest.approx(0.8)


def test_shares_are_means_over_ranks_and_steps() -> None:
    """Of 10 s, ranks communicate 2 and 4 s, and are exposed to 1 and 2 s of it."""

    def rank(number: int, communication: float, exposed: float) -> RankSummary:
        step = StepTimes(1, 10.0, 5.0, communication, exposed, 0.0, 0.0, None)
        return RankSummary(number, "cpu", [], [step, step], [], [])

    summary = Summary(1, "cpu", [], [rank(0, 2.0, 1.0), rank(1, 4.0, 2.0)])
    assert shares(summary) == pytest.approx((0.3, 0.15))
    assert shares(None) == (0.0, 0.0)


def points(tmp_path: Path, setting: Setting, *overrides: str) -> Any:
    base = base_run(None, overrides, setting)
    file = tmp_path / "base.toml"
    file.write_text(dump_run(base))
    skipped, found = plan_points(file, base, setting)
    return skipped, [(x, n, load_run(file, options, world=n)) for x, n, options in found]


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_model_is_the_same_in_all_and_the_work_follows_the_mode(
    tmp_path: Path, mode: str
) -> None:
    skipped, found = points(tmp_path, replace(STRONG, mode=mode))
    assert skipped == []
    assert [(layout, ranks) for layout, ranks, _ in found] == [
        ("one process", 1),
        *[(layout, ranks) for ranks in (2, 4) for layout in STRONG.layouts],
    ]
    alone = found[0][2]
    for layout, ranks, run in found:
        assert run.model == alone.model
        assert run.train.micro_batch == alone.train.micro_batch
        factor = ranks if mode == "weak" else 1
        batch, context = (1, factor) if layout == "sequence" else (factor, 1)
        assert run.train.global_batch == batch * alone.train.global_batch
        assert run.data.context == context * alone.data.context
        axes = run.layout.resolve(ranks)
        axis = {"ddp": "replicate", "fsdp": "shard"}.get(layout, layout)
        assert ranks == 1 or axes[axis] == ranks


def test_what_a_run_does_not_fit_is_said(tmp_path: Path) -> None:
    setting = replace(STRONG, layouts=("ddp", "tensor"), processes=(1, 2))
    file = tmp_path / "run.toml"
    file.write_text("[model]\nheads = 3\nhidden = 48\n[train]\nglobal_batch = 2\n")
    base = base_run(file, [], setting)
    skipped, found = plan_points(file, base, setting)
    assert [(layout, ranks) for layout, ranks, _ in found] == [("one process", 1), ("ddp", 2)]
    (tensor,) = skipped
    assert (tensor.layout, tensor.ranks) == ("tensor", 2)
    assert "heads" in tensor.why


def test_it_says_what_is_compared() -> None:
    base = base_run(None, ["data.context=512"], STRONG)
    text = compared(base, STRONG, range(16))
    assert "the same step on all: 4 sequences of 512 tokens" in text
    assert "each process pinned to 2 cores of 16, with 2 threads" in text
    assert "median of 10 steps after 4" in text
    assert "N times the context (sequence)" in compared(base, replace(STRONG, mode="weak"), [])


@slow("parity")
def test_two_processes_against_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.hidden=32", "model.heads=2", "model.layers=1", "data.source=recall"]
    small += ["data.context=64", "data.recall_pairs=4", "--nproc", "1,2", "--layouts", "ddp"]
    files = [f"--{kind}={tmp_path}/a.{kind}" for kind in ("json", "csv")]
    options = ["--device", "cpu", "--cores", "1", "--steps", "2", f"--plot={tmp_path}/a.svg"]
    assert main(["bench", "scaling", *small, *options, *files]) == 0
    assert "each process pinned to 1 core" in capsys.readouterr().out
    result = json.loads((tmp_path / "a.json").read_text())
    alone, ddp = result["rows"]
    assert (alone["layout"], ddp["layout"], ddp["ranks"]) == ("one process", "ddp", 2)
    assert alone["efficiency"] == 1
    assert alone["communication"] == 0
    assert ddp["efficiency"] == pytest.approx(alone["step_ms"] / (2 * ddp["step_ms"]))
    assert ddp["tokens_per_s"] == pytest.approx(2 * 64e3 / ddp["step_ms"])
    assert 0 < ddp["exposed"] <= ddp["communication"] < 1
    with (tmp_path / "a.csv").open() as stream:
        assert [row["ranks"] for row in csv.DictReader(stream)] == ["1", "2"]
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "2,4"], "--nproc must have 1, which the others are compared with, got 2,4"),
        (["--nproc", "1;2"], "--nproc must be numbers such as 1,2,4, got '1;2'"),
        (["--layouts", "dpp"], "--layouts must be among ddp, fsdp, tensor, sequence, got 'dpp'"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--cores", "0", "--device", "cpu"], "--cores must be at least 1, got 0"),
        (["--nproc", "1", "--csv", "none/a.csv"], "cannot write none/a.csv"),
        (["--device", "cuda", "--nproc", "1,99"], "--device cuda needs a GPU per process"),
        (["train.stepz=1"], "stepz"),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "scaling", *options]) == 2
    assert message in capsys.readouterr().err
