"""Commands that write on a full disk say so, and leave nothing half written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.launching.local import run_processes
from longspan.training import train
from tests.disk import small_disk
from tests.parallel.test_apply import run_of


@pytest.mark.parametrize("command", ["export", "data", "init", "sketch", "train"])
def test_a_command_on_a_full_disk_ends_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    run_dir, text = tmp_path / "run", tmp_path / "a.txt"
    if command in ("export", "sketch", "train"):
        train(run_of(1, "train.steps=1", "train.global_batch=2", "model.layers=1"), run_dir)
    text.write_text("some text " * 99)
    with small_disk(tmp_path / "disk", "1m") as disk:
        out = disk.path / "out.toml"
        arguments = {
            "export": ["export", str(run_dir), str(out)],
            "data": ["data", "build", str(text), "-o", str(out)],
            "init": ["init", "-o", str(out)],
            "sketch": ["sketch", str(run_dir), str(out), "--keep", "0.5"],
            "train": ["train", str(run_dir / "run.toml"), "--run-dir", str(out)],
        }[command]
        disk.fill()
        capfd.readouterr()
        assert main(arguments) == 2
        assert "No space left on device" in capfd.readouterr().err
        disk.free()
        assert main(arguments) == 0  # nothing is in the way of the next attempt


def test_logs_that_cannot_be_copied_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.fill()
        command = [sys.executable, "-c", "print('a log')"]
        assert run_processes(command, 1, disk.path / "logs", quiet=True) == 0
    error = capfd.readouterr().err
    assert "cannot copy the logs to" in error
    assert "No space left on device" in error
