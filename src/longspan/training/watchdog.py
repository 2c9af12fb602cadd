"""The watchdog: ends a run that hangs, and says where.

Each rank writes the last point it has reached (`faults.fault_point`) into a heartbeat file. A
thread watches its own rank: when that has made no progress for `train.hang_timeout_s`, or what the
start, a save or an evaluation may take (`LIMITS`), some rank
does not reach a collective that the others wait in. The thread reads all heartbeats, names the rank
that is furthest behind and the collective that this one is blocked in, dumps this process's stacks
and ends it, so that the launcher ends all ranks and a scheduler can restart the run. After a
quarter of that time rank 0 names the straggler, which may only be slow.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from longspan import faults
from longspan.config import Train
from longspan.parallel.flight_recorder import pending_collective
from longspan.parallel.world import World
from longspan.tracking import HISTORY, DiskErrors, History

HEARTBEATS = "heartbeats"
UNWATCHED = ("writing", "commit", "pruning")
"""Points that threads reach, or rank 0 alone: they do not tell who is behind."""
LIMITS = {"staging": "save_timeout_s", "saving": "save_timeout_s", "evaluation": "eval_timeout_s"}
LIMITS |= {"profiling": "save_timeout_s"}
"""Keys of [train] by the point after which they apply; after others it is hang_timeout_s."""
START = "start_timeout_s"
"""The key that applies until the first step is done."""
POLL_S = 5.0
"""The longest time between two checks."""


@dataclass(frozen=True, order=True)
class Heartbeat:
    """A rank's progress. Sorted by whether its process runs, then by the points it has reached: the
    first is furthest behind.
    """

    is_running: bool
    count: int
    time: float
    rank: int
    point: str
    steps: int

    def __str__(self) -> str:
        ago = time.time() - self.time
        frozen = "" if self.is_running else ", its process is not running"
        return f"rank {self.rank} at {self.point} after step {self.steps}, {ago:.0f} s ago{frozen}"

    @staticmethod
    def read(path: Path, poll_s: float = POLL_S) -> Heartbeat | None:
        """Read a rank's file; None if there is none or the rank has reached no point."""
        try:
            count, moment, steps, point = path.read_text().strip().split(" ", 3)
            is_running = time.time() - path.stat().st_mtime < 2.5 * poll_s
            rank = int(path.name[5:])
            return Heartbeat(is_running, int(count), float(moment), rank, point, int(steps))
        except (OSError, ValueError):
            return None


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / HEARTBEATS / f"rank-{rank:05d}"


def time_limits(settings: Train) -> list[float]:
    """All time limits of the watchdog, in seconds."""
    return [getattr(settings, key) for key in (START, "hang_timeout_s", *LIMITS.values())]


@contextmanager
def start_limit(seconds: float) -> Iterator[Callable[[], None]]:
    """End this process if it reaches no point for `seconds`, until the yielded function is called.

    Before a run has started it has no folder to write heartbeats to.
    """
    progressed, done = time.monotonic(), Event()

    def beat(point: str) -> None:
        nonlocal progressed
        progressed = time.monotonic()

    def watch() -> None:
        while not done.wait(min(POLL_S, seconds / 4)):
            if time.monotonic() - progressed > seconds:
                try:
                    text = f"longspan: no progress at the start for {seconds:g} s (train.{START})"
                    print(f"{text}. Stacks:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(sys.stderr)
                finally:
                    os._exit(1)

    faults.set_listener(beat)
    Thread(target=watch, daemon=True).start()
    try:
        yield done.set
    finally:
        done.set()
        faults.set_listener(None)


class Watchdog:
    """Watches this rank while entered. `steps`: those that the run has done."""

    def __init__(self, run_dir: Path, world: World, settings: Train, steps: int) -> None:
        self._folder, self._rank, self._settings = run_dir / HEARTBEATS, world.rank, settings
        self._key, self._point = START, ""
        # By name, not by listing: an earlier start may have had more ranks.
        self._paths = [heartbeat_path(run_dir, rank) for rank in range(world.size)]
        self._path = self._paths[world.rank]
        self._count, self._progressed, self.steps = 0, time.monotonic(), steps
        before = Heartbeat.read(self._path)
        self.steps_before = before.steps if before else 0
        """Steps that were done when the run ended the last time."""
        self._poll_s = min(POLL_S, min(time_limits(settings)) / 4)
        self._has_warned = False
        self._done = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._file, self._disk_errors = -1, DiskErrors(self._path)

    def __enter__(self) -> Watchdog:
        with self._disk_errors:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")  # what an earlier start has left is of no meaning
        faults.set_listener(self._beat)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        faults.set_listener(None)
        self._done.set()
        self._thread.join()
        self._close()

    def _beat(self, point: str) -> None:
        if point in UNWATCHED:
            return
        self._count += 1
        if (self._point, point) != ("saving", "saving"):  # that is one save, which waits
            self._progressed, self._has_warned = time.monotonic(), False
        self.steps += point == "step"
        if self._key != START or point == "step":
            self._key = LIMITS.get(point, "hang_timeout_s")
        self._point = point
        text = f"{self._count} {time.time():.3f} {self.steps} {point}"
        with self._disk_errors:
            self._write(text.ljust(100).encode())

    def _write(self, content: bytes) -> None:
        """Overwrite the heartbeat. The file stays open between two, until an error."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o666)
            os.pwrite(self._file, content, 0)
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):  # a network file system reports errors of writes here too
                os.close(file)

    def _watch(self) -> None:
        while not self._done.wait(self._poll_s):
            with suppress(OSError):
                os.utime(self._path)  # this process runs, wherever it is blocked
            idle = time.monotonic() - self._progressed
            limit = getattr(self._settings, self._key)
            if idle > limit:
                self._end()
            elif idle > limit / 4 and self._rank == 0 and not self._has_warned:
                self._warn()

    def _heartbeats(self) -> list[Heartbeat]:
        """The rank furthest behind first."""
        read = (Heartbeat.read(path, self._poll_s) for path in self._paths)
        return sorted(filter(None, read))

    def _warn(self) -> None:
        beats = self._heartbeats()
        if not beats:
            return
        last, first = beats[0], beats[-1]
        if last.count < first.count or not last.is_running:
            self._has_warned = True
            text = f"longspan: waiting for {last}; furthest ahead is {first}"
            print(text, file=sys.stderr, flush=True)

    def _end(self) -> None:
        try:
            self._report()
        finally:  # even if the report fails
            os._exit(1)

    def _report(self) -> None:
        beats = self._heartbeats()
        behind = beats[0] if beats else None
        pending = pending_collective()
        blocked = f", which is blocked in {pending}" if pending else ""
        print(
            f"longspan: no progress on rank {self._rank} for "
            f"{getattr(self._settings, self._key):g} s{blocked} (train.{self._key}); "
            f"furthest behind is {behind}. All ranks: {'; '.join(map(str, beats[:16]))}. "
            f"Stacks of rank {self._rank}:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        history = History(self._folder.parent / HISTORY)
        history.write("failure", self.steps, cause=f"hang, furthest behind {behind}")
