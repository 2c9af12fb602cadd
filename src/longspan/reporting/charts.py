"""The curves of a report as plain data, which the page's script draws.

    chart:  {"id", "section", "title", "unit", "note", "series": [series]}
    series: {"run", "label", "style", "x", "y", "low", "high", "per_point"}

`x` is an index into the page's `positions`, a list of {axis: [...]} that curves of the same lines
share; `low` and `high` are null for a curve that is shown line by line. NaN is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from longspan.reporting.data import Metrics, ResultData, RunData, Vector, as_float, rows_of

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
STYLES = {"validation_loss": "points", "baseline_loss": "dotted", "slowest_rank": "dots"}
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
MEMORY = {
    "memory_bytes": "peak",
    "memory_reserved_bytes": "reserved",
    "memory_allocated_bytes": "allocated",
    "memory_optimizer_bytes": "optimizer state",
    "memory_parameters_bytes": "parameters",
}
TIMES = {"step_time_s": "step", "data_wait_s": "of which waiting for data"}
SKEW = {
    "data_wait_s": "Data wait",
    "forward_time_s": "Forward pass",
    "matmul_time_s": "Matrix product",
}
"""Times that a rank spends on its own, of which there are mean, minimum and maximum over ranks."""
TITLES = {
    "grad_norms": "Gradient norm of each layer",
    "param_norms": "Parameter norm of each layer",
    "gpu_utilization": "GPU utilization",
    "gpu_temperature_c": "GPU temperature",
    "gpu_power_w": "GPU power",
    "save_s": "Training blocked by saves",
}
UNITS = {"gpu_utilization": "%", "gpu_temperature_c": "°C", "gpu_power_w": "W"}
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

    def add(self, chart: Chart, runs: Sequence[RunData | None], extra: Sequence[Any] = ()) -> None:
        """Add a chart if a run has one of its metrics; None leaves a run out.

        `extra`: series that are ready.
        """
        series = [
            self._series(run.metrics, index, name, label, chart.scale)
            for index, run in enumerate(runs)
            for name, label in chart.curves.items()
            if run is not None and name in run.metrics
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
        bounds = [metrics.values(f"{name}{end}") * scale for end in ("_min", "_max")]
        has_bounds = all(len(bound) == len(values) for bound in bounds)
        if has_bounds:
            low, high = binned(bounds[0])[1], binned(bounds[1])[2]
        has_band = has_bounds or per_point > 1
        return {
            "run": run,
            "label": label,
            "style": STYLES.get(name, "line"),
            "x": self._place(metrics, run, name),
            "y": numbers(mean),
            "low": numbers(low) if has_band else None,
            "high": numbers(high) if has_band else None,
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
        if chart.id == "loss" and any("samples" in run.metrics for run in runs):
            chart = replace(chart, unit="")  # a user's loss has a unit of its own
        drawing.add(chart, runs)
    planned = [_planned(plan) for plan in plans]
    most = 1 if len(runs) > 1 else None  # of several runs only the first of a chart's curves
    sizes, times = dict(list(MEMORY.items())[:most]), dict(list(TIMES.items())[:most])
    memory = Chart("memory", "Memory per device", "GiB", sizes, scale=1 / GIB, is_smoothed=False)
    drawing.add(memory, runs, planned)
    drawing.add(Chart("times", "Step time", "seconds", times), runs)
    several = [run if run.ranks > 1 else None for run in runs]
    for name, title in SKEW.items():
        chart = Chart(f"ranks-{name}", title, "seconds", {name: title.lower()}, "ranks")
        drawing.add(chart, several)
    slowest = {"slowest_rank": "slowest rank"}
    chart = Chart("slowest", "Slowest rank", "where one makes steps longer", slowest, "ranks")
    drawing.add(replace(chart, is_smoothed=False), several)

    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    shown = {name for chart in CHARTS for name in chart.curves} | {*MEMORY, *TIMES, *SKEW}
    shown |= {"slowest_rank"} | NOT_CHARTED
    shown |= {f"{name}{end}" for name in names for end in ("_min", "_max")}
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        if name in shown or name.startswith(("causes/", "loss_by_position/")):
            continue
        if not any(np.nan_to_num(run.metrics.values(name)).any() for run in runs):
            continue  # a count that stays 0, as that of skipped steps
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[name] = rest or _plain(name)
    for number, (group, curves) in enumerate(list(groups.items())[:MAX_OTHER]):
        left_out = len(curves) - MAX_SERIES
        note = f"{left_out} more curves are left out" if left_out > 0 else ""
        if number == MAX_OTHER - 1 and len(groups) > MAX_OTHER:
            note = f"{len(groups) - MAX_OTHER} more charts are left out"
        few = dict(list(curves.items())[:MAX_SERIES])
        title = TITLES.get(group) or _plain(group)[:1].upper() + _plain(group)[1:]
        unit = UNITS.get(group, "seconds" if group.endswith("_s") else "")
        chart = Chart(f"other-{number}", title, unit, few, "other", note=note)
        drawing.add(replace(chart, is_smoothed=group != "save_s"), runs)
    return drawing


def _plain(name: str) -> str:
    """A metric's name in words."""
    return name.removesuffix("_s").replace("_", " ").replace("/", " ").strip() or name


def _planned(plan: ResultData) -> dict[str, Any]:
    """A level across the chart: what a plan says that the fullest device allocates."""
    sizes = [as_float(stage.get("allocated")) for stage in rows_of(plan.content["stages"])]
    most = max(filter(math.isfinite, sizes), default=math.nan)
    label = f"planned ({plan.name})"
    return {"run": None, "label": label, "style": "level", "y": numbers([most / GIB])}
