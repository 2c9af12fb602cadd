"""A watchdog ends a process that hangs, even if it cannot report why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longspan.faults import fault_point
from longspan.parallel.world import World
from longspan.training.watchdog import Heartbeat, Watchdog
from tests.disk import small_disk

HANG = """
import sys, time
from pathlib import Path
from longspan.faults import fault_point
from longspan.parallel.world import World
from longspan.training.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), World(), 1.0, 0):
    if sys.argv[2] == "at a fault point":
        fault_point("data")
    time.sleep(60)
"""


def test_a_hang_ends_even_if_it_cannot_be_reported(tmp_path: Path) -> None:
    processes = {}
    for how in ("at a fault point", "elsewhere", "history unwritable"):  # all at once
        folder = tmp_path / how
        folder.mkdir()
        if how == "history unwritable":
            (folder / "history.jsonl").mkdir()
        command = [sys.executable, "-c", HANG, str(folder), how]
        processes[how] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for how, process in processes.items():
        _, error = process.communicate(timeout=100)
        assert process.returncode == 1, how
        assert "no progress on rank 0 for 1 s" in error, how


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_heartbeats_survive_a_disk_that_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = disk.path / "heartbeats" / "rank-00000"
        path.parent.mkdir()
        disk.fill() if fault == "full" else disk.remount("ro")
        with Watchdog(disk.path, World(), 60.0, 0):
            fault_point("step")
            fault_point("step")
            assert Heartbeat.read(path) is None
            disk.free() if fault == "full" else disk.remount("rw")
            fault_point("step")
            beat = Heartbeat.read(path)
            assert beat is not None
            assert (beat.count, beat.steps, beat.point) == (3, 3, "step")
    reason = "No space left on device" if fault == "full" else "Read-only file system"
    assert capfd.readouterr().err.count(f"cannot write {path}: {reason}") == 1
