"""`longspan bench attention` measures, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from longspan.attention import Dilated, attend
from longspan.benchmarks.plain import plain_dilated
from longspan.cli import main


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_plain_baseline_gives_the_same_output(device: str) -> None:
    """Its gradients differ: none flows through its merge weights."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(2, 64, 5, 16, device=device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    pattern = Dilated((16, 32, 64), (1, 2, 4))
    plain, ours = plain_dilated(q, k, v, pattern), attend(q, k, v, pattern)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(plain, ours, rtol=tolerance, atol=tolerance)
    wrong, right = (torch.autograd.grad(out.square().sum(), q)[0] for out in (plain, ours))
    assert not torch.allclose(wrong, right, rtol=1e-3, atol=1e-3)


def test_it_prints_a_table_and_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.cli.bench.builtin_name", lambda: "cpu")
    sizes = ["--heads", "2", "--head-dim", "16", "--segments", "64", "256", "--rates", "1", "4"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    assert main(["bench", "attention", "--lengths", "256", "128", *sizes, *files]) == 0
    printed = capsys.readouterr().out
    assert "plain dilated" in printed
    assert "dense attention is" in printed
    rows = json.loads((tmp_path / "a.json").read_text())["lengths"]
    assert [(row["attention"], row["tokens"]) for row in rows] == [
        (name, tokens) for name in ("dilated", "plain dilated", "dense") for tokens in (128, 256)
    ]
    assert all(row["forward_ms"] > 0 and row["both_ms"] > 0 for row in rows)
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


def test_wrong_values_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--lengths", "100", "--segments", "64", "--rates", "1"]) == 2
    assert (
        "--lengths must be multiples of the segment length 64, got 100" in capsys.readouterr().err
    )
    assert main(["bench", "attention", "--segments", "64", "128", "--rates", "1"]) == 2
    assert "one entry per branch, got 2 and 1" in capsys.readouterr().err
    assert main(["bench", "attention", "--heads", "0"]) == 2
    assert "--heads must be at least 1, got 0" in capsys.readouterr().err
