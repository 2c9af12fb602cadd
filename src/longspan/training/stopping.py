"""Requests to a run from outside: signals, and files in its folder.

The first Ctrl-C, SIGTERM or SIGUSR1 asks it to save and stop, the second stops it at once. `touch
RUN_DIR/STOP` asks the same, `touch RUN_DIR/SAVE` for a checkpoint only; the files are then removed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Requests:
    """While entered, `stop` turns true at the first signal. `folder`: None where another looks."""

    def __init__(self, folder: Path | None) -> None:
        self.stop = False
        self._folder = folder
        self._taken: set[str] = set()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        self._previous = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def look(self) -> tuple[bool, bool]:
        """Whether there is a request to stop, and one to save."""
        self.stop |= self._take("STOP")
        return self.stop, self._take("SAVE")

    def _take(self, name: str) -> bool:
        if self._folder is None or name in self._taken or not (self._folder / name).exists():
            return False
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:  # then it counts once
            self._taken.add(name)
            print(f"longspan: cannot remove {self._folder / name}: {error}", file=sys.stderr)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        # os.write, as print may be interrupted by this very handler
        os.write(2, b"stopping after this step; once more to stop at once\n")
