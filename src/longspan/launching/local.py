"""n processes of one command on this machine, as one: they end together and speak through one.

Rank 0 has the console, the others write to log files. When one fails, all end, and the traceback
that is shown is of the rank that failed first: those of the others are only its wake.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from longspan.faults import PARENT

GRACE_S = 5.0
"""How long the others may take to end once one has failed."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that the processes get as well: they save and stop."""

TRACEBACK = "LONGSPAN_TRACEBACK"
"""Environment of a process started here, beside PARENT: where its traceback goes."""


def run_processes(
    command: Sequence[str],
    count: int,
    keep_logs: Path,
    *,
    quiet: bool = False,
    heard: list[int] | None = None,
) -> int:
    """Run `command`, which calls `join_launcher`, as ranks 0 … count−1; the exit code of the whole.

    The log files end in `keep_logs`, where its parent has come to be; `quiet` gives rank 0 one too.
    Signals that were passed on are added to `heard`.
    """
    logs = Path(tempfile.mkdtemp(prefix="longspan-logs-"))
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        PARENT: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if heard is not None:
            heard.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {s: signal.signal(s, forward) for s in FORWARDED}
    try:
        for rank in range(count):
            own = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                TRACEBACK: str(logs / f"rank-{rank}.traceback"),
            }
            with (logs / f"rank-{rank}.log").open("wb") as log:
                output = None if rank == 0 and not quiet else log
                # A session of its own: Ctrl-C reaches it once, by `forward`.
                processes.append(
                    subprocess.Popen(
                        command, env=own, stdout=output, stderr=output, start_new_session=True
                    )
                )
        _wait(processes)
        codes = [process.poll() for process in processes]
        return _report(codes, logs, quiet=quiet)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if keep_logs.parent.is_dir():
            shutil.copytree(logs, keep_logs, dirs_exist_ok=True)
        shutil.rmtree(logs, ignore_errors=True)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed and the others have had time to."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _report(codes: Sequence[int | None], logs: Path, *, quiet: bool) -> int:
    """Say which rank failed first, unless rank 0 has told it, and give the exit code."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name  # type: ignore[operator]
        print(f"longspan: rank {killed[0]} was ended by {name}", file=sys.stderr)
        return 1
    raised = sorted(logs.glob("*.traceback"), key=lambda path: path.stat().st_mtime_ns)
    if raised:
        rank = int(raised[0].stem.removeprefix("rank-"))
        print(f"longspan: rank {rank} failed:\n{raised[0].read_text()}", file=sys.stderr)
        return 1
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    code = codes[failed[0]]
    assert code is not None
    if failed[0] > 0 or quiet:
        text = (logs / f"rank-{failed[0]}.log").read_text(errors="replace")
        print(f"longspan: rank {failed[0]} ended with code {code}:\n{text}", file=sys.stderr)
    return code


def join_launcher() -> None:
    """In a process that `run_processes` or torchrun started: end with it, and tell it why.

    An agent of torchrun that is killed leaves its workers behind, which would train on beside
    those that take their place.
    """
    parent, agent = os.environ.get(PARENT), os.environ.get("TORCHELASTIC_RUN_ID")
    if (parent or agent) and sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: however it dies
        if parent and os.getppid() != int(parent):  # it died before this was asked for
            os._exit(1)
    if agent and os.environ.get("RANK") == "0":
        _warn_of_shared_store()

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_word("".join(traceback.format_exception(kind, error, trace)))

    if TRACEBACK in os.environ:
        sys.excepthook = leave


def leave_word(text: str) -> bool:
    """Let the launcher tell why this process ends; False where there is none."""
    file = os.environ.get(TRACEBACK)
    if file is not None:
        Path(file).write_text(text)
    return file is not None


def _warn_of_shared_store() -> None:
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        print(
            "longspan: torchrun's workers may hang when they are started again, since they read "
            "addresses of those before them: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give "
            "torchrun --standalone or --rdzv-backend c10d",
            file=sys.stderr,
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
