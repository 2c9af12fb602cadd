"""Line charts over sizes, on a logarithmic x axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 96, 34, 46
COLOURS = ("#0b6bcb", "#c2410c", "#57606a", "#15803d", "#7e22ce", "#be185d", "#a16207")
LABEL = 11
"""The least distance of two labels, in pixels."""

Line = Sequence[tuple[float, float]]


def charts_svg(
    charts: Mapping[str, Mapping[str, Line]],
    caption: str,
    *,
    axis: str = "tokens",
    top: float | Mapping[str, float] | None = None,
) -> str:
    """Charts side by side, by title; each has named lines of (x, value) points.

    `axis`: what x is. Values have a logarithmic axis, or with `top` a linear one from 0 to `top`,
    which may differ by title.
    """
    tops = top if isinstance(top, Mapping) else dict.fromkeys(charts, top)
    elements = [
        _chart(title, lines, index * WIDTH, axis, tops[title])
        for index, (title, lines) in enumerate(charts.items())
    ]
    width = WIDTH * len(elements)
    note = f'<text x="{LEFT}" y="{HEIGHT + 16}" fill="#57606a">{escape(caption)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 26}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(elements)}{note}</svg>\n'
    )


def _chart(title: str, lines: Mapping[str, Line], left: int, axis: str, top: float | None) -> str:
    assert len(lines) <= len(COLOURS)
    points = [point for line in lines.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x, high_x = math.log2(min(xs)), math.log2(max(xs))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    if top is None:
        powers = range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)
        ticks = [10.0**power for power in powers]
    else:
        ticks = [top * quarter / 4 for quarter in range(5)]

    def height(y: float) -> float:
        return y if top is not None else math.log10(y)

    low_y, high_y = height(ticks[0]), height(ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - low_x) / max(high_x - low_x, 1e-9) * inner_width
        up = (height(y) - low_y) / max(high_y - low_y, 1e-9) * inner_height
        return left + LEFT + right, HEIGHT - BOTTOM - up

    elements = [
        f'<text x="{left + LEFT}" y="20" font-size="13" fill="#1f2328">{escape(title)}</text>'
    ]
    for tick in ticks:
        x, y = at(2**low_x, tick)
        label = f"{tick:,.0f}" if tick >= 1000 else f"{tick:g}"
        elements.append(
            f'<line x1="{x}" y1="{y}" x2="{x + inner_width}" y2="{y}" stroke="#e4e7eb"/>'
            f'<text x="{x - 6}" y="{y + 4}" text-anchor="end" fill="#57606a">{label}</text>'
        )
    for power in range(round(low_x), round(high_x) + 1, 2 if high_x - low_x > 4 else 1):
        x, y = at(2.0**power, ticks[0])
        unit = power // 10 if power >= 10 else 0
        label = f"{2 ** (power - 10 * unit)}{' KMGT'[unit].strip()}"
        elements.append(
            f'<text x="{x}" y="{y + 16}" text-anchor="middle" fill="#57606a">{label}</text>'
        )
    x, y = at(2 ** ((low_x + high_x) / 2), ticks[0])
    elements.append(f'<text x="{x}" y="{y + 32}" text-anchor="middle" fill="#57606a">{axis}</text>')
    ends = {name: at(*line[-1])[1] for name, line in lines.items() if line}
    labels = _spread(ends)
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        if not line:
            continue
        places = [at(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
        end_x, end_y = places[-1][0], labels[name]
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<g fill="{colour}">{dots}'
            f'<text x="{end_x + 7:.1f}" y="{end_y + 4:.1f}">{escape(name)}</text></g>'
        )
    return "".join(elements)


def _spread(ends: Mapping[str, float]) -> dict[str, float]:
    """Move labels down so far that they do not overlap, from the highest to the lowest."""
    places, last = {}, -math.inf
    for name, y in sorted(ends.items(), key=lambda end: end[1]):
        last = places[name] = max(y, last + LABEL)
    return places
