"""Counts and values as text for people."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

LONGEST = 80
"""Characters of a value that a message shows."""


def counted(number: int, noun: str) -> str:
    """Return "1 step", "2 steps", "1,000 steps"; `noun` is the singular."""
    suffix = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{suffix}"


def clock(seconds: float) -> str:
    """Return a duration as "1:05" or "2:03:04"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size_text(size: float) -> str:
    """Return a number of bytes as "512 B", "9.8 MiB", "1,024.0 GiB"."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((n for n in range(3) if size < 1024 ** (n + 1)), 3)
    return f"{size / 1024**power:,.{int(power > 0)}f} {units[power]}"


def printable(text: str) -> str:
    """A text that others wrote, for a terminal: a control character becomes a question mark."""
    return "".join(character if character.isprintable() else "�" for character in text)


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return "; did you mean …?" with the known word closest to a mistyped one, or nothing."""
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), names, n=1)
    return f"; did you mean {form.format(names[close[0]])}?" if close else ""


def toml_value(value: Any) -> str:
    """Return a value as TOML spells it, shortened if it is long."""
    text = _toml(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _toml(value: Any) -> str:
    if value is None:
        return "nothing"  # YAML's null
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())}}}"
    return str(value)


def shown(value: Any) -> str:
    """A value of a file that others wrote, in a message: as JSON, at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
