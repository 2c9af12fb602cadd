"""Pictures in HTML and SVG: the time line of a run, its layout, its attention pattern."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from longspan.config import BLOCK_SPARSE, Attention, LayerAttention, Run
from longspan.reporting.html import Html, tag
from longspan.wording import counted

MAX_MARKS = 300
"""Saves that a time line shows; the table below it lists more."""
MAX_SPANS = 1_000
"""Stretches, the longest, that a time line shows."""
MAX_EVENTS = 10_000
"""Events, the newest, that a time line is drawn of."""
MAX_RANKS = 64
"""Ranks that a layout picture shows."""
CELLS = 64
"""Rows and columns of an attention picture."""
SAMPLES = 8
"""Positions in each row of cells that are looked up."""


@dataclass(frozen=True)
class Span:
    """A stretch of a run's time, in seconds."""

    kind: str
    """running, lost, down (after a failure) or off (after an end)"""
    start: float
    stop: float


def spans(events: Sequence[Mapping[str, Any]], now: float) -> list[Span]:
    """When a run trained, when that was lost later, and when it was down.

    A start without an end or failure was killed: the steps after its last event, of which only the
    number is known, count with its mean time per step.
    """
    found: list[Span] = []
    running: Span | None = None
    begin: float | None = None
    begin_step, last, is_failed = 0, 0.0, False
    saves: list[tuple[int, float]] = []

    def lost_since(step: int, start: float) -> float:
        """When `step` was saved, or `start` if that is later; saves of later steps are void."""
        while saves and saves[-1][0] > step:
            saves.pop()
        return max(saves[-1][1], start) if saves else start

    for event in events:
        name, moment, step = event["event"], event["time"], event["step"]
        if name == "start":
            if begin is not None:
                lost_s = event["lost_steps"] * (last - begin) / max(1, step - begin_step)
                last, is_failed = min(moment, last + lost_s), True
                found.append(running := Span("running", begin, last))
            if found and moment > last:
                found.append(Span("down" if is_failed else "off", last, moment))
            if event["lost_steps"] > 0 and running:
                found.append(Span("lost", lost_since(step, running.start), running.stop))
            begin, begin_step, is_failed = moment, step, False
        elif name in ("end", "failure") and begin is not None:
            found.append(running := Span("running", begin, moment))
            begin, is_failed = None, name == "failure"
        elif name == "save":
            saves.append((step, moment))
        elif name == "rollback":
            found.append(Span("lost", lost_since(step, begin or moment), moment))
        last = max(last, moment)
    if begin is not None:
        found.append(Span("running", begin, max(begin, now)))
    return found


MARKS = {"save": "save", "rollback": "rollback", "failure": "failure", "recovery": "recovery"}


def timeline(events: Sequence[Mapping[str, Any]], now: float) -> Html | None:
    """Bars for the stretches of a run, marks for its events."""
    events = events[-MAX_EVENTS:]
    stretches = sorted(spans(events, now), key=lambda span: span.start - span.stop)[:MAX_SPANS]
    if not stretches:
        return None
    first = min(span.start for span in stretches)
    last = max(max(span.stop for span in stretches), max(event["time"] for event in events))
    whole = max(last - first, 1e-9)

    def percent(moment: float) -> str:
        return f"{100 * (moment - first) / whole:.3f}%"

    bars = [
        tag(
            "span",
            class_=f"span {span.kind}",
            title=f"{SPAN_TEXT[span.kind]} for {duration(span.stop - span.start)}",
            style=f"left:{percent(span.start)};width:{percent(first + span.stop - span.start)}",
        )
        for span in sorted(stretches, key=lambda span: span.kind == "lost")
    ]
    saves = [event for event in events if event["event"] == "save"]
    others = [e for e in events if e["event"] in MARKS and e["event"] != "save"][-MAX_MARKS:]
    shown = saves[:: math.ceil(len(saves) / MAX_MARKS)] if saves else []
    marks = [
        tag(
            "span",
            class_=f"mark {MARKS[event['event']]}",
            title=f"{event['event']} at step {event['step']:,}, "
            f"{duration(event['time'] - first)} after the start",
            style=f"left:{percent(event['time'])}",
        )
        for event in [*shown, *others]
    ]
    ends = tag("div", tag("span", "0"), tag("span", duration(whole)), class_="ends")
    counts = {kind: sum(e["event"] == kind for e in events) for kind in MARKS}
    present = {span.kind for span in stretches}
    legend = [
        *(key(f"span {kind}", text) for kind, text in SPAN_TEXT.items() if kind in present),
        *(key(f"mark {kind}", counted(n, kind)) for kind, n in counts.items() if n),
    ]
    return tag(
        "div",
        tag("div", tag("div", bars, class_="bars"), tag("div", marks, class_="marks")),
        ends,
        tag("div", legend, class_="legend"),
        class_="timeline",
    )


SPAN_TEXT = {
    "running": "training",
    "lost": "repeated later",
    "down": "down after a failure",
    "off": "not running",
}


def key(class_: str, text: str) -> Html:
    """An entry of a legend."""
    return tag("span", tag("i", class_=class_), text, class_="key")


def tiles_of(figures: Mapping[str, tuple[str, str]]) -> Html:
    tiles = [
        tag(
            "div",
            tag("div", name, class_="name"),
            tag("div", value, class_="value"),
            tag("div", detail, class_="detail") if detail else None,
            class_="tile",
        )
        for name, (value, detail) in figures.items()
    ]
    return tag("div", tiles, class_="tiles")


def duration(seconds: float) -> str:
    """Seconds as text: 4.2 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, unit, inner, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            return f"{seconds // size:,.0f} {unit} {seconds % size // inner:.0f} {small}"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


RANK_ORDER = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Axes from the slowest to the fastest as ranks are counted: neighbours communicate most."""


def layout_picture(run: Run, world: int) -> Html:
    """Which rank holds what: a box per pipeline stage and replica, a cell per rank."""
    ranks = run.layout.resolve(world)
    stages = stage_texts(run, ranks["pipeline"])
    inner = [ranks[axis] for axis in ("shard", "sequence", "tensor")]
    per_replica = math.prod(inner)
    fits = max(1, MAX_RANKS // per_replica)
    pipelines = min(ranks["pipeline"], fits)
    replicas = min(ranks["replicate"], max(1, fits // pipelines))
    rows = []
    for stage in range(pipelines):
        boxes = []
        for replica in range(replicas):
            first = (stage * ranks["replicate"] + replica) * per_replica
            drawn = min(per_replica, MAX_RANKS)
            cells = [_cell(first + place, ranks, place) for place in range(drawn)]
            title = f"replica {replica}" if ranks["replicate"] > 1 else None
            caption = tag("div", title, class_="caption") if title else None
            boxes.append(tag("div", caption, tag("div", cells, class_="cells"), class_="replica"))
        caption = tag("div", stages[stage], class_="caption") if stages else None
        rows.append(tag("div", caption, tag("div", boxes, class_="replicas"), class_="stage"))
    drawn = pipelines * replicas * min(per_replica, MAX_RANKS)
    more = (
        tag("p", f"{counted(world - drawn, 'more rank')} in the same way.", class_="note")
        if drawn < world
        else None
    )
    return tag("div", rows, more, class_="layout")


def _cell(rank: int, ranks: Mapping[str, int], place: int) -> Html:
    """A rank; `place` counts the ranks of its replica and pipeline stage."""
    place, tensor = divmod(place, ranks["tensor"])
    shard, sequence = divmod(place, ranks["sequence"])
    places = {"shard": shard, "sequence": sequence, "tensor": tensor}
    lines = [
        tag("div", f"{axis} {place + 1}/{ranks[axis]}")
        for axis, place in places.items()
        if ranks[axis] > 1
    ]
    group = (shard * ranks["sequence"] + sequence) % 6
    return tag("div", tag("b", f"rank {rank}"), lines, class_=f"rank hue{group}")


def stage_texts(run: Run, pipeline: int) -> list[str]:
    """What each pipeline rank holds, in words; none if there is one."""
    if pipeline == 1 or run.model.factory:
        return [f"pipeline rank {rank}" for rank in range(pipeline)] if pipeline > 1 else []
    from longspan.attention.pattern import patterns_of  # loads torch
    from longspan.flops import stage_flops
    from longspan.parallel.pipeline_schedule import plan_stages

    patterns = patterns_of(run.attention, run.model.layers)
    flops = stage_flops(run.model, patterns, run.data.context)
    plan = plan_stages(run.layout, run.model.layers, flops, pipeline)
    texts = []
    for rank, stages in enumerate(plan.by_rank):
        held = ", ".join(
            f"{layers.start}–{layers.stop - 1}" if len(layers) > 1 else str(layers.start)
            for layers in (plan.layers[stage] for stage in stages)
        )
        extra = ", embedding" * (0 in stages) + ", head" * (plan.last in stages)
        texts.append(f"pipeline rank {rank}: layers {held}{extra}")
    return texts


@dataclass(frozen=True)
class PatternPicture:
    """An attention pattern: its picture, and the share of pairs it keeps."""

    svg: Html
    density: float
    """Query-key pairs as a fraction of those of dense causal attention."""
    position_step: int
    """Tokens per cell."""


@lru_cache(maxsize=32)
def pattern_picture(attention: LayerAttention, context: int, heads: int) -> PatternPicture:
    """Draw what the queries of head 0 see: rows are queries, columns keys, darker is more often.

    A cell stands for many positions: those are looked up that every branch of head 0 keeps, or the
    first of each block.
    """
    import torch  # a pattern is defined by tensors

    from longspan.attention.pattern import Dense, layer_pattern

    pattern = layer_pattern(attention)
    cells = min(CELLS, context)
    unit = math.lcm(*attention.dilation_rates) if attention.dilation_rates else 1
    if attention.kind in ("dense", "window"):
        unit = 1
    elif attention.kind == "block_sparse":
        unit = attention.block_size
    edges = [round(i * context / cells) for i in range(cells + 1)]
    positions, owner = list[int](), list[int]()
    for cell, (start, stop) in enumerate(pairwise(edges)):
        first = -(-start // unit) * unit
        inside = range(first, stop, unit) or range(min(first, stop - 1), stop)[:1]
        chosen = inside[:: max(1, len(inside) // SAMPLES)][:SAMPLES]
        positions += chosen
        owner += [cell] * len(chosen)
    where = torch.tensor(positions)
    counts = pattern.counts(where, where, 0).double()
    seen = counts * (where[:, None] >= where[None, :])
    index = torch.tensor(owner)
    one_hot = torch.nn.functional.one_hot(index, cells).double()
    total = one_hot.T @ seen @ one_hot
    pairs = one_hot.T @ (where[:, None] >= where[None, :]).double() @ one_hot
    shade = (total / pairs.clamp(min=1)).tolist()
    most = max(max(row) for row in shade) or 1.0
    dense = Dense().pairs(context, heads, is_causal=True)
    blocks = -(-context // attention.block_size)
    is_small = attention.kind not in BLOCK_SPARSE or blocks <= 1 << 13  # blocks are counted
    kept = pattern.pairs(context, heads, is_causal=True) if is_small else math.nan
    return PatternPicture(_mask_svg(shade, most), kept / dense, -(-context // cells))


@lru_cache(maxsize=32)
def reaches(attention: Attention, context: int, heads: int, layers: int) -> list[int]:
    """How far back the last token depends on tokens, over the first 1, 2, … layers."""
    from longspan.attention.pattern import patterns_of, reach  # loads torch

    patterns = patterns_of(attention, min(layers, 64))
    return [reach(patterns[:n], context, heads) for n in range(1, len(patterns) + 1)]


def _mask_svg(shade: Sequence[Sequence[float]], most: float) -> Html:
    rects = []
    for row, values in enumerate(shade):
        column = 0
        while column < len(values):
            level = round(4 * values[column] / most)
            end = column + 1
            while end < len(values) and round(4 * values[end] / most) == level:
                end += 1
            if values[column] > 0:
                rects.append(
                    tag(
                        "rect",
                        x=column,
                        y=row,
                        width=end - column,
                        height=1,
                        class_=f"shade{max(level, 1)}",
                    )
                )
            column = end
    side = len(shade)
    return tag(
        "svg",
        rects,
        viewBox=f"0 0 {side} {side}",
        role="img",
        aria_label="attention pattern: rows are queries, columns are keys",
        class_="mask",
        shape_rendering="crispEdges",
    )
