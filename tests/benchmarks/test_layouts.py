"""The benchmark of layouts: what it tries beside `layout = "auto"`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longspan.benchmarks import layouts
from longspan.cli import main
from longspan.config import Run


def test_auto_is_compared_with_up_to_ten_other_layouts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = list[Run]()

    def fake(name: str, run: Run, processes: int, steps: int) -> dict[str, Any]:
        measured.append(run)
        rate = 100.0 * len(measured) if len(measured) <= 1 + layouts.TRIED else 1.0
        return {"layout": name, "tokens_per_s": rate, "predicted_tokens_per_s": rate}

    monkeypatch.setattr(layouts, "_measured", fake)
    file = tmp_path / "layouts.json"
    options = ["--nproc", "4", "--json", str(file), "train.global_batch=16", "model.layers=4"]
    assert main(["bench", "layouts", *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    names = [row["layout"] for row in rows]
    assert names[0].startswith('"auto": ')
    assert len(set(names)) == len(names) == 1 + layouts.TRIED
    assert names[0].removeprefix('"auto": ') not in names
    assert rows[-1]["of_best"] == 1.0
    assert all(run.train.global_batch == 16 for run in measured)
    assert len({run.train.micro_batch for run in measured}) == 1


def test_one_process_has_no_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layouts", "--nproc", "1"]) == 2
    assert "--nproc must be at least 2" in capsys.readouterr().err
