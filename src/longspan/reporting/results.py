"""Results of `plan`, `bench` and `drill`: their sections, and the charts of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.reporting.charts import Drawing, numbers
from longspan.reporting.data import rows_of, tables_of
from longspan.reporting.html import Child, Html, join, table, tag
from longspan.reporting.planned import plan
from longspan.reporting.text import MAX_ROWS, NONE, capital, note, number, plain, texts
from longspan.wording import counted

SIZES = ("tokens", "length", "size", "bytes", "in_features", "ranks", "gib")
"""Columns that a benchmark varies: the first that is there is the x axis."""


TITLES = {"both_ms": "Forward and backward pass", "forward_ms": "Forward pass", "ms": "Time"}

STATES = ("parameters", "gradients", "optimizer", "signs")
"""Of a plan, which are in its peak, too."""


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


def drill(content: Mapping[str, Any]) -> Html:
    rows = [
        [
            plain(row.get("fault")),
            NONE if row.get("exit_code") is None else plain(row["exit_code"]),
            plain(row.get("at_step")),
            plain(row.get("steps_lost")),
            *(
                NONE if row.get(name) is None else f"{number(row[name]):.1f}"
                for name in ("ended_s", "recovered_s")
            ),
        ]
        for row in rows_of(content["outcomes"])[:MAX_ROWS]
    ]
    passed = content["passed"] is True
    same = "the same bytes as" if content["same_bytes"] is True else "other bytes than"
    badge = tag(
        "span",
        "passed" if passed else "failed",
        class_=f"badge {'finished' if passed else 'failed'}",
    )
    problems = [tag("li", text) for text in texts(content.get("problems"))]
    heads = ["fault", "exit code", "at step", "steps lost", "ended in s", "resumed in s"]
    words = f" After {counted(len(rows), 'fault')} the run has {same} the run without faults."
    return join(
        [
            tag("p", badge, words),
            tag("ul", problems, class_="problems") if problems else None,
            table(heads, rows, "right"),
        ]
    )


def bench(content: Mapping[str, Any]) -> Html:
    parts: list[Child] = []
    if isinstance(content.get("machine"), str):
        parts.append(tag("p", content["machine"]))
    if isinstance(content.get("setting"), dict):
        listed = ", ".join(
            f"{name.replace('_', ' ')} {plain(value)}" for name, value in content["setting"].items()
        )
        parts.append(note(listed))
    for name, rows in tables_of(content).items():
        columns = list(dict.fromkeys(column for row in rows for column in row))[:30]
        body = [
            [NONE if row.get(c) is None else plain(row[c]) for c in columns]
            for row in rows[:MAX_ROWS]
        ]
        parts.append(tag("h4", capital(name.replace("_", " "))) if name != "rows" else None)
        parts.append(table([c.replace("_", " ") for c in columns], body, "right"))
    return join(parts)


RESULTS = {"plan": plan, "drill": drill, "bench": bench}
