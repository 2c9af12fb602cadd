"""The page: one HTML file with its style, scripts and data, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import longspan
from longspan.errors import UserError
from longspan.reporting.charts import MAX_POINTS, draw
from longspan.reporting.data import Input, ResultData, RunData
from longspan.reporting.html import Html, join, script_json, tag
from longspan.reporting.planned import scaling_chart
from longspan.reporting.results import bench_charts
from longspan.reporting.sections import sections

AXIS_TITLES = {"step": "steps", "tokens": "tokens", "time": "time"}


@dataclass(frozen=True)
class Live:
    """Where a page that is served gets news: URLs of the same origin."""

    events: str
    """Server-sent events; any message means that `data` is new."""
    data: str
    """The JSON of `page_data`."""


def page_data(inputs: Sequence[Input]) -> dict[str, Any]:
    """What the page shows, for its script: charts, their positions, sections as HTML."""
    runs = [item for item in inputs if isinstance(item, RunData)]
    results = [item for item in inputs if isinstance(item, ResultData)]
    drawing = draw(runs, [result for result in results if result.kind == "plan"])
    for number, result in enumerate(results):
        if result.kind == "bench":
            bench_charts(drawing, result.content, f"result-{number}")
        elif result.kind == "plan":
            scaling_chart(drawing, result.content, f"result-{number}")
    axes = dict.fromkeys(axis for run in runs for axis in run.metrics.axes())
    lines = max((run.metrics.lines for run in runs), default=0)
    return {
        "version": 1,
        "runs": [{"name": run.name, "state": run.state.name, "why": run.state.why} for run in runs],
        "axes": [axis for axis in AXIS_TITLES if axis in axes],
        "has_clock": all(run.metrics.has_clock for run in runs),
        "lines": lines,
        "is_binned": lines > MAX_POINTS,
        "positions": drawing.positions,
        "charts": drawing.charts,
        "sections": {
            name: {"title": title, "html": body}
            for name, (title, body) in sections(runs, results).items()
        },
    }


def render(inputs: Sequence[Input], *, live: Live | None = None) -> str:
    """The whole page. With `live` it also shows what comes later."""
    data = page_data(inputs)
    used = {chart["section"] for chart in data["charts"]}
    shown = {
        name: section
        for name, section in data["sections"].items()
        if section["html"] or name in used or (live and name in ("curves", "ranks", "other"))
    }
    title = ", ".join(item.name for item in inputs)
    style = _asset("report.css")
    scripts = [*bokeh_scripts(), _asset("report.js")]
    embedded = {name: value for name, value in data.items() if name != "sections"}
    body = [
        tag(
            "header",
            tag("div", tag("h1", _heading(inputs)), _subtitle(inputs), class_="title"),
            tag("nav", [tag("a", s["title"], href=f"#{n}") for n, s in shown.items()]),
        ),
        tag("div", class_="controls", id="controls", hidden=True),
        tag("main", [_section(name, section) for name, section in shown.items()]),
        tag("footer", _footer()),
        tag("noscript", tag("p", "The charts of this page need JavaScript.", class_="note")),
        tag("script", script_json(embedded), type="application/json", id="data"),
        [tag("script", Html(script)) for script in scripts],
    ]
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts, live)),
            tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name_="referrer", content="no-referrer"),
            tag("meta", name_="color-scheme", content="light dark"),
            tag("title", f"{title} · Longspan"),
            tag("style", Html(style)),
        ),
        tag(
            "body",
            body,
            data_events=live.events if live else None,
            data_data=live.data if live else None,
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _heading(inputs: Sequence[Input]) -> str:
    if len(inputs) == 1:
        return inputs[0].name
    kinds = {"run" if isinstance(item, RunData) else "result" for item in inputs}
    if kinds == {"run"}:
        return f"{len(inputs)} runs"
    runs = sum(isinstance(item, RunData) for item in inputs)
    results = len(inputs) - runs
    parts = [f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((runs, "run"), (results, "result")) if n]
    return " and ".join(parts)


def _subtitle(inputs: Sequence[Input]) -> Html | None:
    if len(inputs) == 1:
        where = inputs[0].folder if isinstance(inputs[0], RunData) else inputs[0].path
        return tag("p", str(where), class_="note")
    return tag("p", ", ".join(item.name for item in inputs), class_="note")


def _section(name: str, section: dict[str, Any]) -> Html:
    return tag(
        "section",
        tag("h2", section["title"]),
        tag("div", Html(section["html"]), class_="body"),
        tag("div", class_="charts"),
        id=name,
    )


def _footer() -> Html:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return join([f"Longspan {longspan.__version__}, {written}. This page loads nothing."])


def _policy(scripts: Sequence[str], live: Live | None) -> str:
    """A policy that runs these scripts and no other, and allows no network but that of `live`."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:;"
        f"{connect} base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("longspan.reporting") / "assets" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def bokeh_scripts() -> tuple[str, ...]:
    """BokehJS, from the installed wheel of Bokeh."""
    try:
        from bokeh.resources import Resources
    except ImportError as error:
        raise UserError(
            "a report needs Bokeh for its charts: pip install 'longspan[report]'"
        ) from error
    found = Resources(mode="inline", components=["bokeh", "bokeh-api"], log_level="error").js_raw
    # A script ends at the first "</script", wherever it stands.
    return tuple(script.replace("</script", "<\\/script") for script in found)
