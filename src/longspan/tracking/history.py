"""history.jsonl: when a run started, saved, rolled back, failed and ended; and its goodput.

Events are only ever appended, so lost work is recorded too.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.files import read_json_lines
from longspan.tracking.lines import LineFile
from longspan.wording import counted

HISTORY = "history.jsonl"
"""The name of the file in a run's folder."""
STOP_REQUESTED = "stop requested"
UNKNOWN_REASON = "ended without an error message, as by SIGKILL"


class History:
    """Appends events to a history file; does nothing if `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = LineFile(path) if path is not None else None

    def write(self, event: str, step: int, **fields: Any) -> None:
        if self._file is not None:
            line = {"time": time.time(), "event": event, "step": step, **fields}
            self._file.append(json.dumps(line))

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def events(self) -> list[dict[str, Any]]:
        """Read all events, without lines that a crash truncated."""
        lines = read_json_lines(self._path) if self._path is not None else []
        return [line for line in lines if {"time", "event", "step"} <= line.keys()]


def exit_reason(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the last start of the run ended; None if it never started, or finished.

    When one rank fails, the others report that they lost it: the first failure counts. One before
    a recovery, by which the failed rank was replaced, has not ended the run.
    """
    begins = ("start", "recovery")
    starts = [number for number, event in enumerate(events) if event["event"] in begins]
    if not starts:
        return None
    for event in events[starts[-1] :]:
        match event:
            case {"event": "end", "stop_requested": stop_requested}:
                return STOP_REQUESTED if stop_requested else None
            case {"event": "failure", "cause": cause}:
                return str(cause)
    return UNKNOWN_REASON


@dataclass(frozen=True)
class Goodput:
    """The share of a run's wall time that was spent on steps that were kept.

    Wall time runs from the first start. Downtime after a failure counts; the time between an end,
    of the run's own or on request, and the next start does not.
    """

    productive_s: float
    wall_s: float
    restarts: int
    causes: dict[str, int]
    """How many restarts each cause has led to."""
    recoveries: int
    """How often a lost rank was replaced while the others went on."""
    lost_steps: int
    blocked_s: float
    optimal_interval_s: float | None
    """Young-Daly checkpoint interval: √(2 · time a save blocks · mean time between failures)."""

    @property
    def ratio(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def __str__(self) -> str:
        causes = ", ".join(f"{count} × {cause}" for cause, count in self.causes.items())
        restarts = counted(self.restarts, "restart") + (f" ({causes})" if causes else "")
        if self.recoveries:
            restarts += f", {counted(self.recoveries, 'lost rank')} replaced"
        text = (
            f"goodput {self.ratio:.0%}: {self.productive_s:.0f} s of {self.wall_s:.0f} s spent on "
            f"steps that were kept; {restarts}, {counted(self.lost_steps, 'step')} lost, blocked "
            f"for {self.blocked_s:.1f} s by checkpoints"
        )
        if self.optimal_interval_s is not None:
            text += f"; optimal checkpoint interval {self.optimal_interval_s:.0f} s (Young-Daly)"
        return text


def goodput(
    history: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], now: float
) -> Goodput:
    """Compute goodput from a run's events and the metrics of the steps that were kept."""
    starts = [event for event in history if event["event"] == "start"]
    saves = [float(event["blocked_s"]) for event in history if event["event"] == "save"]
    productive, done = 0.0, 0
    for line in metrics:
        for unit in {"tokens", "samples"} & line.keys():
            productive += (line[unit] - done) / line[f"{unit}_per_s"]
            done = line[unit]
    wall = _wall_s(history, now)
    lost = [int(event.get("lost_steps", 0)) for event in history]
    causes = Counter(str(event["cause"]) for event in starts[1:] if event.get("cause"))
    failures = causes.total() - causes[STOP_REQUESTED]
    optimal = None
    if failures and saves:
        optimal = math.sqrt(2 * sum(saves) / len(saves) * wall / failures)
    recoveries = sum(event["event"] == "recovery" for event in history)
    return Goodput(
        productive,
        wall,
        max(0, len(starts) - 1),
        dict(+causes),
        recoveries,
        sum(lost),
        sum(saves),
        optimal,
    )


def _wall_s(history: Sequence[Mapping[str, Any]], now: float) -> float:
    """Seconds since the first start, without those from an end to the next start."""
    total, since = 0.0, None
    for event in history:
        if event["event"] == "start" and since is None:
            since = float(event["time"])
        elif event["event"] == "end" and since is not None:
            total, since = total + float(event["time"]) - since, None
    return total if since is None else total + now - since
