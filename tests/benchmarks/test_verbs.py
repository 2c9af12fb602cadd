"""`longspan bench loss|checkpoint|engines|conversion|memory|tracking`: tiny runs, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.benchmarks import engines, loss, tracking
from longspan.cli import main


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longspan.cli.bench.builtin_name", lambda: "cpu")
    monkeypatch.chdir(tmp_path)


def bench(*arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json", "a.json"]) == 0
    found: dict[str, Any] = json.loads(Path("a.json").read_text())
    assert f"torch {torch.__version__}" in found["machine"]
    return found


def test_the_losses_are_compared_with_their_extra_memory() -> None:
    chunked, plain = bench("loss", "--lengths", "64", "--width", "8", "--vocab", "512")["rows"]
    assert (chunked["method"], plain["method"]) == ("chunked", "plain")
    assert plain["extra_bytes"] > 4 * 64 * 512  # the logits
    assert chunked["extra_bytes"] > 0


def test_a_row_is_printed_before_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def measure(*_: object) -> tuple[int, float]:
        printed.append(capsys.readouterr().out)
        return 3 << 20, 0.001 * len(printed)

    monkeypatch.setattr(loss, "_measure", measure)
    assert main(["bench", "loss", "--lengths", "1024", "2048"]) == 0
    printed.append(capsys.readouterr().out)
    assert printed[0].splitlines()[-1] == "   tokens  method    extra MiB          ms"
    assert printed[1:] == [
        "    1,024  chunked           3         1.0\n",
        "    1,024  plain             3         2.0\n",
        "    2,048  chunked           3         3.0\n",
        "    2,048  plain             3         4.0\n",
    ]


def test_json_goes_to_stdout_instead_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "64", "--width", "8", "--vocab", "512"]
    assert main(["bench", "loss", *small, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert [row["method"] for row in json.loads(output.out)["rows"]] == ["chunked", "plain"]
    assert output.err == ""
    assert not Path("-").exists()


def test_checkpoints_are_saved_both_ways_and_removed() -> None:
    rows = bench("checkpoint", "--gib", "0.001")["rows"]
    assert [row["save"] for row in rows] == ["synchronous", "asynchronous"]
    assert all(row["blocked_s"] > 0 and row["total_s"] > 0 for row in rows)
    assert [path.name for path in Path().iterdir()] == ["a.json"]


def test_an_engine_that_fails_is_reported_and_the_others_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(options: list[str]) -> dict[str, Any]:
        assert "train.lr=0.1" in options
        if "engine.name=deepspeed" in options:
            return {"error": "not installed"}
        return {"tokens_per_s": 10.0, "memory_bytes": 2**30, "loss": 1.0}

    monkeypatch.setattr(engines, "_train", train)
    rows = bench("engines", "train.lr=0.1")["rows"]
    assert [row.get("of_native") for row in rows] == [1.0, *[None] * 4, *[1.0] * 3]
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "--lengths", "0"], "must be at least 1"),
        (["loss", "--json", "none/a.json"], "cannot write none/a.json"),
        (["checkpoint", "--gib", "0"], "--gib must be at least"),
        (["conversion", "--keep", "2"], "0 < --keep <= 1, got 200 and 2.0"),
        (["memory", "--gpus", "0"], "--gpus must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs without CUDA")
@pytest.mark.parametrize("arguments", [["memory"], ["checkpoint", "--device", "cuda"]])
def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "needs a CUDA device, and there is none" in capsys.readouterr().err


def test_the_cost_of_tracking_is_a_ratio_within_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BLOCKS", 1)
    monkeypatch.setattr(tracking, "PACKAGES", {"tensorboard": "tensorboard"})
    small = ["model.hidden=32", "model.layers=1", "model.heads=2", "data.source=recall"]
    found = bench("tracking", *small, "data.context=128", "track.log_every=2")
    assert found["setting"]["sinks"] == ["tensorboard"]
    (row,) = found["rows"]
    assert row["line_share"] == pytest.approx(row["line_s"] / (2 * row["step_s"]))
    assert row["line_s"] > 0
    assert row["sinks_cpu_share"] >= 0
    assert not list(Path().glob("longspan-tracking-*"))
