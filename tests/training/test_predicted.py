"""Predictions beside measurements, on the console, in the run folder and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan.attention import patterns_of
from longspan.cli import main
from longspan.doctor.calibration import Measured, device_table
from longspan.hardware import device_of, devices
from longspan.planning import memory_per_rank, predict
from longspan.planning.auto import this_device
from longspan.planning.rates import rates_from_name
from longspan.reporting import read_run
from longspan.reporting.sections import overview
from longspan.runfile import load_run
from longspan.training import loop
from longspan.training.meter import meter_of
from longspan.training.predicted import Predicted, predict_for, predict_on
from tests.reporting.runs import history, metrics, write_run

H100 = devices()["h100"]
TINY = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.recall_pairs=4",
    "data.context=64",
    "train.steps=2",
    "train.global_batch=1",
    "track.log_every=1",
    "track.prompt=",
]


def test_the_prediction_is_that_of_the_planner() -> None:
    run = load_run(None, ["model.preset=125m", "train.precision=bf16"], builtin="cuda")
    found = predict_on(run, 1, H100)
    assert isinstance(found, Predicted)
    assert found.tokens_per_s == predict(run, 1, H100).tokens_per_s
    assert found.memory_bytes == memory_per_rank(run, 1)[0].allocated


def test_both_stand_in_one_line() -> None:
    found = Predicted(1000.0, 2 << 30).beside(900.0, 2.2 * 2**30)
    assert found == (
        "1,000 tokens/s predicted, 900 measured (-10.0%); "
        "2.00 GiB predicted, 2.20 measured (+10.0%)"
    )


def test_what_is_not_planned_is_said_and_stops_no_run() -> None:
    deepspeed = load_run(None, ["engine.name=deepspeed"], builtin="cuda")
    assert predict_on(deepspeed, 1, H100) == "none: engine.name = 'deepspeed' is not planned"
    v100 = load_run(None, ["train.precision=bf16"], builtin="cuda")
    text = predict_on(v100, 1, devices()["v100"])
    assert isinstance(text, str)
    assert "train.precision" in text
    assert predict_for(load_run(None), 1, torch.device("cpu")) is None


def test_an_unknown_gpu_has_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Future GPU")
    text = predict_for(load_run(None), 1, torch.device("cuda"))
    assert isinstance(text, str)
    assert 'the rates of "Future GPU" are unknown' in text


def test_a_calibrated_device_is_what_a_run_is_predicted_and_measured_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Future GPU")
    file, cuda = tmp_path / "mine.toml", torch.device("cuda")
    found = Measured("Future GPU", False, 80 << 30, {"bf16": 5e14}, 2e12)
    file.write_text(device_table(found, 8))
    run = load_run(None, [f"train.gpu={file}", "train.precision=bf16"], builtin="cuda")
    assert predict_for(run, 1, cuda) == predict_on(run, 1, device_of(str(file)))
    assert isinstance(predict_for(run, 1, cuda), Predicted)
    assert this_device(run, 8) == device_of(str(file))
    meter = meter_of(run, [patterns_of(run.attention, run.model.layers)], cuda, 0, 1)
    assert meter._peak_flops == pytest.approx(5e14 / rates_from_name("gpu").matmul, rel=1e-3)
    assert main(["train", *TINY, "train.gpu=none.toml", "--run-dir", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run" / "run.toml").exists()


def test_a_run_shows_and_records_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "predict_for", lambda *_: Predicted(1234.0, 5 << 30))
    folder = tmp_path / "run"
    assert main(["train", *TINY, "--run-dir", str(folder)]) == 0
    text = "".join(capsys.readouterr())
    assert "1,234 tokens/s, 5.00 GiB at the peak of a step" in text
    assert "1,234 tokens/s predicted, " in text
    assert read_run(folder).predicted("tokens_per_s") == 1234.0
    assert read_run(folder).predicted("memory_bytes") == 5 << 30


def test_the_report_shows_both(tmp_path: Path) -> None:
    lines = [{**line, "tokens_per_s": 900.0, "memory_bytes": 3 << 30} for line in metrics(5)]
    planned = {"predicted": {"tokens_per_s": 1000.0, "memory_bytes": 2 << 30}}
    folder = tmp_path / "run"
    write_run(folder, lines, history((1000.0, "start", 0, {"ranks": 1, **planned})))
    page = str(overview([read_run(folder)]))
    assert "predicted 1,000 (-10%)" in page
    assert "predicted 2 GiB (+50%)" in page
