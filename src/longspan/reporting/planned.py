"""A plan on the page: memory against that of the device, time by part, scaling, ranked layouts.

It shows what `longspan plan --json` printed, whoever has written it: nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from longspan.reporting.charts import Drawing, numbers
from longspan.reporting.data import rows_of
from longspan.reporting.html import Child, Html, join, table, tag
from longspan.reporting.pictures import duration, key, tiles_of
from longspan.reporting.text import GIB, MAX_ROWS, capital, note, number, plain, texts

TOTALS = {
    "on_device": "device must have",
    "start": "before the first step",
    "save": "while it saves",
    "offloaded": "offloaded to CPU",
}
COLOURS = 8
MAX_STAGES, MAX_PARTS = 64, 32
"""Pipeline ranks on the page, and parts of their memory: a plan has about ten."""
SMALL = 0.004
"""The share of a bar below which a part has no entry in the legend."""
AXES = ("replicate", "shard", "sequence", "tensor", "pipeline")


def plan(content: Mapping[str, Any]) -> Html:
    derived = content["derived"] if isinstance(content["derived"], dict) else {}
    facts: dict[str, Any] = {
        "processes": content["gpus"],
        "precision": content.get("precision"),
        "parameters": content["parameters"],
        **derived,
    }
    return join(
        [
            _forecast(content),
            table(["", ""], [[name, plain(value)] for name, value in facts.items()], "values"),
            *_memory(content),
            *_search(content),
            *_alternatives(content),
        ]
    )


def scaling_chart(drawing: Drawing, content: Mapping[str, Any], section: str) -> None:
    """Predicted tokens/s by the number of GPUs, beside that of as many times the first."""
    points = sorted(
        (number(row.get("gpus")), number(row.get("tokens_per_s")))
        for row in rows_of(content.get("scaling"))
    )
    points = [(gpus, rate) for gpus, rate in points if gpus > 0 and rate > 0]
    if len(points) < 2:
        return
    (first, rate), positions = points[0], len(drawing.positions)
    drawing.positions.append({"own": numbers(gpus for gpus, _ in points)})
    curves = {
        "predicted, the fastest layout": ("points", [y for _, y in points]),
        "linear": ("dotted", [rate * gpus / first for gpus, _ in points]),
    }
    drawing.charts.append(
        {
            "id": f"{section}-scaling",
            "section": section,
            "title": "Scaling",
            "unit": "tokens per second, same global batch",
            "note": "",
            "axis": "gpus",
            "is_log": True,
            "series": [
                {
                    "run": None,
                    "label": label,
                    "style": style,
                    "x": positions,
                    "y": numbers(values),
                    "low": None,
                    "high": None,
                    "per_point": 1,
                }
                for label, (style, values) in curves.items()
            ],
        }
    )


def _forecast(content: Mapping[str, Any]) -> Html | None:
    """Tokens/s, hours and cost as tiles, and a step by part as a bar."""
    found = _object(content.get("forecast"))
    if not found:
        return None
    parts = _object(found.get("parts_s"))
    seconds = {plain(name): max(0.0, number(value)) for name, value in parts.items()}
    seconds = dict(sorted(seconds.items(), key=lambda part: -part[1]))
    error, usd = found.get("error"), found.get("usd")
    band = number(_object(error).get("p90"))
    tiles = {
        "tokens/s": (
            f"{number(found.get('tokens_per_s')):,.0f}",
            f"9 of 10 predictions within {band:.0%}" if band else "error unknown",
        ),
        "MFU": (f"{number(found.get('mfu')):.1%}", plain(found.get("device"))),
        "training": (
            duration(3600 * number(found.get("hours"))),
            f"{plain(found.get('tokens'))} tokens",
        ),
    }
    if usd is not None:
        price = f"{number(found.get('usd_per_h')):.2f} per GPU and hour"
        tiles["cost"] = (f"{number(usd):,.0f} USD", f"{price}, {plain(found.get('priced'))}")
    step = sum(seconds.values())
    bars = [_bar("one step", seconds, step, f"{step:,.3g} s")] if step else []
    return join(
        [
            tiles_of(tiles),
            tag("h4", "Predicted time of a step") if bars else None,
            tag("div", bars, _legend(list(seconds), seconds, step), class_="frame")
            if bars
            else None,
        ]
    )


def _memory(content: Mapping[str, Any]) -> list[Child]:
    """A bar per pipeline rank against the memory of the device, and the figures as a table."""
    every = rows_of(content["stages"])
    stages = every[:MAX_STAGES]
    used = [_parts(stage) for stage in stages]
    names = list(dict.fromkeys(name for sizes in used for name in sizes))[:MAX_PARTS]
    used = [{name: sizes.get(name, 0.0) for name in names} for sizes in used]
    device = number(content.get("device_bytes"))
    most = max([device, *(sum(sizes.values()) for sizes in used)], default=0.0)
    bars = [
        _bar(
            f"pipeline rank {i}" if len(stages) > 1 else "each device",
            sizes,
            most,
            f"{sum(sizes.values()) / GIB:,.2f} GiB",
        )
        for i, sizes in enumerate(used)
    ]
    if device:
        device_title = plain(content.get("device_title"))
        bars.append(_bar(device_title, {"": device}, most, f"{device / GIB:,.0f} GiB", "whole"))
    rows = [[capital(name), *(_gib(sizes[name]) for sizes in used)] for name in names]
    for name, title in TOTALS.items():
        if any(number(stage.get(name)) for stage in stages):
            rows.append([capital(title), *(_gib(stage.get(name)) for stage in stages)])
    heads = ["GiB per device"]
    heads += [f"pipeline rank {i}" for i in range(len(stages))] if len(stages) > 1 else [""]
    largest = {name: max(sizes[name] for sizes in used) for name in names}
    too_large = _too_large([_parts(stage) for stage in every], device)
    together = _object(_object(content.get("ladder")).get("together"))
    if too_large and (changes := texts(together.get("settings"))):
        too_large.append(f"the fastest that fits: {' '.join(changes)}")
    return [
        tag("h4", "Memory at the peak of a step"),
        note(f"The first {len(stages):,} of {len(every):,} pipeline ranks.")
        if len(every) > len(stages)
        else None,
        tag("div", bars, _legend(names, largest, most), class_="frame") if most else None,
        tag("ul", [tag("li", text) for text in too_large], class_="problems")
        if too_large
        else None,
        table(heads, rows, "right"),
    ]


def _too_large(used: Sequence[Mapping[str, float]], device: float) -> list[str]:
    """The ranks that need more than the device has."""
    needed = {i: sum(sizes.values()) for i, sizes in enumerate(used)}
    over = [i for i, size in needed.items() if device and size > device]
    if not over:
        return []
    most = max(needed.values())
    ranks = ", ".join(map(str, over))
    where = "the run" if len(used) == 1 else f"pipeline rank {ranks}"
    return [f"{where} does not fit: {most / GIB:,.1f} of {device / GIB:,.0f} GiB"]


def _parts(stage: Mapping[str, Any]) -> dict[str, float]:
    """What is on a device at the peak of a step, by name."""
    sizes = islice(_object(stage.get("peak")).items(), MAX_PARTS)
    peak = {plain(name): number(size) for name, size in sizes}
    found = {**peak, "CUDA and fragmentation": number(stage.get("fragmentation"))}
    return {name: size for name, size in found.items() if size > 0}


def _gib(size: Any) -> str:
    return f"{number(size) / GIB:,.3f}"


def _search(content: Mapping[str, Any]) -> list[Child]:
    """The ranked layouts."""
    found = _object(content.get("search"))
    if not found:
        return []
    rows = []
    for row in rows_of(found.get("ranked"))[:MAX_ROWS]:
        layout, train = _object(row.get("layout")), _object(row.get("train"))
        rows.append(
            [
                f"{number(row.get('tokens_per_s')):,.0f}",
                f"{number(row.get('mfu')):.1%}",
                f"{number(row.get('memory_bytes')) / GIB:,.1f}",
                *(plain(layout.get(axis)) for axis in AXES),
                plain(layout.get("zero")),
                plain(train.get("micro_batch")),
                plain(row.get("savings")),
            ]
        )
    heads = ["tokens/s", "MFU", "GiB", *AXES, "ZeRO", "micro-batch", "what saves memory"]
    return [
        tag("h4", "Layouts that fit, the fastest first"),
        table(heads, rows, "right") if rows else None,
        tag("ul", [tag("li", line) for line in texts(found.get("why"))]),
    ]


def _alternatives(content: Mapping[str, Any]) -> list[Child]:
    others = [
        [
            plain(row.get("linear")),
            plain(row.get("fraction")),
            plain(row.get("parameters")),
            f"{number(row.get('flops_per_token')) / 1e9:,.3f}",
            f"{number(row.get('device_bytes')) / GIB:,.3f}",
        ]
        for row in rows_of(content.get("alternatives"))
    ]
    columns = ["linear layers", "ratio", "parameters", "GFLOPs per token", "GiB per device"]
    return [tag("h4", "With other linear layers"), table(columns, others, "right")] * bool(others)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _bar(
    name: str, sizes: Mapping[str, float], whole: float, value: str, class_: str | None = None
) -> Html:
    """A bar of parts between its name and its value."""
    parts = [
        tag("i", class_=class_ or _colour(i), style=f"width:{100 * size / whole:.2f}%", title=part)
        for i, (part, size) in enumerate(sizes.items())
        if size > 0
    ]
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("span", parts, class_="meter thick"),
        tag("span", value, class_="value"),
        class_="reach",
    )


def _legend(names: Sequence[str], sizes: Mapping[str, float], whole: float) -> Html:
    keys = [
        key(_colour(i), name)
        for i, name in enumerate(names)
        if whole and sizes[name] > SMALL * whole
    ]
    return tag("div", keys, class_="legend")


def _colour(index: int) -> str:
    return f"seg{index % COLOURS}"
