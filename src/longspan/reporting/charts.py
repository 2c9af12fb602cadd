"""The curves of a report as plain data, which the page's script draws.

    chart:  {"id", "section", "title", "unit", "note", "series": [series]}
    series: {"run", "label", "style", "x", "y", "low", "high", "per_point"}

`x` is an index into the page's `positions`, a list of {axis: [...]} that curves of the same lines
share; `low` and `high` are null for a curve that is shown line by line. NaN is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longspan.reporting.data import Metrics, ResultData, RunData, Vector

MAX_POINTS = 1_000
"""Points of a curve, about the pixels of a chart's width; a longer one is binned."""
MAX_SERIES = 12
"""Curves in one chart, per run."""
MAX_OTHER = 40
"""Charts of metrics that have no place of their own."""
GIB = 2**30


@dataclass(frozen=True)
class Chart:
    """A chart: metrics by the label of their curve, which scaling to `unit` multiplies."""

    id: str
    title: str
    unit: str
    curves: dict[str, str]
    section: str = "curves"
    scale: float = 1.0
    note: str = ""
    is_smoothed: bool = True
    """Whether the page's smoothing applies; not where a curve has no noise."""


LOSS = {"loss": "training", "validation_loss": "validation", "baseline_loss": "baseline"}
STYLES = {"validation_loss": "points", "baseline_loss": "dotted", "planned": "dotted"}
CHARTS = [
    Chart("loss", "Loss", "nats per token", LOSS),
    Chart(
        "throughput",
        "Throughput",
        "per second",
        {"tokens_per_s": "tokens", "samples_per_s": "samples"},
    ),
    Chart("mfu", "Model FLOPs utilisation (MFU)", "%", {"mfu": "MFU"}, scale=100),
    Chart("grad_norm", "Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    Chart("lr", "Learning rate", "", {"lr": "learning rate"}, is_smoothed=False),
]
MEMORY = Chart(
    "memory", "Memory per device", "GiB", {"memory_bytes": "peak"}, scale=1 / GIB, is_smoothed=False
)
NOT_CHARTED = {"time", "tokens", "samples", "goodput", "productive_s", "wall_s", "restarts"}
NOT_CHARTED |= {"recoveries", "lost_steps", "blocked_s", "optimal_interval_s"}
"""Positions on an axis, and the summary of goodput that a run ends with."""


def binned(values: Vector, bins: int = MAX_POINTS) -> tuple[Vector, Vector, Vector]:
    """The mean, minimum and maximum of `values` in bins of consecutive ones, at most `bins`.

    No extreme is lost. NaN is left out; a bin of only NaN is NaN.
    """
    starts = bin_starts(len(values), bins)
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, total / count, np.nan)
    return mean, np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan)


def bin_starts(count: int, bins: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The first index of each of at most `bins` bins of equal length."""
    return np.arange(0, count, max(1, math.ceil(count / bins)))


@dataclass
class Drawing:
    """Charts, and the positions that their curves share."""

    charts: list[dict[str, Any]] = field(default_factory=list)
    positions: list[dict[str, list[float | None]]] = field(default_factory=list)
    _known: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def add(self, chart: Chart, runs: Sequence[RunData], extra: Sequence[Any] = ()) -> None:
        """Add a chart if a run has one of its metrics; `extra`: series that are ready."""
        series = [
            self._series(run.metrics, index, name, label, chart.scale)
            for index, run in enumerate(runs)
            for name, label in chart.curves.items()
            if name in run.metrics
        ]
        if series:
            self.charts.append(
                {
                    "id": chart.id,
                    "section": chart.section,
                    "title": chart.title,
                    "unit": chart.unit,
                    "note": chart.note,
                    "is_smoothed": chart.is_smoothed,
                    "series": [*series, *extra],
                }
            )

    def _series(
        self, metrics: Metrics, run: int, name: str, label: str, scale: float
    ) -> dict[str, Any]:
        values = metrics.values(name) * scale
        mean, low, high = binned(values)
        per_point = math.ceil(len(values) / len(mean))
        return {
            "run": run,
            "label": label,
            "style": STYLES.get(name, "line"),
            "x": self._place(metrics, run, name),
            "y": numbers(mean),
            "low": numbers(low) if per_point > 1 else None,
            "high": numbers(high) if per_point > 1 else None,
            "per_point": per_point,
        }

    def _place(self, metrics: Metrics, run: int, name: str) -> int:
        axes = {axis: metrics.axis(axis, name) for axis in metrics.axes()}
        key = run, axes["step"].tobytes()
        if key not in self._known:
            self._known[key] = len(self.positions)
            self.positions.append({a: numbers(binned(values)[0]) for a, values in axes.items()})
        return self._known[key]


def numbers(values: Iterable[float]) -> list[float | None]:
    """Values for JSON: six digits, integers as such, null for NaN and infinity."""
    found: list[float | None] = []
    for value in np.asarray(list(values), dtype=np.float64).tolist():
        if not math.isfinite(value):
            found.append(None)
        elif value == int(value) and abs(value) < 1e15:
            found.append(int(value))
        else:
            found.append(float(f"{value:.6g}"))
    return found


def draw(runs: Sequence[RunData], plans: Sequence[ResultData] = ()) -> Drawing:
    """All charts of `runs`; the memory that a plan predicts is drawn beside that measured."""
    drawing = Drawing()
    for chart in CHARTS:
        drawing.add(chart, runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    memory = [name for name in names if name.startswith("memory") and name != "memory_bytes"]
    curves = MEMORY.curves | {name: _plain(name, "memory") for name in memory[:MAX_SERIES]}
    drawing.add(
        Chart(**{**vars(MEMORY), "curves": curves}), runs, [_planned(plan) for plan in plans]
    )
    skew = [name for name in names if name.startswith("step_time")]
    times = {name: _plain(name, "step_time") for name in skew if not name.endswith("rank")}
    drawing.add(Chart("skew", "Step time of the ranks", "seconds", times, "ranks"), runs)
    slowest = [name for name in names if name.endswith("slowest_rank")]
    curves = {name: "slowest rank" for name in slowest[:1]}
    drawing.add(Chart("slowest", "Slowest rank", "rank", curves, "ranks"), runs)

    shown = {name for chart in [*CHARTS, MEMORY] for name in chart.curves}
    shown |= {*memory, *skew, *slowest} | NOT_CHARTED
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        if name in shown or name.startswith("causes/"):
            continue
        if not any(np.nan_to_num(run.metrics.values(name)).any() for run in runs):
            continue  # a count that stays 0, as that of skipped steps
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[name] = rest or _plain(name)
    for number, (group, curves) in enumerate(list(groups.items())[:MAX_OTHER]):
        left_out = len(curves) - MAX_SERIES
        note = f"{left_out} more curves are left out" if left_out > 0 else ""
        few = dict(list(curves.items())[:MAX_SERIES])
        title = _plain(group)
        title = title[:1].upper() + title[1:]
        drawing.add(Chart(f"other-{number}", title, "", few, "other", note=note), runs)
    return drawing


def _plain(name: str, prefix: str = "") -> str:
    """A metric's name in words, without a prefix that the chart's title says."""
    text = name.removeprefix(prefix).strip("_/ ").removesuffix("_bytes").removesuffix("_s")
    return text.replace("_", " ").replace("/", " ") or name.replace("_", " ")


def _planned(plan: ResultData) -> dict[str, Any]:
    """A level across the chart: what a plan says that the fullest device needs."""
    stages = plan.content["stages"]
    sizes = [stage.get("on_device") for stage in stages if isinstance(stage, dict)]
    most = max((size for size in sizes if isinstance(size, int | float)), default=math.nan)
    label = f"planned without activations ({plan.name})"
    return {"run": None, "label": label, "style": "level", "y": numbers([most / GIB])}
