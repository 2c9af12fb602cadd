"""What a report shows, read from run folders and from results of other commands.

The files may be truncated, or not be ours: reads are bounded, and what cannot be used is left out
and named in `problems`. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longspan.config import Run
from longspan.errors import UserError
from longspan.files import check_depth, json_lines, read_bounded, read_json_object
from longspan.runfile import RUN_FILE, parse_run
from longspan.toml import tomllib
from longspan.tracking.history import HISTORY, STOP_REQUESTED, Goodput, exit_reason, goodput
from longspan.wording import counted, shown

MAX_METRICS_BYTES = 1 << 30
MAX_FILE_BYTES = 16 << 20
"""Size of history.jsonl and of JSON files."""
MAX_VALUE = 1e100
"""Size of a metric; a larger one counts as infinite, so that sums of metrics are finite."""
MAX_KEYS = 500
"""Distinct metrics of a run."""
MAX_TEXTS = 1_000
"""Texts that are kept of each name, the newest, such as why a run was rolled back."""
MAX_TEXT_NAMES = 20
ALIVE_S = 15.0
"""Age of a heartbeat at which its run counts as ended; a rank writes one every five seconds."""

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


class Metrics:
    """The numbers of metrics.jsonl, by name; nested objects have names like "memory/weights".

    A null, which stands for NaN and infinity, is NaN.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any] | None]) -> None:
        self.unreadable = 0
        self.has_more_keys = False
        self._texts: dict[str, deque[tuple[int, str]]] = {}
        steps: list[int] = []
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for line in lines:
            step = line.get("step") if line is not None else None
            if line is None or type(step) is not int or not 0 <= step < 1 << 53:
                self.unreadable += 1
                continue
            row = len(steps)
            steps.append(step)
            for name, value in line.items() if _is_flat(line) else _flat(line):
                if name in columns:
                    rows, values = columns[name]
                elif name == "step":
                    continue
                elif isinstance(value, str):
                    if name in self._texts or len(self._texts) < MAX_TEXT_NAMES:
                        texts = self._texts.setdefault(name, deque(maxlen=MAX_TEXTS))
                        texts.append((step, value))
                    continue
                elif len(columns) < MAX_KEYS:
                    rows, values = columns[name] = ([], [])
                else:
                    self.has_more_keys = True
                    continue
                rows.append(row)
                values.append(value if type(value) is float else as_float(value))
        self.lines = len(steps)
        self._steps = np.array(steps, dtype=np.int64)
        self._columns: dict[str, tuple[np.ndarray[Any, np.dtype[np.int64]], Vector]] = {}
        for name, (places, found) in columns.items():
            column = np.array(found, dtype=np.float64)
            column[np.abs(column) > MAX_VALUE] = np.nan
            if np.isfinite(column).any():
                self._columns[name] = np.array(places, dtype=np.int64), column

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        """The metrics that have a finite value somewhere, in order of appearance."""
        return list(self._columns)

    def values(self, name: str) -> Vector:
        """All values of a metric, in order of the lines; empty if there are none."""
        return self._columns[name][1] if name in self._columns else np.empty(0)

    def texts(self, name: str) -> list[tuple[int, str]]:
        """Step and text of the newest values of a metric that are text."""
        return list(self._texts.get(name, ()))

    @property
    def last_step(self) -> int:
        return int(self._steps[-1]) if self.lines else 0

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.values(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def has_diverged(self, name: str) -> bool:
        """Whether the newest line with a metric has it as null: non-finite."""
        values = self.values(name)
        return bool(len(values) and not np.isfinite(values[-1]))

    def best(self, name: str) -> float | None:
        """The smallest finite value of a metric."""
        values = self.values(name)
        finite = values[np.isfinite(values)]
        return float(finite.min()) if len(finite) else None

    def axis(self, axis: str, name: str) -> Vector:
        """Where the values of metric `name` are on an axis: "step", "tokens" or "time"."""
        rows = self._columns[name][0]
        if axis == "step":
            return np.asarray(self._steps[rows], dtype=np.float64)
        found: Vector = self._positions(axis)[rows]
        return found

    def axes(self) -> list[str]:
        """The axes that these metrics have a position on."""
        return ["step", *(axis for axis in ("tokens", "time") if len(self._positions(axis)))]

    def _positions(self, axis: str) -> Vector:
        """The tokens or seconds at each line; a line without takes those of the line before."""
        return self._tokens if axis == "tokens" else self._seconds

    @cached_property
    def _tokens(self) -> Vector:
        unit = "tokens" if "tokens" in self._columns else "samples"
        return self._filled(unit)

    @cached_property
    def _seconds(self) -> Vector:
        """Seconds since the first line's start: by the clock, or else the sum of training time."""
        if self.has_clock:
            times = self.values("time")
            # The first line may be an evaluation, which has no time.
            since = self._filled("time") - times[np.isfinite(times)][0]
            found: Vector = np.maximum(since, 0.0)
            return found
        for unit in ("tokens", "samples"):
            if unit in self._columns and f"{unit}_per_s" in self._columns:
                rows, done = self._columns[unit]
                rate = self._spread(f"{unit}_per_s")[rows]
                with np.errstate(all="ignore"):
                    spent = np.diff(done, prepend=0.0) / rate
                spent[~(np.isfinite(spent) & (spent > 0))] = 0.0
                whole = np.full(self.lines, np.nan)
                whole[rows] = spent.cumsum()
                return _carried(whole)
        return np.empty(0)

    @property
    def has_clock(self) -> bool:
        """Whether the axis "time" is wall time, not the sum of training time.

        The lines of a run that an earlier version began have no time at first.
        """
        if "time" not in self._columns:
            return False
        return len(self._columns["time"][0]) >= max(len(rows) for rows, _ in self._columns.values())

    def _spread(self, name: str) -> Vector:
        """One value for each line, NaN where a line has none."""
        whole = np.full(self.lines, np.nan)
        rows, values = self._columns[name]
        whole[rows] = values
        return whole

    def _filled(self, name: str) -> Vector:
        return _carried(self._spread(name)) if name in self._columns else np.empty(0)


def _carried(values: Vector) -> Vector:
    """Replace each NaN by the last finite value before it, 0 if there is none."""
    finite = np.isfinite(values)
    index = np.maximum.accumulate(np.where(finite, np.arange(len(values)), 0))
    found: Vector = values[index]
    found[~np.isfinite(found)] = 0.0
    return found


def _is_flat(line: Mapping[str, Any]) -> bool:
    """Whether all values are numbers or null, as on nearly all lines."""
    return {*map(type, line.values())} <= {int, float, type(None)}


def _flat(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, nulls and texts of a line; objects are followed for two levels."""
    for key, value in line.items():
        name = f"{prefix}{key}"
        if isinstance(value, str):
            yield name, value[:500]
        elif isinstance(value, dict) and prefix.count("/") < 2:
            yield from _flat(value, f"{name}/")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def as_float(value: Any) -> float:
    """A number of a file; NaN if there is none, or if it is beyond the range of a float."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


@dataclass(frozen=True)
class State:
    """How a run stands."""

    name: Literal["running", "finished", "stopped", "failed", "not started"]
    why: str = ""


@dataclass
class RunData:
    """One run, as its folder tells it."""

    folder: Path
    metrics: Metrics
    events: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    """The tables of run.toml, whether or not they are a valid run."""
    environment: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    heartbeat: float | None = None
    """When a rank has last written a heartbeat."""
    problems: list[str] = field(default_factory=list)
    now: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def ranks(self) -> int:
        """Processes of the newest start, 1 if the history does not say."""
        for event in reversed(self.events):
            count = event.get("ranks")
            if event["event"] == "start" and type(count) is int and 0 < count <= 1 << 24:
                return count
        return 1

    def predicted(self, name: str) -> float | None:
        """What the planner predicted at the newest start: tokens_per_s or memory_bytes."""
        for event in reversed(self.events):
            if event["event"] == "start":
                found = event.get("predicted")
                value = as_float(found.get(name)) if isinstance(found, dict) else math.nan
                return value if math.isfinite(value) and value > 0 else None
        return None

    @cached_property
    def run(self) -> Run | None:
        """The run file, if it is valid for this version."""
        try:
            return parse_run(self.tables, world=None) if self.tables else None
        except UserError:
            return None

    @property
    def step(self) -> int:
        """The last step that metrics or history know."""
        steps: list[int] = [event["step"] for event in self.events[-1:]]
        return max([*steps, self.metrics.last_step])

    @property
    def state(self) -> State:
        if not self.events:
            return State("not started", "history.jsonl has no event")
        cause = exit_reason(self.events)
        # Clocks of machines differ a little; a heartbeat far in the future is none of ours.
        is_alive = self.heartbeat is not None and abs(self.now - self.heartbeat) < ALIVE_S
        if cause is None:
            return State("finished")
        if cause == STOP_REQUESTED:
            return State("stopped", cause)
        last = self.events[-1]["event"]
        if is_alive and last not in ("end", "failure"):
            return State("running")
        return State("failed", cause)

    @cached_property
    def goodput(self) -> Goodput | None:
        """Computed from the history, until now if the run is running."""
        if not any(event["event"] == "start" for event in self.events):
            return None
        now = self.now if self.state.name == "running" else self.heartbeat or self._last_time
        unit = "tokens" if "tokens" in self.metrics else "samples"
        rows: list[dict[str, float]] = []
        if unit in self.metrics and f"{unit}_per_s" in self.metrics:
            done, rates = self.metrics.values(unit), self.metrics.values(f"{unit}_per_s")
            rows = [
                {unit: tokens, f"{unit}_per_s": rate}
                for tokens, rate in zip(done.tolist(), rates.tolist(), strict=False)
                if math.isfinite(tokens) and rate > 0
            ]
        return goodput(self.events, rows, max(now, self._last_time))

    @property
    def _last_time(self) -> float:
        return max((event["time"] for event in self.events), default=0.0)


@dataclass
class ResultData:
    """A result that `plan`, `bench`, `drill` or `profile` printed as JSON."""

    path: Path
    kind: Literal["plan", "bench", "drill", "profile"]
    content: dict[str, Any]

    @property
    def name(self) -> str:
        title = self.content.get("device_title")
        if self.kind == "plan" and isinstance(title, str):
            return f"{self.content.get('gpus')} × {title}"
        return self.path.name


Input = RunData | ResultData

PROFILE = Path("profile", "summary.json")
KINDS: dict[str, set[str]] = {
    "plan": {"gpus", "stages", "parameters", "derived"},
    "drill": {"outcomes", "passed", "same_bytes"},
}
"""Keys by which a result is recognised; a result of `bench` has lists of rows."""


def read_input(path: Path) -> Input:
    """Read a run folder, or the JSON that `plan`, `bench` or `drill` printed."""
    return read_run(path) if os.path.isdir(path) else read_result(path)


def read_run(folder: Path) -> RunData:
    """Read a run folder; a UserError if it is none."""
    if not os.path.isdir(folder):
        raise UserError(f"expected a run folder, got {folder}: it does not exist or is a file")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"cannot read {folder}: permission denied")
    names = ("metrics.jsonl", HISTORY, RUN_FILE)
    if not any(os.path.exists(folder / name) for name in names):
        expected = ", ".join(names)
        raise UserError(f"{folder} is not a run folder: it has none of {expected}")
    problems: list[str] = []
    metrics = Metrics(_lines(folder / "metrics.jsonl", MAX_METRICS_BYTES, problems))
    if metrics.unreadable:
        lines = counted(metrics.unreadable, "line")
        problems.append(f"metrics.jsonl: {lines} without a step left out")
    if metrics.has_more_keys:
        problems.append(f"metrics.jsonl: only the first {MAX_KEYS} metrics are shown")
    events = [
        event
        for line in _lines(folder / HISTORY, MAX_FILE_BYTES, problems)
        if line is not None and (event := _event(line)) is not None
    ]
    return RunData(
        folder,
        metrics,
        events,
        _tables(folder / RUN_FILE, problems),
        _object(folder / "env.json", problems),
        _object(folder / PROFILE, problems),
        _newest_heartbeat(folder / "heartbeats"),
        problems,
    )


def read_result(path: Path) -> ResultData:
    """Read a result of another command; a UserError if it is none."""
    content = read_json_object(path, MAX_FILE_BYTES)
    for kind, keys in KINDS.items():
        if keys <= content.keys():
            return ResultData(path, kind, content)  # type: ignore[arg-type]
    if tables_of(content):
        return ResultData(path, "bench", content)
    raise UserError(
        f"{path} is no result that a report can show: expected the JSON of longspan plan --json, "
        f"bench --json or drill --json, got an object with the keys {shown(sorted(content))}"
    )


def tables_of(content: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The lists of rows in a result of `bench`, by name."""
    return {
        name: value
        for name, value in content.items()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    }


def rows_of(value: Any) -> list[dict[str, Any]]:
    """The objects in a list of a file; none if it is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _lines(path: Path, max_bytes: int, problems: list[str]) -> Iterator[dict[str, Any] | None]:
    """The lines of a file; none, and a problem, if it cannot be read."""
    try:
        yield from json_lines(path, max_bytes)
        if path.stat().st_size > max_bytes:
            problems.append(f"{path.name}: only the first {max_bytes >> 20} MiB are shown")
    except FileNotFoundError:
        problems.append(f"{path.name} does not exist")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")


def _event(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """An event whose values have the types that goodput needs; None if it has no time or step."""
    moment, name, step = line.get("time"), line.get("event"), line.get("step")
    if not (isinstance(name, str) and type(step) is int and 0 <= step < 1 << 53):
        return None
    if not isinstance(moment, int | float) or not 0 <= moment < 1e12:
        return None
    event = {**line, "time": float(moment), "event": name[:100], "step": step}
    for key in ("blocked_s", "lost_steps"):
        value = as_float(line.get(key))
        event[key] = value if 0 <= value < 1e12 else 0.0
    return event


def _tables(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        tables = tomllib.loads(read_bounded(path, MAX_FILE_BYTES).decode())
        check_depth(tables)
        return tables
    except UserError as error:
        problems.append(str(error))
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not valid TOML: {error}")
    return {}


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object; an empty one if the file is missing, and a problem if it is not valid."""
    try:
        path.lstat()
        return read_json_object(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except (UserError, OSError) as error:
        problems.append(str(error))
        return {}


def _newest_heartbeat(folder: Path) -> float | None:
    try:
        return max((path.stat().st_mtime for path in folder.iterdir()), default=None)
    except OSError:
        return None
