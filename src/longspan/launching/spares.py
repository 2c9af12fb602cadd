"""Hot spares: processes that have imported everything and wait until they are to be a rank.

An import of PyTorch takes seconds, most of the time to recover of a small run. A launcher starts
one spare per rank once all ranks train, one after the other, so that they take little from them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Process = subprocess.Popen[bytes]

SPARE = "LONGSPAN_SPARE"
"""Set in the environment of a spare: the descriptor to which it writes when it is ready."""


class Spares:
    """The spares of a launcher, which outlive the ranks that they replace. A context."""

    def __init__(self, command: Sequence[str], *, is_wanted: Callable[[], bool]) -> None:
        """`command` calls `wait_as_spare`, and then goes on as any rank. More are started as long
        as `is_wanted`.
        """
        self.command, self._is_wanted = command, is_wanted
        self._environment: Mapping[str, str] = {}
        self._inherited: tuple[int, ...] = ()
        self._waiting: list[Process] = []
        self._starting: int | None = None

    def __enter__(self) -> Spares:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            process.kill()
            process.wait()
        self._forget_starting()

    @property
    def waiting(self) -> int:
        """How many there are, ready or not."""
        return len(self._waiting)

    def prepare(self, environment: Mapping[str, str], lock: int | None) -> None:
        """Set what spares are started with: their environment, and a descriptor to inherit."""
        self._environment = environment
        self._inherited = () if lock is None else (lock,)

    def keep(self, count: int) -> None:
        """Start another one, unless there are `count`, or the one before is not ready yet."""
        if self._starting is not None and not select.select([self._starting], [], [], 0)[0]:
            return
        self._forget_starting()
        self._waiting = [process for process in self._waiting if process.poll() is None]
        if len(self._waiting) >= count or not self._is_wanted():
            return
        self._starting, told = os.pipe()
        process = subprocess.Popen(
            self.command,
            env={**self._environment, SPARE: str(told)},
            stdin=subprocess.PIPE,
            pass_fds=(told, *self._inherited),
            start_new_session=True,
        )
        self._waiting.append(process)
        os.close(told)

    def take(self, variables: Mapping[str, str], log: Path | None) -> Process | None:
        """Have a spare be a rank with these variables, which writes to a log file or to the
        console; None if there is none.
        """  # fmt: skip
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            order = json.dumps([dict(variables), log and str(log)]).encode() + b"\n"
            try:
                process.stdin.write(order)
                process.stdin.close()
            except BrokenPipeError:  # it has failed
                process.wait()
                continue
            return process
        return None

    def _forget_starting(self) -> None:
        if self._starting is not None:
            os.close(self._starting)
            self._starting = None


def wait_as_spare() -> None:
    """In a spare, wait until it is to be a rank; it has imported all by then."""
    told = int(os.environ.pop(SPARE))
    os.write(told, b"\n")
    os.close(told)
    order = sys.stdin.readline()
    if not order:  # the launcher has ended
        raise SystemExit(1)
    variables, log = json.loads(order)
    os.environ.update(variables)
    if log is not None:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
