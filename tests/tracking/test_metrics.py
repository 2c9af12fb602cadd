"""metrics.jsonl survives crashes and resumes."""

from __future__ import annotations

import json
from pathlib import Path

from longspan.tracking import MetricsFile


def test_resuming_drops_later_and_malformed_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = [{"step": 1, "loss": 2.0}, {"step": 2, "validation_loss": 1.5}]
    path.write_bytes(
        b"\n".join([json.dumps(line).encode() for line in kept])
        + b'\n{"step": 3, "loss": 1}\nnull\n{}\n\xff\n{"step": 2, "lo'
    )
    with MetricsFile(path, step=2) as metrics:
        metrics.write({"step": 3, "loss": 0.5})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [*kept, {"step": 3, "loss": 0.5}]


def test_non_finite_values_become_null(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", step=0) as metrics:
        nan = float("nan")
        metrics.write({"step": 1, "loss": nan, "grad_norm": float("inf"), "norms": {"a": nan}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda _: 1 / 0) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "norms": {"a": None},
    }
