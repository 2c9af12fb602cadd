"""Runs a command in a real terminal, and shows what a person would see in it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from types import TracebackType

TIMEOUT_S = 60.0
CONTROL = r"\x1b\[[0-9;?]*[A-Za-z]"


class Terminal:
    """A command whose stdin, stdout and stderr are a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.received = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ.update(COLUMNS="100", LINES="40", TERM="xterm-256color", NO_COLOR="1")
            os.execvp(command[0], command)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def type(self, text: str) -> None:
        r"""Type into the terminal; "\x03" is Ctrl-C."""
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, *, count: int = 1) -> None:
        """Read until the terminal has received `text` that often."""
        deadline = time.monotonic() + TIMEOUT_S
        while re.sub(CONTROL, "", self.received).count(text) < count:
            assert time.monotonic() < deadline, f"no {text!r} in {TIMEOUT_S} s: {self.screen()}"
            assert self._read(), f"the command ended without {text!r}: {self.screen()}"

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read():
            assert time.monotonic() < deadline, f"no end in {TIMEOUT_S} s: {self.screen()}"
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def screen(self) -> list[str]:
        """The lines on the screen, as if it were endless."""
        lines, row, column = [""], 0, 0
        for part in re.findall(rf"{CONTROL}|[\r\n]|[^\x1b\r\n]+", self.received):
            if part == "\r":
                column = 0
            elif part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part.startswith("\x1b"):
                if part.endswith("K"):
                    lines[row] = ""
                elif part.endswith("A"):
                    row -= int(part[2:-1] or 1)
            else:
                lines[row] = (
                    lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                )
                column += len(part)
        return [line.rstrip() for line in lines]

    def _read(self) -> bool:
        """Read what comes within a second; False at the end."""
        if not select.select([self._fd], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self._fd, 1 << 16)
        except OSError:  # the end, on Linux
            return False
        self.received += found.decode(errors="replace")
        return bool(found)
