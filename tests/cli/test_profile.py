"""`longspan profile`, as a process that starts others."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from longspan.checkpoint import CHECKPOINTS
from longspan.cli import main
from longspan.tracking import HISTORY, History, exit_reason

PROFILE = [sys.executable, "-m", "longspan", "profile", "train.device=cpu", "data.context=256"]


def test_a_run_is_profiled_without_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "profile").mkdir(parents=True)
    (run_dir / "profile" / "summary.json").write_text("{}")  # of an earlier call
    options = ["train.steps=3", "--json", "-o", str(run_dir)]  # raised to what the schedule needs
    done = subprocess.run([*PROFILE, *options], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["run_dir"] == str(run_dir)
    assert [step["step"] for step in found["ranks"][0]["steps"]] == [6, 7, 8]
    assert found["findings"][0].startswith("A step takes ")
    assert (run_dir / "profile" / found["ranks"][0]["traces"][0]).exists()
    assert not list((run_dir / CHECKPOINTS).glob("step-*"))
    assert exit_reason(History(run_dir / HISTORY).events()) == "stop requested"


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [*PROFILE, "track.profile.wait=300", "track.profile.active=1", "-o", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (run_dir / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "longspan: interrupted; nothing more was saved"
    lock = os.open(run_dir / "lock", os.O_RDONLY)  # no process is left that holds it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    assert main(["profile", "--nproc", "0"]) == 2
    (tmp_path / "mine.txt").touch()
    assert main(["profile", "-o", str(tmp_path)]) == 2
    assert main(["profile", "track.profile.active=0"]) == 2
