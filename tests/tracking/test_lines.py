"""Lines survive a disk that is full, read-only or gone, and follow once it is back."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longspan.progress import tolerant_stderr
from longspan.tracking import History, MetricsFile, lines
from longspan.tracking.lines import LineFile
from tests.disk import small_disk


@contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Within this context the kernel refuses writes beyond `size` bytes, after writing a part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_lines_catch_up_when_the_disk_is_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = disk.path / "metrics.jsonl"
        metrics, history = MetricsFile(path, step=0), History(disk.path / "history.jsonl")
        metrics.write({"step": 1})
        disk.fill() if fault == "full" else disk.remount("ro")
        for step in range(2, 500):  # more than the rest of a page that is in use
            metrics.write({"step": step})
            history.write("save", step)
        disk.free() if fault == "full" else disk.remount("rw")
        metrics.write({"step": 500})
        history.write("save", 500)
        found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert found == list(range(1, 501))
        assert [event["step"] for event in history.events()] == list(range(2, 501))
    error = capfd.readouterr().err
    reason = "No space left on device" if fault == "full" else "Read-only file system"
    assert error.count(f"longspan: cannot write {path}: {reason}; training continues") == 1
    assert error.count("cannot write") == 2
    assert error.count(f"longspan: {path} is written again") == 1


def test_a_line_that_was_cut_is_written_again_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append("first")
    with tolerant_stderr(), max_file_size(10):
        file.append("second")
        assert path.read_text() == "first\n"
    file.append("third")
    assert path.read_text() == "first\nsecond\nthird\n"


def test_a_line_that_a_crash_has_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"time": 1, "event": "start", "st')
    history = History(path)
    history.write("end", 7)
    assert [event["step"] for event in history.events()] == [7]


def test_lines_that_wait_are_bounded_and_the_lost_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lines, "MAX_PENDING", 3)
    path = tmp_path / "missing" / "lines"
    file = LineFile(path)
    for number in range(5):
        file.append(str(number))
    file.close()
    assert f"5 lines could not be written to {path}" in capfd.readouterr().err
    path.parent.mkdir()
    file.append("5")
    assert path.read_text() == "3\n4\n5\n"
    file.close()
    assert f"3 lines could not be written to {path}" in capfd.readouterr().err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write into any folder")
def test_a_folder_without_write_permission_is_survived(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    tmp_path.chmod(0o500)
    file.append("first")
    tmp_path.chmod(0o700)
    file.append("second")
    assert (tmp_path / "lines").read_text() == "first\nsecond\n"
