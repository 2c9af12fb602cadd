"""The ways a verb ends early that are not a defect of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """The user's input is wrong. The message says what was expected, what came, what to change."""


class Damaged(UserError):
    """A checkpoint is not as it was written."""


class Stopped(Exception):
    """The run was asked to stop and has saved a checkpoint."""


class Diverged(Exception):
    """The loss is no longer a number."""


class OutOfMemory(Exception):
    """A step did not fit into the memory; the message says what filled it and what would help."""


def first_problem(error: ValidationError) -> str:
    """What is wrong with a file's JSON, in one line: where, and what was expected."""
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]
