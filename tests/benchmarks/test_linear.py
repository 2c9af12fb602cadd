"""`longspan bench linear`: its rows, its check of the outputs, its JSON file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.benchmarks import linear
from longspan.cli import main
from longspan.sketching import SKLinear

TINY = ["bench", "linear", "--tokens", "32", "--sizes"]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.cli.bench.builtin_name", lambda: "cpu")
    monkeypatch.setattr("longspan.benchmarks.measure.WARM_UP_S", 0.0)


def test_it_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    assert main([*TINY, "64", "32", "--fractions", "0.5", "0.25", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "32 tokens, parameters and inputs in torch.float32, no bias" in printed
    assert "SKLinear" in printed
    result = json.loads(file.read_text())
    assert f"torch {torch.__version__}" in result["machine"]
    assert (result["setting"]["sizes"], result["setting"]["tokens"]) == ([32, 64], 32)
    rows = result["rows"]
    kinds = [("nn.Linear", 1.0, 1.0)]
    for fraction in (0.5, 0.25):
        kinds += [("LowRankLinear", fraction, fraction)]
        kinds += [("SKLinear", fraction, fraction * 10 / 6)]
    found = [
        (row["size"], row["layer"], row["parameter_ratio"], row["flops_ratio"]) for row in rows
    ]
    assert found == [(size, *map(pytest.approx, kind)) for size in (32, 64) for kind in kinds]
    ranks = [None, 8, 8, 4, 4, None, 16, 16, 8, 8]
    assert [row["rank"] for row in rows] == ranks
    for row in rows:
        dense = next(r for r in rows if (r["size"], r["rank"]) == (row["size"], None))
        assert row["both_ratio"] == pytest.approx(row["both_ms"] / dense["both_ms"])
        assert row["forward_ratio"] == pytest.approx(row["forward_ms"] / dense["forward_ms"])
        assert row["tflops"] > 0
        assert row["extra_mib"] is None


def test_a_compiled_layer_has_its_own_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []

    def compiled(layer: SKLinear, **options: object) -> SKLinear:
        given.append(options)
        return layer

    monkeypatch.setattr(torch, "compile", compiled)
    assert main([*TINY, "32", "--fractions", "0.5", "--compile"]) == 0
    assert "SKLinear compiled" in capsys.readouterr().out
    assert given == [{"fullgraph": True, "dynamic": False}]  # eager would go unnoticed


def test_a_wrong_layer_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SKLinear.forward

    def wrong(self: SKLinear, x: Tensor) -> Tensor:
        return original(self, x) * (1 + 1e-5)

    monkeypatch.setattr(SKLinear, "forward", wrong)
    with pytest.raises(AssertionError, match="SKLinear of 64"):
        linear.bench_linear(linear.Setting("cpu", (64,), 32, compiled=False), None)


@pytest.mark.gpu
def test_on_cuda_it_measures_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.cli.bench.builtin_name", lambda: "cuda")
    file = tmp_path / "a.json"
    assert main([*TINY, "256", "--fractions", "0.5", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    kinds = ["nn.Linear", "LowRankLinear", "SKLinear", "SKLinear compiled"]
    assert [row["layer"] for row in rows] == kinds
    assert all(row["extra_mib"] >= 0 for row in rows)


def test_invalid_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["0"], "--sizes must be at least 1, got 0"),
        (["64", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["64", "--fractions", "1.5"], "--fractions must be above 0 and at most 1, got 1.5"),
        (
            ["8", "64", "--fractions", "0.125"],
            "0.125 gives rank 0 for a layer of 8 × 8",
        ),
        (["64", "--json", str(tmp_path / "none" / "a.json")], "cannot write"),
    ):
        assert main([*TINY, *options]) == 2
        assert message in capsys.readouterr().err
