"""The sections of a report, each a fragment of HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from longspan.config import DILATED, LayerAttention
from longspan.errors import UserError
from longspan.reporting.data import ResultData, RunData
from longspan.reporting.html import Child, Html, join, table, tag
from longspan.reporting.pictures import (
    duration,
    layout_picture,
    pattern_picture,
    reaches,
    tiles_of,
    timeline,
)
from longspan.reporting.profile import profile
from longspan.reporting.results import RESULTS
from longspan.reporting.text import GIB, MAX_ROWS, NONE, capital, note, plain
from longspan.wording import counted, toml_value

MAX_EVENTS = 500
MAX_PATTERNS = 8
"""Attention patterns that are drawn, those of most layers."""
BY_POSITION = "loss_by_position/"
"""Begins the names of the metrics that training writes for ranges of positions."""


def sections(runs: Sequence[RunData], results: Sequence[ResultData]) -> dict[str, tuple[str, Html]]:
    """Title and content of each section, by its id; a section without content is left out."""
    found: dict[str, tuple[str, Html | None]] = {"overview": ("Overview", overview(runs))}
    found |= {"curves": ("Curves", Html(""))} if runs else {}
    found |= {
        "positions": ("Loss by position", each(runs, loss_by_position)),
        "timeline": ("Time line and goodput", each(runs, time_line)),
        "ranks": ("Ranks", each(runs, ranks) if any(run.ranks > 1 for run in runs) else None),
        "layout": ("Layout", each(runs, layout)),
        "attention": ("Attention pattern", each(runs, attention)),
        "profile": ("Profile", each(runs, profile)),
        "other": ("Other metrics", Html("") if runs else None),
    }
    for number, result in enumerate(results):
        found[f"result-{number}"] = (
            f"{result.kind.capitalize()}: {result.name}",
            RESULTS[result.kind](result.content),
        )
    found["config"] = ("Configuration", config(runs) if runs else None)
    found["environment"] = ("Environment", environment(runs) if runs else None)
    return {name: (title, body) for name, (title, body) in found.items() if body is not None}


def each(runs: Sequence[RunData], show: Any) -> Html | None:
    """What `show` makes of each run, under its name if there are several; the same text once."""
    parts: dict[str, list[str]] = {}
    for run in runs:
        if (body := show(run)) is not None:
            parts.setdefault(body, []).append(run.name)
    if not parts:
        return None
    if len(runs) == 1:
        return join(Html(body) for body in parts)
    return join(
        tag("div", tag("h3", ", ".join(names)), Html(body), class_="of-run")
        for body, names in parts.items()
    )


# The overview


def overview(runs: Sequence[RunData]) -> Html | None:
    if not runs:
        return None
    figures = [_figures(run) for run in runs]
    problems = [
        tag("li", tag("b", run.name), ": ", problem) for run in runs for problem in run.problems
    ]
    notice = tag("ul", problems, class_="problems") if problems else None
    if len(runs) == 1:
        return join([_state(runs[0]), tiles_of(figures[0]), notice])
    names = list(dict.fromkeys(name for found in figures for name in found))
    rows = [
        [
            tag("span", tag("i", class_=f"dot run{index % 8}"), run.name, class_="key"),
            _badge(run),
            *(found.get(name, (NONE, ""))[0] for name in names),
        ]
        for index, (run, found) in enumerate(zip(runs, figures, strict=True))
    ]
    why = [
        note(tag("b", run.name), f" {run.state.name}: {run.state.why}")
        for run in runs
        if run.state.why
    ]
    return join([table(["run", "state", *names], rows, "figures"), *why, notice])


def _badge(run: RunData) -> Html:
    name = run.state.name
    return tag("span", name, class_=f"badge {name.replace(' ', '-')}")


def _state(run: RunData) -> Html:
    why = tag("span", run.state.why, class_="why") if run.state.why else None
    return tag("p", _badge(run), " ", why, class_="state")


def _figures(run: RunData) -> dict[str, tuple[str, str]]:
    """The figures that people look at first, each with a detail."""
    metrics, found = run.metrics, dict[str, tuple[str, str]]()
    steps = run.tables.get("train", {}).get("steps") if _is_table(run.tables, "train") else None
    of = f"of {steps:,}" if isinstance(steps, int) else ""
    found["step"] = f"{run.step:,}", of
    if (loss := metrics.last("loss")) is not None:
        best = metrics.best("loss")
        newest = "non-finite" if metrics.has_diverged("loss") else f"{loss:.4g}"
        found["training loss"] = newest, f"lowest {best:.4g}" if best is not None else ""
    if (loss := metrics.last("validation_loss")) is not None:
        baseline = metrics.last("baseline_loss")
        detail = f"baseline {baseline:.4g}" if baseline is not None else ""
        found["validation loss"] = f"{loss:.4g}", detail
    for unit in ("tokens", "samples"):
        if (rate := _median(metrics.values(f"{unit}_per_s"))) is not None:
            total = metrics.last(unit)
            detail = f"{short(total)} {unit}" if total is not None else ""
            if unit == "tokens" and (planned := run.predicted("tokens_per_s")) is not None:
                detail = f"predicted {short(planned)} ({rate / planned - 1:+.0%})"
            found[f"{unit} per second"] = f"{short(rate)}", detail
    if (mfu := _median(metrics.values("mfu"))) is not None:
        found["MFU"] = f"{mfu:.1%}", "median"
    if (memory := _max(metrics.values("memory_bytes"))) is not None:
        where = "on the fullest rank" if "memory_bytes_max" in metrics else "on rank 0"
        if (planned := run.predicted("memory_bytes")) is not None:
            where = f"predicted {planned / GIB:.3g} GiB ({memory / planned - 1:+.0%})"
        found["peak memory"] = f"{memory / GIB:.3g} GiB", where
    if run.goodput is not None:
        found["goodput"] = f"{run.goodput.ratio:.0%}", f"of {duration(run.goodput.wall_s)}"
        found["restarts"] = f"{run.goodput.restarts:,}", _steps_lost(run)
    return found


def _steps_lost(run: RunData) -> str:
    assert run.goodput is not None
    lost = int(run.goodput.lost_steps)
    return f"{counted(lost, 'step')} lost" if lost else ""


def _is_table(tables: Mapping[str, Any], name: str) -> bool:
    return isinstance(tables.get(name), dict)


def _median(values: Any) -> float | None:
    import numpy as np

    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _max(values: Any) -> float | None:
    import numpy as np

    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else None


def short(value: float) -> str:
    """A number with about four digits: 9,053, 12.3 k, 1.64 M."""
    if not math.isfinite(value):
        return NONE
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# Time


def time_line(run: RunData) -> Html | None:
    found = run.goodput
    picture = timeline(run.events, run.now if run.state.name == "running" else _end(run))
    if found is None or picture is None:
        return note("The run has not started: its history has no event.")
    rows = [
        [
            _clock(event["time"]),
            event["event"],
            event["step"],
            _event_text(event),
        ]
        for event in run.events[-MAX_EVENTS:]
    ]
    left_out = len(run.events) - len(rows)
    more = note(f"The first {left_out:,} are left out.") if left_out else None
    texts = [tag("li", f"step {step:,}: {text}") for step, text in run.metrics.texts("rolled_back")]
    return join(
        [
            tag("p", capital(str(found)), "."),
            picture,
            tag("ul", texts, class_="problems") if texts else None,
            tag(
                "details",
                tag("summary", counted(len(run.events), "event")),
                more,
                table(["time (UTC)", "event", "step", ""], rows),
            ),
        ]
    )


def _end(run: RunData) -> float:
    """When a run that is not running has last shown a sign of life."""
    last = max((event["time"] for event in run.events), default=0.0)
    return max(last, run.heartbeat or 0.0)


def _event_text(event: Mapping[str, Any]) -> str:
    known = {"time", "event", "step"}
    shown = {name: value for name, value in event.items() if name not in known and value}
    return ", ".join(f"{name.replace('_', ' ')} {plain(value)}" for name, value in shown.items())


def _clock(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return NONE


# Ranks, layout, attention


def ranks(run: RunData) -> Html | None:
    if run.ranks == 1:
        return note("One process.")
    if "step_time_s_max" not in run.metrics:
        return note(
            f"{run.ranks} ranks; the metrics of this run do not say how long each took for a step."
        )
    lines = len(run.metrics.values("step_time_s"))
    legend = note("In the charts a line is the mean over ranks, a band their minimum and maximum.")
    if "slowest_rank" not in run.metrics:
        words = f"No rank made the steps of {counted(lines, 'line')} much longer by itself."
        return join([tag("p", words), legend])
    causes = dict(run.metrics.texts("slowest_in"))
    steps = run.metrics.axis("step", "slowest_rank").tolist()
    named = Counter(
        (int(rank), causes.get(int(step), ""))
        for step, rank in zip(steps, run.metrics.values("slowest_rank").tolist(), strict=True)
        if math.isfinite(rank)
    )
    rows: list[list[Child]] = [
        [f"rank {rank}", cause, count] for (rank, cause), count in named.most_common(20)
    ]
    words = f"Ranks that made steps much longer by themselves, on {counted(lines, 'line')}:"
    return join([tag("p", words), table(["rank", "slow in", "lines"], rows, "right"), legend])


def loss_by_position(run: RunData) -> Html | None:
    """The validation loss by position in the context, at the end of the run."""
    losses = {}
    for name in run.metrics.names:
        first, _, last = name.removeprefix(BY_POSITION).partition("-")
        value = run.metrics.last(name)
        if name.startswith(BY_POSITION) and first.isdecimal() and last.isdecimal() and value:
            losses[int(first), int(last)] = value
    if not losses:
        return None
    most = max(losses.values())
    bars = [
        meter(f"{first:,} to {last:,}", value / most, f"{value:.4f}")
        for (first, last), value in sorted(losses.items())
    ]
    unit = "Nats per token on validation samples, by the token's position in the context."
    return join([note(unit), tag("div", bars, class_="frame")])


def meter(name: str, share: float, value: str) -> Html:
    """A bar of `share` of the width, between its name and its value."""
    width = 100 * min(1.0, max(0.0, share))
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", tag("i", style=f"width:{width:.2f}%"), class_="meter"),
        tag("span", value, class_="value"),
        class_="reach",
    )


def layout(run: RunData) -> Html | None:
    if run.run is None:
        return note("run.toml is not a valid run file for this version, so its layout is unknown.")
    if run.run.layout.is_unresolved:
        return note('run.toml has layout = "auto", which a run replaces when it starts.')
    try:
        found = run.run.layout.resolve(run.ranks)
    except (UserError, ValueError) as error:
        return note(f"The layout of run.toml does not fit {counted(run.ranks, 'process')}: {error}")
    text = " × ".join(f"{axis} {count}" for axis, count in found.items() if count > 1)
    if run.ranks == 1:
        return note("One process holds the whole model and every sequence.")
    zero = f", ZeRO stage {run.run.layout.zero}" if found["shard"] > 1 else ""
    return join([tag("p", f"{run.ranks} ranks: {text}{zero}."), layout_picture(run.run, run.ranks)])


def attention(run: RunData) -> Html | None:
    if run.run is None or run.run.model.factory:
        return None
    file, context = run.run, run.run.data.context
    layers = file.model.layers
    cycle = file.attention.cycle
    settings = file.attention.settings(len(cycle))
    drawn, pattern_of = Counter(settings), dict(zip(settings, cycle, strict=True))
    try:
        found = {
            key: pattern_picture(pattern_of[key], context, file.model.heads)
            for key, _ in drawn.most_common(MAX_PATTERNS)
        }
        reach = reaches(file.attention, context, file.model.heads, layers)
    except (ValueError, MemoryError) as error:
        return note(f"The pattern cannot be drawn: {error}")
    bars = [
        meter(counted(layer + 1, "layer"), tokens / context, f"{tokens:,}")
        for layer, tokens in enumerate(reach)
        if layer < 4 or layer == len(reach) - 1 or tokens != reach[layer - 1]
    ][:12]
    warning = "" if reach[-1] == context else " Nothing earlier can influence it."
    over = f"Over {counted(layers, 'layer')}: {reach[-1]:,} of {context:,} tokens.{warning}"
    rows = list[Html]()
    for key, picture in found.items():
        words = [_pattern_words(pattern_of[key], picture.density, context)]
        if len(cycle) > 1:
            words.append(tag("p", f"In {drawn[key]} of every {len(cycle)} layers."))
        step = counted(picture.position_step, "token")
        words.append(
            tag(
                "p",
                f"Rows are queries, columns are keys, both in steps of {step}; darker is seen by "
                "more branches (head 0).",
                class_="note",
            )
        )
        if len(rows) == len(found) - 1:
            title = tag("h4", "Reach: tokens back that the last token depends on")
            words += [title, *bars, tag("p", over)]
        frame = tag("div", picture.svg, class_="frame")
        rows.append(tag("div", frame, tag("div", words), class_="pattern"))
    return join(rows)


def _pattern_words(pattern: LayerAttention, density: float, context: int) -> Html:
    kept = f" It keeps {100 * density:.3g}% of dense attention's pairs of tokens." * (
        pattern.kind != "dense" and math.isfinite(density)
    )
    branches = ""
    if pattern.kind in DILATED:
        pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
        listed = ", ".join(f"{w:,}/{r}" for w, r in pairs)
        branches = f" Branches (segment length / dilation rate): {listed}."
    kind = capital(pattern.kind.replace("_", " "))
    return tag("p", f"{kind} attention over {context:,} tokens.{branches}{kept}")


# Configuration and environment


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value of nested tables as text, by its dotted path."""
    found: dict[str, str] = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path.count(".") < 8:
            found |= flatten(value, f"{path}.")
        else:
            found[path] = toml_value(value)
    return found


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values of each path that is not the same in all of `runs`."""
    flat = [flatten(tables) for tables in runs]
    paths = list(dict.fromkeys(path for values in flat for path in values))
    found = {path: [values.get(path, NONE) for values in flat] for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}


def config(runs: Sequence[RunData]) -> Html:
    names = [run.name for run in runs]
    parts: list[Child] = []
    if len(runs) > 1:
        changed = differences([run.tables for run in runs])
        rows = [[tag("code", path), *values] for path, values in changed.items()][:MAX_ROWS]
        parts.append(
            table(["key", *names], rows, "values")
            if rows
            else note("The runs have the same configuration.")
        )
    flat = [flatten(run.tables) for run in runs]
    paths = list(dict.fromkeys(path for values in flat for path in values))[:MAX_ROWS]
    if not paths:
        return join([*parts, note("There is no run.toml.")])
    rows = [[tag("code", path), *(values.get(path, NONE) for values in flat)] for path in paths]
    whole = table(["key", *names], rows, "values")
    summary = tag("summary", f"All {len(paths)} values of run.toml")
    return join([*parts, tag("details", summary, whole)])


def environment(runs: Sequence[RunData]) -> Html:
    flat = []
    for run in runs:
        values = dict(run.environment)
        command = values.get("command")
        if isinstance(command, list):
            values["command"] = " ".join(map(plain, command[:200]))
        packages = values.pop("packages", {})
        if isinstance(packages, dict):
            values |= packages
        flat.append({str(name): plain(value) for name, value in values.items()})
    names = list(dict.fromkeys(name for values in flat for name in values))[:MAX_ROWS]
    if not names:
        return note("There is no env.json.")
    rows = [[name, *(values.get(name, NONE) for values in flat)] for name in names]
    heads = ["", *(run.name for run in runs)] if len(runs) > 1 else ["", ""]
    return table(heads, rows, "values")
