"""One node of several: it runs torchrun, and hosts the rendezvous if no other node does.

torchrun ends on all nodes when the node that hosts the rendezvous is lost. So no node is chosen for
that in advance. The host is whoever has locked the file `rendezvous` in the run folder, which all
nodes share: it writes its address there, and the others join it. The lock ends with the host. When
torchrun then ends on the other nodes, the first of them to lock the file is the next host, and the
run resumes from its newest checkpoint. Imports no torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from longspan.errors import UserError
from longspan.launching.job import TIMEOUTS
from longspan.locking import UNSUPPORTED
from longspan.wording import counted

FILE = "rendezvous"
"""In the run folder: where the nodes meet, and whether torchrun has ended there."""
RETRY_S = 15.0
"""How long a node whose torchrun has failed waits for the host to end or to be lost, before it
joins the same host again."""
POLL_S = 0.2
WATCH_S = 2.0
"""How often a node that has joined looks whether the host still has the lock."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What torchrun takes for a request to stop."""


@dataclass(frozen=True)
class Meeting:
    """The contents of the file. `ended`: the exit code of the host's torchrun."""

    endpoint: str
    id: str
    ended: int | None = None


@dataclass
class Node:
    """This node: `run` is its whole life.

    `arguments`: of torchrun, without those of the rendezvous. `restarts`: how often to meet again.
    """

    run_dir: Path
    address: str
    port: int
    restarts: int
    arguments: Sequence[str]
    _torchrun: subprocess.Popen[bytes] | None = None
    _signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Run torchrun until the run ends by itself or a signal stops it; return its exit code.

        It is started again after the rendezvous was lost, and after it was killed.
        """
        seen, left = "", self.restarts
        with self._forwarding():
            while True:
                met = self._meet(seen)
                if isinstance(met, int):
                    return met
                meeting, lock = met
                code = self._start(meeting, lock)
                if lock is not None:
                    # Killed or told to stop, this node is lost; the others can go on.
                    if code >= 0 and not self._signals:
                        _write(lock, Meeting(meeting.endpoint, meeting.id, code))
                    os.close(lock)
                if self._signals or code == 0 or (lock is not None and code > 0):
                    return code if code >= 0 else 1
                if left == 0:
                    _say(f"torchrun failed {self.restarts + 1} times on this node; giving up")
                    return 1
                seen, left = meeting.id, left - 1
                again = f"meeting again; {counted(left, 'restart')} left"
                _say(f"torchrun has ended on this node (exit code {code}); {again}")

    def _meet(self, seen: str) -> tuple[Meeting, int | None] | int:
        """Where to meet, and the lock if this node is the host.

        An exit code if torchrun has ended by itself where this node met the others last, which is
        the meeting with the id `seen`.
        """
        deadline = time.monotonic() + RETRY_S
        while not self._signals:
            lock, meeting = _lock(self.run_dir / FILE)
            if meeting is not None and meeting.id == seen and meeting.ended is not None:
                if lock is not None:
                    os.close(lock)
                return meeting.ended
            if lock is not None:
                endpoint = f"{self.address}:{_free_port(self.port)}"
                meeting = Meeting(endpoint, f"longspan-{secrets.token_hex(4)}")
                _write(lock, meeting)
                _say(f"this node hosts the rendezvous, at {endpoint}")
                return meeting, lock
            is_open = meeting is not None and meeting.ended is None
            if meeting and is_open and (meeting.id != seen or time.monotonic() > deadline):
                _say(f"this node joins the rendezvous at {meeting.endpoint}")
                return meeting, None
            time.sleep(POLL_S)
        return 1

    def _start(self, meeting: Meeting, lock: int | None) -> int:
        """Run torchrun once. It holds the lock too: a node without it does not host."""
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint]
        options += ["--rdzv-id", meeting.id]
        options += ["--rdzv-conf", f"{TIMEOUTS},is_host={'true' if lock is not None else 'false'}"]
        options += ["--local-addr", self.address]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *self.arguments]
        self._torchrun = subprocess.Popen(
            command,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,  # so that Ctrl-C arrives once, through `_forwarding`
            preexec_fn=_die_with_parent,
        )
        for number in self._signals:  # that came before it had started
            self._torchrun.send_signal(number)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._torchrun.wait(WATCH_S)
            if lock is None and self._has_lost(meeting):
                # torchrun would notice after minutes, where no packet says so. Its workers end too.
                self._torchrun.kill()

    def _has_lost(self, meeting: Meeting) -> bool:
        """Whether the host of a meeting is gone, without an end of the run."""
        lock, now = _lock(self.run_dir / FILE)
        if lock is not None:
            os.close(lock)
        if now is None or now.id != meeting.id:
            return lock is None and now is not None  # another node hosts already
        return lock is not None and now.ended is None

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)
            if self._torchrun is not None and self._torchrun.returncode is None:
                self._torchrun.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"longspan: {text}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """In torchrun, which ends with this process, as the workers end with it."""
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _lock(path: Path) -> tuple[int | None, Meeting | None]:
    """Try to lock the file; return its contents too. The descriptor is None if another node has."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(f"cannot write the run folder {path.parent}: {error.strerror}") from error
    is_ours = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_ours = False
    except OSError as error:
        os.close(descriptor)
        if error.errno not in UNSUPPORTED:
            raise
        raise UserError(
            f"cannot lock {path}: {error.strerror}; nodes find each other by a lock in the run "
            "folder: choose one on a file system that has locks, or run torchrun itself, with "
            "--rdzv-endpoint"
        ) from error
    meeting = _parse(os.pread(descriptor, 4096, 0))
    if is_ours:
        return descriptor, meeting
    os.close(descriptor)
    return None, meeting


def _parse(text: bytes) -> Meeting | None:
    """The contents of the file; None if it is empty, or being written."""
    with suppress(ValueError, TypeError):
        meeting = Meeting(**json.loads(text))
        is_valid = re.fullmatch(r"[\w.:\[\]-]+:\d{1,5}", meeting.endpoint, re.ASCII)
        if is_valid and re.fullmatch(r"[\w-]+", meeting.id, re.ASCII):
            return meeting if meeting.ended is None or isinstance(meeting.ended, int) else None
    return None


def _write(lock: int, meeting: Meeting) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(asdict(meeting)).encode() + b"\n", 0)
    os.fsync(lock)


def _free_port(preferred: int) -> int:
    """The preferred port if it is free here, or another."""
    for port in (preferred, 0):
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            return int(listener.getsockname()[1])
    raise UserError("no port is free on this node")
