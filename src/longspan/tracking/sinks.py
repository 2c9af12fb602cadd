"""Sinks: where metrics go besides the console and metrics.jsonl.

Each sink has a bounded queue and a thread of its own, which opens it, feeds it and closes it. So
one that raises, blocks or is slow costs training nothing and holds up no other; what it misses is
counted, and said when the run ends. metrics.jsonl has every line whatever happens to them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from textwrap import shorten
from threading import Thread
from typing import Any, Protocol

from longspan.errors import UserError
from longspan.files import atomic_write_text
from longspan.wording import counted

MAX_PENDING = 1000
"""Lines that wait for a sink; further ones are dropped."""
CLOSE_S = 30.0
"""How long the end of a run waits for all sinks, which may still be uploading."""
IDS = "sinks.json"
"""The file of the run folder with the run's ids, by which a resumed run continues in each sink."""
PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "trackio": "trackio",
}
"""What to install for each sink; it is imported under the sink's name."""


class Sink(Protocol):
    """Takes the numbers of metric lines. Only one thread calls it."""

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        """Take the numbers of a line, which was written `at` so many seconds since the epoch."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkRun:
    """What a sink is told of a run."""

    folder: Path
    id: str
    """The same in every start of the run."""
    project: str
    name: str
    config: Mapping[str, Any]
    """The run file, as tables."""
    step: int
    """The last step whose metrics are kept: a resumed run repeats those after it."""

    def stored_id(self, sink: str) -> str | None:
        """The id that a sink has given the run in an earlier start."""
        return _read_ids(self.folder).get(sink)

    def store_id(self, sink: str, value: str) -> None:
        atomic_write_text(self.folder / IDS, json.dumps({**_read_ids(self.folder), sink: value}))


OpenSink = Callable[[SinkRun], Sink]


class Sinks:
    """Feeds the sinks of a run. Use it as a context: at its end they are closed."""

    def __init__(self, run: SinkRun, openers: Mapping[str, OpenSink]) -> None:
        self._feeds = [_Feed(name, run, opener) for name, opener in openers.items()]

    def write(self, line: Mapping[str, Any]) -> None:
        """Pass on a line of metrics; never waits, never raises."""
        scalars = {name: x for name, x in flatten(line) if name not in ("step", "time")}
        item = scalars, int(line["step"]), float(line.get("time") or time.time())
        for feed in self._feeds:
            feed.put(item)

    @property
    def pending(self) -> int:
        """Lines that wait in the queues of all sinks."""
        return sum(feed.pending for feed in self._feeds)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline)


Item = tuple[Mapping[str, float], int, float]
"""A line of metrics: its numbers, its step, and when it was written."""
END: Item = ({}, -1, 0.0)
"""What `_Feed.end` puts into a queue."""


class _Feed:
    """A sink's queue and thread."""

    def __init__(self, name: str, run: SinkRun, opener: OpenSink) -> None:
        self._name, self._run, self._open = name, run, opener
        self._queue: Queue[Item] = Queue(MAX_PENDING)
        self._dropped, self._has_ended = 0, False  # set by the thread that trains
        self._failed, self._has_failed = 0, False  # set by the thread of the sink
        self._thread = Thread(target=self._feed, name=f"longspan-{name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        return self._queue.qsize()

    def put(self, item: Item) -> None:
        try:
            self._queue.put_nowait(item)
        except Full:
            self._dropped += 1

    def end(self) -> None:
        """Let the thread end after the lines that are in the queue."""
        self._has_ended = True
        with suppress(Full):  # then the thread does not wait for a line
            self._queue.put_nowait(END)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._dropped + self._failed
        if self._thread.is_alive():
            lost += sum(item is not END for item in list(self._queue.queue))
            _print(f"{self._name} has not finished within {CLOSE_S:g} s and is left behind")
        if lost:
            _print(f"{counted(lost, 'line')} of metrics did not reach {self._name}")

    def _feed(self) -> None:
        sink = None
        with self._tolerant():
            sink = self._open(self._run)
        while not (self._has_ended and self._queue.empty()):
            item = self._queue.get()
            if item is END:
                continue
            if sink is None:
                self._failed += 1
                continue
            with self._tolerant(line=1):
                sink.log(*item)
        if sink is not None:
            with self._tolerant():
                sink.close()

    @contextmanager
    def _tolerant(self, line: int = 0) -> Iterator[None]:
        """Print the first error of the sink, and count the lines that errors have cost."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever a sink raises, training goes on
            self._failed += line
            if not self._has_failed:
                self._has_failed = True
                reason = shorten(f"{type(error).__name__}: {error}", 300)
                _print(f"{self._name}: {reason}; training continues")


def flatten(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a metrics line by name; those of a table as "table/key"."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", x) for inner, x in flatten(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(value)


def check_installed(names: Sequence[str]) -> None:
    """Refuse sinks whose packages are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise UserError(
            f"track.sinks needs {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install {packages}, or remove {'it' if len(missing) == 1 else 'them'}"
        )


def open_sinks(
    names: Sequence[str],
    folder: Path,
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    step: int,
) -> Sinks:
    """Open the sinks of a run; its id is made at its first start."""
    from longspan.tracking.trackers import OPENERS

    run_id = ""
    if names:
        run_id = _read_ids(folder).get("run") or os.urandom(6).hex()
    run = SinkRun(folder, run_id, project, name or folder.resolve().name, config, step)
    if names:
        try:
            run.store_id("run", run_id)
        except OSError as error:
            raise UserError(f"cannot write {folder / IDS}: {error.strerror}") from error
    return Sinks(run, {name: OPENERS[name] for name in names})


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    valid = isinstance(found, dict)
    return {key: value for key, value in found.items() if isinstance(value, str)} if valid else {}


def _print(text: str) -> None:
    print(f"longspan: {text}", file=sys.stderr, flush=True)
