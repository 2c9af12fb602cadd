"""Scatter and line plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 360
LEFT, RIGHT, TOP, BOTTOM = 66, 110, 22, 66
COLOURS = ("#0b6bcb", "#c2410c", "#15803d")

Points = Sequence[tuple[float, float]]


def scatter_svg(
    x_title: str, y_title: str, *, points: Points, lines: Mapping[str, Points], caption: str
) -> str:
    """Plot `points` as grey dots, and each of `lines` as dots joined in order of x."""
    everything = [*points, *(point for line in lines.values() for point in line)]
    xs, ys = (_ticks([point[axis] for point in everything]) for axis in (0, 1))
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        right = (x - xs[0]) / (xs[-1] - xs[0]) * inner_width
        up = (y - ys[0]) / (ys[-1] - ys[0]) * inner_height
        return LEFT + right, HEIGHT - BOTTOM - up

    elements = []
    for y in ys:
        left, top = at(xs[0], y)
        elements.append(
            f'<line x1="{left}" y1="{top:.1f}" x2="{left + inner_width}" y2="{top:.1f}" '
            f'stroke="#e4e7eb"/><text x="{left - 6}" y="{top + 4:.1f}" text-anchor="end">{y:g}'
            "</text>"
        )
    for x in xs:
        left, top = at(x, ys[0])
        elements.append(f'<text x="{left:.1f}" y="{top + 16}" text-anchor="middle">{x:g}</text>')
    middle = LEFT + inner_width / 2
    elements += [
        f'<text x="{middle}" y="{HEIGHT - BOTTOM + 34}" text-anchor="middle">{escape(x_title)}'
        f'</text><text x="{LEFT}" y="14">{escape(y_title)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(caption)}</text>'
    ]
    elements.append(_dots([at(*point) for point in points], "#b6bec8", 2))
    for row, (name, line) in enumerate(lines.items()):
        colour = COLOURS[row % len(COLOURS)]
        places = [at(*point) for point in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f"{_dots(places, colour, 3)}"
            f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 12 + 18 * row}" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#57606a">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(elements)}</svg>\n'
    )


def _dots(places: Points, colour: str, radius: int) -> str:
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places)
    return f'<g fill="{colour}">{dots}</g>'


def _ticks(values: Sequence[float]) -> list[float]:
    """Return about six round tick positions that span all of `values`."""
    low, high = min(values), max(values)
    rough = max(high - low, abs(high) * 1e-6, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]
