"""The signals that ask a run to save and stop."""

from __future__ import annotations

import signal

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """The signals to handle in this process: without SIGHUP under nohup, which has it ignored."""
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in HANDLED if number != signal.SIGHUP or not is_nohup]
