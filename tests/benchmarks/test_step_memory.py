"""`longspan bench step-memory`: what it measures on a CPU, and what it would on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.benchmarks import step_memory
from longspan.cli import main
from longspan.planning import memory_per_rank
from longspan.runfile import load_run


def test_live_tensors_of_a_real_step_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(step_memory.options_of("cpu"))
    monkeypatch.setattr(step_memory, "options_of", lambda _device: [first])
    file = tmp_path / "memory.json"
    assert main(["bench", "step-memory", "--device", "cpu", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["planned"] == sum(row["peak"].values())
    assert abs(row["error"]) < 0.03


def test_the_runs_on_a_gpu_are_valid() -> None:
    found = set()
    for options in step_memory.options_of("cuda"):
        run = load_run(
            None, [*step_memory.COMMON, "train.device=cuda", "train.precision=bf16", *options]
        )
        found.add(memory_per_rank(run, 1)[0].allocated)
    assert len(found) >= 24
