"""One problem of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem of a run file: the key, and what to change. The message follows the key."""

    path: str
    message: str


Problems = Iterator[Problem]
