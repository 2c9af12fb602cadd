"""What Longspan writes follows the umask, so that those who share a folder can read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.launching.local import run_processes
from longspan.training import train
from tests.parallel.test_apply import run_of


@pytest.fixture(params=["027", "002"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    value = int(request.param, 8)
    before = os.umask(value)
    yield value
    os.umask(before)


def assert_follows(umask: int, folder: Path) -> list[str]:
    """Check a folder and all in it; return the names of its files."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == expected, (path, oct(path.stat().st_mode))
    return [path.name for path in paths if path.is_file()]


def test_run_folders_and_exports_follow_the_umask(tmp_path: Path, umask: int) -> None:
    options = ["train.steps=2", "train.global_batch=2", "model.layers=1"]
    train(run_of(1, *options), tmp_path / "run")
    found = assert_follows(umask, tmp_path / "run")
    assert {"model-00000.safetensors", "manifest.json", "metrics.jsonl", "rank-00000"} <= {*found}
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert "model.safetensors" in assert_follows(umask, tmp_path / "exported")


def test_built_data_and_logs_follow_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "a.txt").write_text("some text " * 99)
    assert main(["data", "build", str(tmp_path / "a.txt"), "-o", str(tmp_path / "data")]) == 0
    assert len(assert_follows(umask, tmp_path / "data")) > 1
    assert run_processes([sys.executable, "-c", ""], 2, tmp_path / "logs", quiet=True) == 0
    assert assert_follows(umask, tmp_path / "logs")
