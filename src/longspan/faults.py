"""Points of a run: to be watched, and to be broken at on purpose, for drills.

LONGSPAN_FAULT=ACTION@POINT:RANK:N breaks it the N-th time that a rank reaches a point:

- kill: the process is gone, as by SIGKILL
- orphan: the process that started all ranks is gone
- terminate: that process gets SIGTERM, as from a scheduler
- stop: the process stands still, as by SIGSTOP
- full: the disk is full, at this point and from then on for a while

LONGSPAN_FAULT_LOG names a file to which the moment is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FAULT, LOG = "LONGSPAN_FAULT", "LONGSPAN_FAULT_LOG"
PARENT = "LONGSPAN_PARENT"
"""Set by the launcher of several processes: its own number."""

_reached: Counter[str] = Counter()
_listener: Callable[[str], None] | None = None


def listen(listener: Callable[[str], None] | None) -> None:
    """Let `listener` hear of every point that this process comes to."""
    global _listener
    _listener = listener


def reach(point: str) -> None:
    """Say that this process has come to `point`."""
    if _listener is not None:
        _listener(point)
    wanted = os.environ.get(FAULT)
    if wanted is None:
        return
    _reached[point] += 1
    action, place = wanted.split("@")
    where, rank, number = place.split(":")
    if (where, rank) != (point, os.environ.get("RANK", "0")):
        return
    if _reached[point] == int(number):
        Path(os.environ[LOG]).write_text(repr(time.time()))
        _act(action)
    elif action == "full" and int(number) < _reached[point] <= int(number) + 1:
        _act(action)


def _act(action: str) -> None:
    launcher = int(os.environ.get(PARENT, os.getpid()))
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "orphan":
            os.kill(launcher, signal.SIGKILL)
        case "terminate":
            os.kill(launcher, signal.SIGTERM)
        case "full":
            raise OSError(28, "No space left on device (a drill)")
