"""Files that a run appends to or overwrites while it trains, on disks that may fail.

A full or read-only disk ends no training: the first error is printed, and lines that could not be
written are kept in memory and follow, in order, once the disk takes them.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType

from longspan.wording import counted

MAX_PENDING = 10_000
"""Lines that are kept for a file that cannot be written; the oldest are dropped beyond that."""
BATCH = 100
"""Lines that are written at once, so that an attempt costs little however many are pending."""


class DiskErrors:
    """A context, entered for each write, that suppresses OSError.

    It prints the first error of a series and the first success after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, OSError):
            if not self._is_failing:
                self._is_failing = True
                reason = error.strerror or error
                _print(f"cannot write {self._path}: {reason}; training continues and tries again")
            return True
        if error is None and self._is_failing:
            self._is_failing = False
            _print(f"{self._path} is written again")
        return False


class LineFile:
    """Appends lines to a file, now or, if the disk fails, later. Nothing is held open."""

    def __init__(self, path: Path) -> None:
        self._path, self._errors = path, DiskErrors(path)
        self._pending: deque[str] = deque()
        self._dropped = 0

    def append(self, line: str) -> None:
        """Append `line`, which has no newline, and those that could not be written before."""
        self._pending.append(line)
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._dropped += 1
        self._flush()

    def close(self) -> None:
        """Try once more, and say how many lines are lost."""
        if self._pending:
            self._flush()
        lost = self._dropped + len(self._pending)
        if lost:
            _print(f"{counted(lost, 'line')} could not be written to {self._path}")

    def _flush(self) -> None:
        with self._errors:
            while batch := list(islice(self._pending, BATCH)):
                _append(self._path, "".join(f"{line}\n" for line in batch).encode())
                for _ in batch:
                    self._pending.popleft()


def _append(path: Path, content: bytes) -> None:
    """Append all of `content`, or nothing.

    A file whose last line was cut, by a crash, continues on a new line.
    """
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            content = b"\n" + content
        written = 0
        try:
            while written < len(content):
                written += file.write(content[written:])
        except OSError:
            # Other ranks may append to the same file: cut only what is still at its end.
            if written and file.seek(0, os.SEEK_END) == size + written:
                with suppress(OSError):
                    file.truncate(size)
            raise


def _print(text: str) -> None:
    print(f"longspan: {text}", file=sys.stderr, flush=True)
