"""Named points in a run, at which the watchdog observes progress and drills inject faults.

LONGSPAN_FAULT=ACTION@POINT:RANK:N injects a fault the N-th time that a rank reaches a point:

- kill: the process gets SIGKILL
- kill_launcher: the process that started all ranks gets SIGKILL
- terminate: that process gets SIGTERM, as from a scheduler
- hang: the process gets SIGSTOP
- disk_full: the small file system at LONGSPAN_FAULT_DISK is filled with a file "ballast", until
  that is removed; without LONGSPAN_FAULT_DISK this visit of the point and the next raise ENOSPC
- oom: an allocation fails
- slow: the process sleeps for half a second, at this and every later visit

LONGSPAN_FAULT_LOG names a file that receives the time of the fault. LONGSPAN_NAN_STEPS=12,40 makes
the loss of those steps NaN every time they are run, as bad samples would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FAULT, FAULT_LOG = "LONGSPAN_FAULT", "LONGSPAN_FAULT_LOG"
FAULT_DISK, BALLAST = "LONGSPAN_FAULT_DISK", "ballast"
NAN_STEPS = "LONGSPAN_NAN_STEPS"
LAUNCHER_PID = "LONGSPAN_LAUNCHER_PID"
"""Set by the launcher in the environment of the processes it starts."""

REPEATS = {"disk_full": 1, "slow": sys.maxsize}
"""How many further visits of the point a fault lasts."""

_visits: Counter[str] = Counter()
_listener: Callable[[str], None] | None = None


def set_listener(listener: Callable[[str], None] | None) -> None:
    """Call `listener` with the name of every point that this process reaches."""
    global _listener
    _listener = listener


def fault_point(name: str) -> None:
    """Mark that this process has reached the point `name`, and inject a fault if one is due."""
    if _listener is not None:
        _listener(name)
    spec = os.environ.get(FAULT)
    if not spec:
        return
    _visits[name] += 1
    action, place = spec.split("@")
    point, rank, number = place.split(":")
    if (point, rank) != (name, os.environ.get("RANK", "0")):
        return
    since = _visits[name] - int(number)
    if since == 0:
        Path(os.environ[FAULT_LOG]).write_text(repr(time.time()))
    if 0 <= since <= REPEATS.get(action, 0):
        _inject(action)


def injects_nan(step: int) -> bool:
    """Whether the loss of a step must become NaN; steps are counted from 1."""
    return str(step) in os.environ.get(NAN_STEPS, "").split(",")


def _inject(action: str) -> None:
    launcher = int(os.environ.get(LAUNCHER_PID, os.getpid()))
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill_launcher":
            os.kill(launcher, signal.SIGKILL)
        case "terminate":
            os.kill(launcher, signal.SIGTERM)
        case "disk_full" if FAULT_DISK in os.environ:
            fill_disk(Path(os.environ[FAULT_DISK]))
        case "disk_full":
            raise OSError(28, "No space left on device (injected)")
        case "oom":
            raise MemoryError("Tried to allocate 1 GiB (injected)")
        case "slow":
            time.sleep(0.5)


def fill_disk(folder: Path) -> None:
    """Write a file until its file system has no space left."""
    with (folder / BALLAST).open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
