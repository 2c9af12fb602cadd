"""Charts of `bench` results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.reporting.charts import Drawing, numbers
from longspan.reporting.data import tables_of

SIZES = ("tokens", "length", "size", "in_features", "ranks", "gib")
"""Columns that a benchmark varies: the first that is there is the x axis."""


TITLES = {"both_ms": "Forward and backward pass", "forward_ms": "Forward pass", "ms": "Time"}


def bench_charts(drawing: Drawing, content: Mapping[str, Any], section: str) -> None:
    """Add a chart for each table that has times (…_ms) at several sizes."""
    for name, rows in tables_of(content).items():
        size = next(
            (c for c in SIZES if len({_value(row.get(c)) for row in rows} - {None}) > 1), ""
        )
        columns = list(dict.fromkeys(column for row in rows for column in row))
        times = [c for c in columns if c.endswith("_ms") and any(_value(r.get(c)) for r in rows)]
        if not size or not times:
            continue
        column = "both_ms" if "both_ms" in times else times[0]
        groups: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            x, y = _value(row.get(size)), _value(row.get(column))
            if x is not None and y is not None:
                words = [value for value in row.values() if isinstance(value, str) and value]
                groups.setdefault(" ".join(words)[:100], []).append((x, y))
        series = []
        for label, points in list(groups.items())[:12]:
            points.sort()
            drawing.positions.append({"own": numbers(x for x, _ in points)})
            series.append(
                {
                    "run": None,
                    "label": label or column,
                    "style": "points",
                    "x": len(drawing.positions) - 1,
                    "y": numbers(y for _, y in points),
                    "low": None,
                    "high": None,
                    "per_point": 1,
                }
            )
        drawing.charts.append(
            {
                "id": f"{section}-{name}"[:80],
                "section": section,
                "title": TITLES.get(column) or column.removesuffix("_ms").replace("_", " "),
                "unit": "ms",
                "note": "",
                "axis": size,
                "is_log": True,
                "series": series,
            }
        )


def _value(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None
