"""A run with injected faults ends with the same bytes as one without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.config import Run
from longspan.faults import FAULT, FAULT_LOG


def test_a_short_drill(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed kills rank 0 while it removes a checkpoint and damages the newest one."""
    options = ["train.steps=16", "checkpoint.every=2", "--nproc", "2", "--faults", "1"]
    code = main(["drill", *options, "--seed", "9", "--json"])
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert "fault 1 of 1: kill rank 0, pruning; flip a byte\n" in output.err
    assert report["problems"] == []
    assert report["same_bytes"]
    (outcome,) = report["outcomes"]
    assert outcome["fault"] == "kill rank 0, pruning; flip a byte"
    assert (outcome["exit_code"], outcome["resumed_at"]) == (1, 6)
    assert code == 0


@pytest.mark.parametrize("action", ["kill", "disk_full"])
def test_a_fault_is_injected_at_its_point(tmp_path: Path, action: str) -> None:
    body = "from longspan.faults import fault_point\n"
    body += "for i in range(3): print(i); fault_point('here')"
    environment = {**os.environ, FAULT: f"{action}@here:0:2", FAULT_LOG: str(tmp_path / "log")}
    done = subprocess.run(
        [sys.executable, "-u", "-c", body], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout == "0\n1\n"
    assert done.returncode == (-9 if action == "kill" else 1)
    assert float((tmp_path / "log").read_text()) > 0


def test_an_invalid_drill_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--faults", "0"]) == 2
    assert main(["drill", "--nproc", "0"]) == 2
    assert main(["drill", "checkpoint.every=0"]) == 2
    assert "a drill needs checkpoint.every of at least 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "world"),
    [([], 2), (["layout.pipeline=4"], 4), (["--nproc", "3"], 3), (["--nproc", "1"], 1)],
)
def test_a_drill_needs_no_run_file(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], world: int
) -> None:
    class Accepted(Exception):
        pass

    def accept(folder: Path, run: Run, nproc: int, *_: object) -> None:
        assert nproc == world
        run.layout.resolve(world)
        raise Accepted

    monkeypatch.setattr("longspan.drill._Drill", accept)
    with pytest.raises(Accepted):
        main(["drill", *arguments])
