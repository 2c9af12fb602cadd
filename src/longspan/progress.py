"""What a command is doing, on stderr: a line that is replaced in a terminal, plain lines elsewhere.

Imports no torch, so that it can be shown while torch is imported.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as BarProgress
from rich.status import Status
from rich.text import Text

QUIET = "LONGSPAN_QUIET"
"""Set in the environment by --quiet, also for processes that are started: no progress is shown."""


def stderr_console(*, quiet: bool = False) -> Console:
    """Return a console on stderr, with control codes only in a terminal, whatever FORCE_COLOR."""
    quiet = quiet or QUIET in os.environ
    return Console(
        stderr=True, highlight=False, soft_wrap=True, quiet=quiet, force_terminal=_is_terminal()
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context, and in processes that it starts, no progress is shown."""
    before = os.environ.get(QUIET)
    os.environ[QUIET] = "1"
    try:
        yield
    finally:
        os.environ.pop(QUIET)
        if before is not None:
            os.environ[QUIET] = before


def waiting(text: str, *, quiet: bool = False) -> Status:
    """Return a context that shows `text` in a terminal while it lasts, and nothing elsewhere.

    Print no result within it: in a terminal, rich moves stdout above the line, to stderr. Ranks
    that share a terminal are `quiet`, except for one.
    """
    return stderr_console(quiet=quiet).status(_escape(text), spinner="line")


def loading(*, quiet: bool = False) -> Status:
    """`waiting` for the import of PyTorch, which takes seconds: import it within this context."""
    return waiting("loading PyTorch", quiet=quiet)


def measuring(text: str) -> Live:
    """`waiting`, without a spinner: its thread would take time from what is measured."""
    console = stderr_console()
    return Live(Text(text), console=console, auto_refresh=False, transient=True)


class _Tolerant:
    """A stream whose `write` and `flush` raise no OSError.

    A closed pipe or terminal is replaced by /dev/null, so that what is buffered raises nothing at
    the end of the process either.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._tolerance():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._tolerance():
            self._stream.flush()

    @contextmanager
    def _tolerance(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                with suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tolerant_stderr() -> Iterator[None]:
    """Within this context a full disk or a closed pipe behind stderr raises nothing.

    `longspan train 2> FILE` must not end with the disk that FILE is on.
    """
    with redirect_stderr(_Tolerant(sys.stderr)):
        yield


class ProgressBar:
    """A context that shows how much is done: a bar in a terminal, lines elsewhere."""

    def __init__(self, text: str, *, quiet: bool = False) -> None:
        self._text, self._console = text, stderr_console(quiet=quiet)
        self.is_terminal = self._console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        self._bar = BarProgress(
            *columns, console=self._console, transient=True, disable=not self.is_terminal
        )
        self._task = self._bar.add_task(text, total=1.0)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, detail: str, fraction: float) -> None:
        self.show(detail, fraction)
        if not self.is_terminal:
            self.print(f"{self._text}: {detail}, {fraction:.0%}")

    def show(self, detail: str, fraction: float) -> None:
        """`update` in a terminal, and nothing elsewhere."""
        text = _escape(f"{self._text}: {detail}")
        self._bar.update(self._task, description=text, completed=fraction)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False)


class Progress:
    """A context that shows the phase of a long command, and in a terminal a detail of it."""

    def __init__(self) -> None:
        self._status = waiting("starting")
        self._phase = ""

    def __enter__(self) -> Progress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def phase(self, text: str) -> None:
        self._phase = text
        if _is_terminal():
            self._status.update(_escape(text))
        else:
            self._status.console.print(text, markup=False)

    def detail(self, text: str) -> None:
        self._status.update(_escape(f"{self._phase}: {text}"))


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _is_terminal() -> bool:
    return sys.stderr.isatty()
