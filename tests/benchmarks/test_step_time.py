"""The benchmark of predicted time: its measurement on a CPU, and the fit to its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.benchmarks import step_time
from longspan.cli import main
from longspan.hardware import devices
from longspan.planning.rates import measured_rows, rates_from, rates_of
from longspan.planning.run_time import predict
from longspan.runfile import load_run
from longspan.toml import tomllib

H200 = devices()["h200"]


def write_rows(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text(json.dumps({"machine": "a test", "rows": rows}))
    return file


def test_a_fit_predicts_the_runs_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = replace(rates_of(H200), host_s=2e-3, block_traffic=1.5, eager_traffic=3.0)
    rows = []
    for overrides in step_time.GPU_RUNS:
        run = load_run(None, overrides, builtin="cuda", world=1)
        rate = predict(run, 1, H200, truth).tokens_per_s
        rows.append({"device": "h200", "overrides": overrides, "tokens_per_s": rate})
    plain = {"run": "plain GPT, 125m 8K dense", "device": "h200", "tokens_per_s": 3e5}
    first = {**rows[0], "warm_up": 0, "tokens_per_s": 1.0}
    others = [{"device": "h200", "overrides": []}, plain, first]
    file = write_rows(tmp_path / "h200.json", [*rows, *others])
    assert main(["bench", "step-time", "--fit", str(file)]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert len(rows) >= 12
    assert found["band"][0]["runs"] == len(rows)
    assert found["band"][0]["p90"] < 0.01
    fitted = rates_from(found["gpu"])
    for row in rows:  # the constants themselves these runs do not determine
        run = load_run(None, row["overrides"], builtin="cuda", world=1)
        assert predict(run, 1, H200, fitted).tokens_per_s == pytest.approx(
            row["tokens_per_s"], rel=0.02
        )


def test_the_present_constants_are_a_fit_to_the_present_runs() -> None:
    rows = [step_time.MeasuredRow.model_validate(row) for row in measured_rows()]
    rates, errors = step_time.fit_rates(rows, H200)
    assert errors["p90"] < 0.04
    for row in rows:  # another fit finds nothing much better
        run = load_run(None, row.overrides, builtin="cuda", world=1)
        again, present = (predict(run, 1, H200, x).tokens_per_s for x in (rates, rates_of(H200)))
        assert again == pytest.approx(present, rel=0.025)


def test_too_few_runs_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_rows(tmp_path / "few.json", [])
    assert main(["bench", "step-time", "--fit", str(few)]) == 2
    assert "0 runs are too few" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["bench", "step-time", "--fit", str(other)]) == 2
    assert "is not a result of longspan bench step-time or train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_s": "fast"}, "rows.0.tokens_per_s: Input should be a valid number"),
        ({"tokens_per_s": 0}, "rows.0.tokens_per_s: Input should be greater than or equal to"),
        ({"overrides": 7}, "rows.0.overrides: Input should be a valid tuple, got 7"),
        ({"overrides": ["layout=auto"]}, "rows.0.overrides.0: String should match pattern"),
        ({"overrides": ["model.from=/etc"]}, "'model.from=/etc' names a file"),
        ({"overrides": ["model.layers=0"]}, "model.layers  expected at least 1, got 0"),
        ({"device": ["h200"]}, "rows.0.device: Input should be a valid string"),
        ({"device": "h300"}, "hardware 'h300' is unknown"),
        ({"device": None}, "must be of one GPU of the table, got one that is not in the table"),
    ],
)
def test_a_wrong_row_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], message: str
) -> None:
    row = {"device": "h200", "overrides": [], "tokens_per_s": 5e4, **change}
    file = write_rows(tmp_path / "wrong.json", [row] * 10)
    assert main(["bench", "step-time", "--fit", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rows": [1]}', '{"machine": 1}', "NaN"])
def test_any_other_json_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    assert main(["bench", "step-time", "--fit", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_it_measures_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["model.hidden=32", "model.heads=2", "data.context=64", "data.recall_pairs=4"]
    monkeypatch.setattr(step_time, "CPU_RUNS", [tiny])
    file = tmp_path / "cpu.json"
    step_time.bench_step_time("cpu", 1, file)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["overrides"] == tiny
    assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"][0])
