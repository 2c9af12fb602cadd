"""The section of a report on the run's profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longspan.reporting.data import RunData, rows_of
from longspan.reporting.html import Html, join, table, tag
from longspan.reporting.pictures import key
from longspan.reporting.text import MAX_ROWS, note, number, plain, texts

PARTS = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "exposed_copy_s": "exposed copies",
    "idle_s": "idle",
}


def profile(run: RunData) -> Html | None:
    summary = run.profile
    if not summary:
        return note(
            "This run was not profiled. ", tag("code", "longspan profile RUN.toml"), " does so."
        )
    findings = [tag("li", text) for text in texts(summary.get("findings"))]
    rows = rows_of(summary.get("ranks"))
    bars = []
    for row in rows[:MAX_ROWS]:
        steps = rows_of(row.get("steps"))
        means = {part: _mean([step.get(part) for step in steps]) for part in PARTS}
        whole = sum(means.values())
        if whole <= 0:
            continue
        pieces = [
            tag(
                "i",
                class_=f"part{index}",
                style=f"width:{100 * means[part] / whole:.2f}%",
                title=f"{text}: {short_time(means[part])}, {means[part] / whole:.0%}",
            )
            for index, (part, text) in enumerate(PARTS.items())
        ]
        bars.append(
            tag(
                "div",
                tag("span", f"rank {plain(row.get('rank'))}", class_="name"),
                tag("span", pieces, class_="meter"),
                tag("span", short_time(whole), class_="value"),
                class_="reach",
            )
        )
    legend = tag(
        "div", [key(f"part{i}", text) for i, text in enumerate(PARTS.values())], class_="legend"
    )
    tables = []
    for name, title in (("by_time", "Operators by time"), ("by_memory", "Operators by memory")):
        operators = rows_of(rows[0].get(name)) if rows else []
        if operators:
            listed = [
                [
                    plain(op.get("name")),
                    plain(op.get("calls")),
                    f"{1e3 * number(op.get('self_s')):.4g}",
                    f"{number(op.get('bytes')) / 2**20:.4g}",
                ]
                for op in operators[:20]
            ]
            heads = ["operator", "calls", "self time in ms", "MiB"]
            rank = plain(rows[0].get("rank"))
            body = table(heads, listed, "right")
            is_open = name == "by_time"
            tables.append(
                tag("details", tag("summary", f"{title}, rank {rank}"), body, open=is_open)
            )
    return join(
        [
            tag("ul", findings) if findings else None,
            tag("h4", "Mean step of each rank") if bars else None,
            bars,
            legend if bars else None,
            tables,
        ]
    )


def short_time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def _mean(values: Sequence[Any]) -> float:
    found = [max(0.0, number(value)) for value in values]
    return sum(found) / len(found) if found else 0.0
