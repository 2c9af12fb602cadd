"""A run that hangs ends, and says where.

Each rank writes the last point it has come to (`faults.reach`) into a file of the run's folder. A
thread looks at its own rank's: when that has not moved for `train.hang_timeout_s`, some rank does not come
to where the others wait for it. The thread reads all files, names the rank that is behind and the
collective that this one waits in, shows what this process is doing, and ends it, so that the
launcher ends all and a scheduler can start the run again. After a quarter of that time the main
rank names who is behind, if any is: it may be slow and come yet.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from longspan import faults
from longspan.parallel.flight_recorder import awaited_collective
from longspan.parallel.world import World
from longspan.tracking import HISTORY, History

HEARTBEATS = "heartbeats"
BESIDE = ("writing", "naming", "pruning")
"""Points that threads come to, or the main rank alone: they tell nothing of who is behind."""
LOOK_S = 5.0
"""The longest between two looks."""


@dataclass(frozen=True, order=True)
class Beat:
    """Whether a rank's own watchdog still looks, how many points the rank has come to, when it came
    to the last, which that is, and how many steps of the run it had done. The least is behind.
    """

    looks: bool
    count: int
    moment: float
    rank: int
    point: str
    steps: int

    def __str__(self) -> str:
        ago = time.time() - self.moment
        stands = "" if self.looks else ", whose process stands still"
        return f"rank {self.rank} at {self.point} after step {self.steps}, {ago:.0f} s ago{stands}"

    @staticmethod
    def read(path: Path, between_looks: float = LOOK_S) -> Beat | None:
        """From a rank's file; None where there is none or it has not come to any point."""
        try:
            count, moment, steps, point = path.read_text().strip().split(" ", 3)
            looks = time.time() - path.stat().st_mtime < 2.5 * between_looks
            return Beat(looks, int(count), float(moment), int(path.name[5:]), point, int(steps))
        except (OSError, ValueError):
            return None


class Watchdog:
    """While entered, this rank is watched. `steps`: how many of the run are done."""

    def __init__(self, run_dir: Path, world: World, seconds: float, steps: int) -> None:
        self._folder, self._rank, self._seconds = run_dir / HEARTBEATS, world.rank, seconds
        # Not all there are: an earlier start may have had more ranks.
        self._paths = [self._folder / f"rank-{rank:05d}" for rank in range(world.size)]
        self._path = self._paths[world.rank]
        self._count, self._moved, self.steps = 0, time.monotonic(), steps
        before = Beat.read(self._path)
        self.steps_before = before.steps if before else 0
        """How many were done when the run ended the last time."""
        self._between = min(LOOK_S, seconds / 4)
        self._has_warned = False
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._file = -1

    def __enter__(self) -> Watchdog:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        faults.listen(self._beat)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        faults.listen(None)
        self._over.set()
        self._thread.join()
        os.close(self._file)

    def _beat(self, point: str) -> None:
        if point in BESIDE:
            return
        self._count += 1
        self._moved, self._has_warned = time.monotonic(), False
        self.steps += point == "step"
        text = f"{self._count} {time.time():.3f} {self.steps} {point}"
        os.pwrite(self._file, text.ljust(100).encode(), 0)

    def _watch(self) -> None:
        while not self._over.wait(self._between):
            with suppress(OSError):
                os.utime(self._file)  # this process runs, wherever it waits
            still = time.monotonic() - self._moved
            if still > self._seconds:
                self._end()
            elif still > self._seconds / 4 and self._rank == 0 and not self._has_warned:
                self._warn()

    def _beats(self) -> list[Beat]:
        """The rank furthest behind first."""
        read = (Beat.read(path, self._between) for path in self._paths)
        return sorted(filter(None, read))

    def _warn(self) -> None:
        beats = self._beats()
        if not beats:
            return
        last, first = beats[0], beats[-1]
        if last.count < first.count or not last.looks:
            self._has_warned = True
            text = f"longspan: the others wait for {last}; the furthest is {first}"
            print(text, file=sys.stderr, flush=True)

    def _end(self) -> None:
        try:
            self._tell()
        finally:  # whatever cannot be told
            os._exit(1)

    def _tell(self) -> None:
        beats = self._beats()
        behind = beats[0] if beats else None
        awaited = awaited_collective()
        within = f", which waits in {awaited}" if awaited else ""
        print(
            f"longspan: nothing has moved on rank {self._rank} for {self._seconds:g} s{within}; "
            f"furthest behind is {behind}. Of all: {'; '.join(map(str, beats[:16]))}. What rank "
            f"{self._rank} is doing:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        history = History(self._folder.parent / HISTORY)
        history.write("failure", self.steps, cause=f"a hang, furthest behind {behind}")
