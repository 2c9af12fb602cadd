"""Exceptions that end a command early without a traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """The user's input is wrong; the message says what was expected, what came, what to change."""


class Damaged(UserError):
    """A checkpoint is corrupt: its files differ from what was written."""


class Stopped(Exception):
    """The run was asked to stop and has saved a checkpoint.

    `by_signal`: by a signal to one of its ranks, not by a file in the run folder.
    """

    def __init__(self, message: str, *, by_signal: bool = True) -> None:
        super().__init__(message)
        self.by_signal = by_signal


class Diverged(Exception):
    """The loss stays NaN or infinite."""


class SaveFailed(Exception):
    """The last checkpoint could not be written; those before it are kept."""


class PeerLost(Exception):
    """Another rank of the run was lost, and the launcher replaces it."""


class OutOfMemory(Exception):
    """A step ran out of memory; the message says what uses it and what would help."""


def first_problem(error: ValidationError) -> str:
    """Describe the first problem of a JSON file in one line: where it is, and what was expected."""
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    text, value = f"{where}: {detail['msg']}" if where else detail["msg"], detail["input"]
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        text += f", got {value!r:.100}"
    return text
