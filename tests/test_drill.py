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
from longspan.drill import Outcome, Report, _small_disk
from longspan.faults import FAULT, FAULT_DISK, FAULT_LOG
from tests.disk import small_disk
from tests.slow import slow


@slow("drill")
def test_a_short_drill(capsys: pytest.CaptureFixture[str]) -> None:
    """The seed kills a new run, fills the disk, then kills rank 0 while it removes a checkpoint.

    Rank 0 is replaced then, as it has a replica, but not in the start of the new run.
    """
    options = ["layout.replicate=2", "train.steps=16", "checkpoint.every=2", "--nproc", "2"]
    code = main(["drill", *options, "--faults", "3", "--seed", "188917", "--json"])
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["problems"] == []
    assert report["same_bytes"]
    new, full, killed = report["outcomes"]
    assert new["fault"] == "kill rank 0, folder of a new run"
    assert (new["exit_code"], new["resumed_at"], new["is_replaced"]) == (1, 0, False)
    if "was filled" in report["disk"]:  # this user may mount a file system
        assert (full["fault"], full["exit_code"]) == ("disk full on rank 1, step", None)
    assert "fault 3 of 3: kill rank 0, pruning; flip a byte\n" in output.err
    assert killed["fault"] == "kill rank 0, pruning; flip a byte"
    assert killed["is_replaced"]
    assert (killed["exit_code"], killed["steps_lost"]) == (None, 0)
    assert killed["resumed_at"] > 0  # the newest checkpoint that was not damaged
    assert code == 0


def test_where_no_disk_can_be_filled_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without the mount command
    with _small_disk(tmp_path / "disk", 1 << 20) as refused:
        assert refused == "mount: No such file or directory"
    outcome = Outcome("disk full on rank 0, writing", 0, 1, 1, 0, None, None)
    report = Report([outcome], [], True, [], f"only save points raised ENOSPC: {refused}")
    assert "disk full: only save points raised ENOSPC: mount: No such" in str(report)


def test_a_full_disk_is_a_file_system_without_space(tmp_path: Path) -> None:
    body = "from longspan.faults import fault_point; fault_point('here'); print('goes on')"
    with small_disk(tmp_path / "disk", "1m") as disk:
        environment = {**os.environ, FAULT: "disk_full@here:0:1", FAULT_DISK: str(disk.path)}
        environment[FAULT_LOG] = str(tmp_path / "log")
        done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True)
        assert done.stdout == b"goes on\n"
        assert os.statvfs(disk.path).f_bavail == 0


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
