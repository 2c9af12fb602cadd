"""Worker processes that read or encode data: they leave signals to the parent, and die with it."""

from __future__ import annotations

import os
import signal
import threading
import time

POLL_S = 1.0
"""How often a worker looks whether its parent is still there."""


def prepare_worker(parent: int) -> None:
    """Prepare this process: signals are the parent's affair, and it does not outlive the parent."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
