"""Requests to a run from outside: signals, and files in its folder.

The first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 asks it to save and stop; Ctrl-C after it stops it at
once. A second SIGTERM does not: Slurm sends one to torchrun and to its workers, to which torchrun
then sends its own.
`touch RUN_DIR/STOP` also asks it to stop, `touch RUN_DIR/SAVE` to save only; the files are then
removed.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from longspan.stop_signals import stop_signals


class StopRequests:
    """In this context `stop` turns true at the first signal, or with `by_file` for a file.

    `folder` is polled for files; None on ranks that leave this to another.
    """

    def __init__(self, folder: Path | None) -> None:
        self.stop = False
        self.by_file = False
        self._folder = folder
        self._unremovable: set[str] = set()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        self._previous = {s: signal.signal(s, self._handle) for s in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def poll(self) -> tuple[bool, bool]:
        """Whether a stop is requested, and whether a save is."""
        self.by_file |= self._consume("STOP")
        self.stop |= self.by_file
        return self.stop, self._consume("SAVE")

    def _consume(self, name: str) -> bool:
        if self._folder is None or name in self._unremovable or not (self._folder / name).exists():
            return False
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:  # count it once
            self._unremovable.add(name)
            print(f"longspan: cannot remove {self._folder / name}: {error}", file=sys.stderr)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop:
            return
        self.stop = True
        # In a terminal the message replaces the progress bar and "^C"; the bar follows below it.
        clear = b"\r\x1b[2K" if os.isatty(2) else b""
        # os.write, as print may be interrupted by this very handler
        with suppress(OSError):  # after SIGHUP the terminal is gone
            os.write(2, clear + b"stopping after this step; press Ctrl-C again to stop at once\n")
