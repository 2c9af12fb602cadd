"""The signals that ask a run to save and stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """The signals to handle in this process: without SIGHUP under nohup, which has it ignored."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in HANDLED if number != signal.SIGHUP or not is_nohup]


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """In this context the first of these signals raises KeyboardInterrupt, so that a command that
    has nothing to save removes what it has made. Of those that follow, as launchers send them, only
    Ctrl-C still does.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in previous:
            keeps = other == signal.SIGINT
            signal.signal(other, signal.default_int_handler if keeps else signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
