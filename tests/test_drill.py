"""A run broken on purpose ends as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.faults import FAULT, LOG

DRILL = str(Path(__file__).parents[1] / "examples" / "drill.toml")


def test_a_short_drill(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["train.steps=20", "--nproc", "2", "--faults", "2", "--seed", "11", "--json"]
    code = main(["drill", DRILL, *options])
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == []
    assert report["same_bytes"]
    assert len(report["outcomes"]) == 2
    assert code == 0


@pytest.mark.parametrize("action", ["kill", "full"])
def test_a_fault_comes_where_it_is_asked_for(tmp_path: Path, action: str) -> None:
    body = "from longspan.faults import reach\nfor i in range(3): print(i); reach('here')"
    environment = {**os.environ, FAULT: f"{action}@here:0:2", LOG: str(tmp_path / "log")}
    done = subprocess.run(
        [sys.executable, "-u", "-c", body], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "0\n1\n"
    assert done.returncode == (-9 if action == "kill" else 1)
    assert float((tmp_path / "log").read_text()) > 0


def test_a_drill_that_cannot_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", DRILL, "--faults", "0"]) == 2
    assert main(["drill", DRILL, "checkpoint.every=0"]) == 2
    assert "a drill needs checkpoint.every of at least 2" in capsys.readouterr().err
