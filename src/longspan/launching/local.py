"""A launcher for several processes of one command on this machine.

Rank 0 writes to the console, the others to log files. When one rank fails, all are stopped, and the
traceback shown is that of the rank that failed first: the others fail only as a consequence. A
caller may have a lost rank replaced instead, while the others go on (`generation.py`).
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType

from longspan.faults import FAULT, LAUNCHER_PID
from longspan.generation import Generation
from longspan.launching.pinning import available_cores, pin_rank
from longspan.launching.spares import Process, Spares
from longspan.locking import INHERITED
from longspan.loopback import STORE, loopback_only
from longspan.stop_signals import stop_signals

GRACE_S = 5.0
"""How long the other ranks may take to exit once one has failed."""

SETTLE_S = 0.2
"""How long to look for further ranks that fail, before one that was lost is replaced."""

OnLost = Callable[[Mapping[int, str]], bool]
"""Called with the reasons why ranks were lost; returns whether to replace them."""

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
    variables: Mapping[str, str] = MappingProxyType({}),
    spares: Spares | None = None,
    on_lost: OnLost | None = None,
) -> int:
    """Run `command`, which calls `join_launcher`, as ranks 0 … nproc−1 and return one exit code.

    Log files are copied to `log_dir` at the end, if its parent exists by then; with `quiet` rank 0
    writes a log file too. Signals that were forwarded are appended to `received`. `on_poll` is
    called again and again while the processes run. Their environment is that of this process and
    `variables`. They inherit `lock`, the descriptor of the lock of their run folder. Ranks are made
    of `spares` as far as there are any, and more spares are started once all train. A rank that is
    lost then is replaced, if `on_lost` agrees.
    """
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    in_use = os.open(folder, os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_EX)
    logs = folder / "logs"
    logs.mkdir()
    environment = {
        **os.environ,
        **variables,
        "WORLD_SIZE": str(nproc),
        STORE: str(folder / "store"),
        "MASTER_ADDR": "127.0.0.1",  # Accelerate asks for it; nothing listens there
        LAUNCHER_PID: str(os.getpid()),
    }
    loopback_only(environment)
    if lock is not None:
        environment[INHERITED] = str(lock)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(available_cores()) // nproc)))
    if spares is not None:
        spares.prepare(environment, lock)

    def start(command: Sequence[str], more: Mapping[str, str], log: Path | None) -> Process:
        with contextlib.nullcontext() if log is None else log.open("ab") as output:
            return subprocess.Popen(
                command,
                env={**environment, **more},
                stdout=output,
                stderr=output,
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,  # so that Ctrl-C arrives once, through `forward`
            )

    generation = None if spares is None else Generation(folder, replaces_lost=on_lost is not None)
    ranks = _Ranks(logs, start, generation, spares, on_lost, quiet=quiet)

    def forward(number: int, frame: FrameType | None) -> None:
        if received is not None:
            received.append(number)
        ranks.send(number)

    previous = {s: signal.signal(s, forward) for s in stop_signals()}
    try:
        for rank in range(nproc):
            ranks.start(rank, command)
        ranks.wait(on_poll)
        return _report(ranks.codes, logs, quiet=quiet)
    finally:
        ranks.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
        if log_dir.parent.is_dir():
            _copy(logs, log_dir)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(in_use)


class _Ranks:
    """The processes of a run by rank."""

    def __init__(
        self,
        logs: Path,
        start: Callable[[Sequence[str], Mapping[str, str], Path | None], Process],
        generation: Generation | None,
        spares: Spares | None,
        on_lost: OnLost | None,
        *,
        quiet: bool,
    ) -> None:
        """`start`: starts a command with variables of its own, which writes to the console or a
        log file.
        """
        self._logs, self._start, self._quiet = logs, start, quiet
        self._generation, self._spares, self._on_lost = generation, spares, on_lost
        self._processes: dict[int, Process] = {}
        self._signals: list[int] = []
        self._is_recovering, self._is_stopping, self._is_interrupted = False, False, False

    @property
    def codes(self) -> list[int | None]:
        """Exit codes by rank; None while a process runs."""
        return [process.poll() for process in self._processes.values()]

    def start(self, rank: int, command: Sequence[str]) -> None:
        """Have a spare be a rank, or start one."""
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            TRACEBACK: str(self._traceback(rank)),
            **({} if self._generation is None else self._generation.environment()),
        }
        if rank in self._processes:
            variables[FAULT] = ""  # it was injected already
        log = None if rank == 0 and not self._quiet else self._logs / f"rank-{rank}.log"
        spare = None if self._spares is None else self._spares.take(variables, log)
        self._processes[rank] = spare or self._start(command, variables, log)

    def send(self, number: int) -> None:
        """Send a signal to all, or keep it until lost ranks are replaced, since a process that
        starts would not take it for a request. Ctrl-C after a signal is not kept, and ranks that
        hang in a collective, where they cannot handle it, are killed after GRACE_S.
        """
        self._is_interrupted |= self._is_stopping and number == signal.SIGINT
        self._is_stopping = True
        if self._is_recovering and not self._is_interrupted:
            self._signals.append(number)
            return
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def wait(self, on_poll: Callable[[], None]) -> None:
        """Wait until all have exited, or one has failed and the others have had GRACE_S to exit."""
        deadline = None
        while None in self.codes:
            if self._is_recovering and self._all_train():
                self._end_recovery()
            if self._spares is not None and self._all_train():
                self._spares.keep(len(self._processes))
            # One that ends before all are back, in whatever way, leaves the others waiting.
            has_failed = any(self.codes) or (self._is_recovering and 0 in self.codes)
            has_failed |= self._is_interrupted
            if deadline is None and has_failed and not self._replaces_lost():
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                return
            on_poll()
            time.sleep(0.05)

    def _all_train(self) -> bool:
        return self._generation is not None and self._generation.is_ready(len(self._processes))

    def _end_recovery(self) -> None:
        """Send the signals that came meanwhile."""
        self._is_recovering = False
        while self._signals:
            self.send(self._signals.pop(0))

    def _replaces_lost(self) -> bool:
        """Replace ranks that were lost, if all others train; otherwise return False."""
        if self._on_lost is None or self._is_stopping or not self._all_train():
            return False
        noticed = time.time()
        # Ranks that are told to stop from now on, of which some are lost, could not save.
        self._is_recovering = True
        time.sleep(SETTLE_S)  # an error of all ranks does not reach all at once
        if self._replace(self._on_lost, noticed):
            return True
        self._end_recovery()
        return False

    def _replace(self, on_lost: OnLost, noticed: float) -> bool:
        assert self._generation is not None
        assert self._spares is not None
        codes = self.codes
        lost = {rank: self._reason(rank, code) for rank, code in enumerate(codes) if code}
        failing = [rank for rank in range(len(codes)) if self._traceback(rank).exists()]
        if None in lost.values() or set(failing) - lost.keys() or 0 in codes or None not in codes:
            return False
        if not on_lost({rank: str(reason) for rank, reason in lost.items()}):
            return False
        self._generation = self._generation.next()
        for rank in lost:
            self._traceback(rank).unlink(missing_ok=True)
            self.start(rank, self._spares.command)
        self._generation.announce(list(lost), noticed)
        return True

    def _reason(self, rank: int, code: int) -> str | None:
        """Why a rank was lost; None if it has ended itself, and so would another in its place."""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        traceback = self._traceback(rank)
        text = traceback.read_text() if traceback.exists() else ""
        # Anything else, as running out of memory, is the run's own report.
        return f"failed:\n{text}" if text.startswith("Traceback") else None

    def _traceback(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.traceback"


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
    if not failed and None in codes:
        print("longspan: the ranks hang, and were killed", file=sys.stderr)
        return 1
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
    pin_rank()
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
        if not report_failure("".join(traceback.format_exception(kind, error, trace))):
            sys.__excepthook__(kind, error, trace)  # of a spare

    if parent:
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
