"""A launcher for several processes of one command on this machine.

Rank 0 writes to the console, the others to log files. When one rank fails, all are stopped, and the
traceback shown is that of the rank that failed first: the others fail only as a consequence.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from longspan.faults import LAUNCHER_PID
from longspan.locking import INHERITED
from longspan.loopback import STORE, loopback_only
from longspan.stop_signals import stop_signals

GRACE_S = 5.0
"""How long the other ranks may take to exit once one has failed."""

TEMPORARY = "longspan-launch-"
"""Prefix of a launcher's temporary folder, which only its user can read: logs and rendezvous."""

TRACEBACK = "LONGSPAN_TRACEBACK"
"""Set in the environment of each rank: the file that receives its traceback."""


def run_processes(
    command: Sequence[str],
    nproc: int,
    log_dir: Path,
    *,
    quiet: bool = False,
    received: list[int] | None = None,
    lock: int | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> int:
    """Run `command`, which calls `join_launcher`, as ranks 0 … nproc−1 and return one exit code.

    Log files are copied to `log_dir` at the end, if its parent exists by then; with `quiet` rank 0
    writes a log file too. Signals that were forwarded are appended to `received`. `on_poll` is
    called again and again while the processes run. They inherit `lock`, the descriptor of the lock
    of their run folder.
    """
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    in_use = os.open(folder, os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_EX)
    logs = folder / "logs"
    logs.mkdir()
    environment = {
        **os.environ,
        "WORLD_SIZE": str(nproc),
        STORE: str(folder / "store"),
        "MASTER_ADDR": "127.0.0.1",  # Accelerate asks for it; nothing listens there
        LAUNCHER_PID: str(os.getpid()),
    }
    loopback_only(environment)
    if lock is not None:
        environment[INHERITED] = str(lock)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if received is not None:
            received.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {s: signal.signal(s, forward) for s in stop_signals()}
    try:
        for rank in range(nproc):
            rank_environment = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                TRACEBACK: str(logs / f"rank-{rank}.traceback"),
            }
            with (logs / f"rank-{rank}.log").open("wb") as log:
                output = None if rank == 0 and not quiet else log
                processes.append(
                    subprocess.Popen(
                        command,
                        env=rank_environment,
                        stdout=output,
                        stderr=output,
                        pass_fds=() if lock is None else (lock,),
                        start_new_session=True,  # so that Ctrl-C arrives once, through `forward`
                    )
                )
        _wait(processes, on_poll)
        codes = [process.poll() for process in processes]
        return _report(codes, logs, quiet=quiet)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if log_dir.parent.is_dir():
            _copy(logs, log_dir)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(in_use)


def _remove_leftovers() -> None:
    """Remove the temporary folders of this user's launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):  # in use, just created, or already removed
            state = folder.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < 60:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _copy(logs: Path, folder: Path) -> None:
    """Copy log files; the permissions follow the umask, not those of the temporary folder."""
    try:
        folder.mkdir(exist_ok=True)
        for path in logs.iterdir():
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        print(f"longspan: cannot copy the logs to {folder}: {error.strerror}", file=sys.stderr)


def _wait(processes: Sequence[subprocess.Popen[bytes]], on_poll: Callable[[], None]) -> None:
    """Wait until all have exited, or one has failed and the others have had GRACE_S to exit."""
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        on_poll()
        time.sleep(0.05)


def _report(codes: Sequence[int | None], logs: Path, *, quiet: bool) -> int:
    """Print which rank failed first, unless rank 0 has printed it, and return the exit code."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        name = signal.Signals(-codes[killed[0]]).name  # type: ignore[operator]
        print(f"longspan: rank {killed[0]} was killed by {name}", file=sys.stderr)
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
        print(f"longspan: rank {failed[0]} exited with code {code}:\n{text}", file=sys.stderr)
    return code


def join_launcher() -> None:
    """Tie a process that `run_processes` or torchrun started to its launcher.

    It is killed when the launcher dies, and reports its traceback to it. Without this, a torchrun
    agent that is killed would leave workers behind that keep training next to their replacements.
    """
    parent, agent = os.environ.get(LAUNCHER_PID), os.environ.get("TORCHELASTIC_RUN_ID")
    if (parent or agent) and sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent and os.getppid() != int(parent):  # it died before prctl
            os._exit(1)
    if agent and os.environ.get("RANK") == "0":
        _warn_about_shared_store()

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        report_failure("".join(traceback.format_exception(kind, error, trace)))

    if TRACEBACK in os.environ:
        sys.excepthook = report


def report_failure(text: str) -> bool:
    """Pass the launcher the reason why this process exits; return False if there is no launcher."""
    file = os.environ.get(TRACEBACK)
    if file is not None:
        Path(file).write_text(text)
    return file is not None


def _warn_about_shared_store() -> None:
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        print(
            "longspan: workers may hang after torchrun restarts them, because they read addresses "
            "of the previous workers from its store: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and "
            "pass torchrun --standalone or --rdzv-backend c10d",
            file=sys.stderr,
        )
