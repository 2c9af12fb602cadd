"""A watchdog ends a process that hangs, even if it cannot report why."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Event

import pytest

from longspan.config import Train
from longspan.faults import fault_point
from longspan.parallel.world import World
from longspan.training import watchdog
from longspan.training.watchdog import Heartbeat, Watchdog, start_limit
from tests.disk import small_disk

HANG = """
import sys, time
from pathlib import Path
from longspan.faults import fault_point
from longspan.config import Train
from longspan.parallel.world import World
from longspan.training.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), World(), Train(start_timeout_s=1), 0):
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
        with Watchdog(disk.path, World(), Train(), 0):
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


class Clock:
    """time, with a monotonic clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(watchdog, "time", found)
    return found


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when the process would have ended."""
    found, real = Event(), os

    class System:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def _exit(self, code: int) -> None:
            assert code == 1
            found.set()
            sys.exit()  # the thread

    monkeypatch.setattr(watchdog, "os", System())
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # no word of SystemExit
    return found


PHASES = {
    "start_timeout_s": ["data"],
    "hang_timeout_s": ["step", "evaluation", "data"],
    "save_timeout_s": ["step", "staging", "saving"],
    "eval_timeout_s": ["step", "evaluation"],
}
"""Points after which a limit applies."""


@pytest.mark.parametrize("key", PHASES)
@pytest.mark.parametrize("is_over", [True, False])
def test_each_phase_has_a_limit_of_its_own(
    key: str,
    is_over: bool,
    tmp_path: Path,
    clock: Clock,
    ended: Event,
    capfd: pytest.CaptureFixture[str],
) -> None:
    limits = {name: 0.2 if (name == key) == is_over else 600.0 for name in PHASES}
    with Watchdog(tmp_path, World(), Train.model_validate(limits), 0):
        for point in PHASES[key]:
            fault_point(point)
        clock.now += 0.3
        if key == "save_timeout_s":
            fault_point("saving")  # as the loop does that waits for a file system that hangs
        assert ended.wait(60 if is_over else 0.5) == is_over
    message = f"no progress on rank 0 for 0.2 s (train.{key}); furthest behind is rank 0 at"
    shown = capfd.readouterr().err
    assert (message in shown) == ("Thread 0x" in shown) == is_over


def test_a_start_that_hangs_is_ended_unless_it_reaches_points(
    clock: Clock, ended: Event, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_limit(0.1) as started:
        for _ in range(6):
            fault_point("verifying")
            clock.now += 0.08
            assert not ended.wait(0.05)
        started()
    with start_limit(0.1):
        clock.now += 0.2
        assert ended.wait(60)
    shown = capfd.readouterr().err
    assert "no progress at the start for 0.1 s (train.start_timeout_s)" in shown
    assert "Thread 0x" in shown
