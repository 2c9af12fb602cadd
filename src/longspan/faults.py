"""Points of a run: to be watched, and to be broken at on purpose, for drills.

LONGSPAN_FAULT=ACTION@POINT:RANK:N breaks it the N-th time that a rank reaches a point:

- kill: the process is gone, as by SIGKILL
- orphan: the process that started all ranks is gone
- terminate: that process gets SIGTERM, as from a scheduler
- stop: the process stands still, as by SIGSTOP
- full: the disk is full, at this point and from then on for a while
- memory: there is no more memory
- slow: the process takes half a second more, this time and from then on

LONGSPAN_FAULT_LOG names a file to which the moment is written. LONGSPAN_POISON=12,40 makes the loss
of those steps no number, every time that they are done, as bad samples would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FAULT, LOG = "LONGSPAN_FAULT", "LONGSPAN_FAULT_LOG"
POISON = "LONGSPAN_POISON"
PARENT = "LONGSPAN_PARENT"
"""Set by the launcher of several processes: its own number."""

LASTS = {"full": 1, "slow": sys.maxsize}
"""How often a fault comes again after the first time."""

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
    since = _reached[point] - int(number)
    if since == 0:
        Path(os.environ[LOG]).write_text(repr(time.time()))
    if 0 <= since <= LASTS.get(action, 0):
        _act(action)


def is_poisoned(step: int) -> bool:
    """Whether the loss of a step is to be no number; the first is step 1."""
    return str(step) in os.environ.get(POISON, "").split(",")


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
        case "memory":
            raise MemoryError("Tried to allocate 1 GiB (a drill)")
        case "slow":
            time.sleep(0.5)
