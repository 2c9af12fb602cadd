"""Values of run folders as text for a page."""

from __future__ import annotations

from typing import Any

from longspan.reporting.html import Child, Html, tag
from longspan.wording import toml_value

GIB = 2**30
MAX_ROWS = 500
"""Rows of a table."""
NONE = "–"


def note(*text: Child) -> Html:
    return tag("p", *text, class_="note")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else 0.0


def plain(value: Any) -> str:
    """A value of a file, at most a few hundred characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 1 << 63 else "a very large number"
    if isinstance(value, str):
        return value[:500]
    if isinstance(value, list):
        return ", ".join(map(plain, value[:50]))
    return toml_value(value)


def texts(value: Any) -> list[str]:
    return [plain(item) for item in value[:50]] if isinstance(value, list) else []
