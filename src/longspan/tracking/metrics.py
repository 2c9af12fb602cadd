"""metrics.jsonl: one JSON object a line, in order of step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from longspan.files import replace_text


class MetricsFile:
    """Appends to a metrics file, from which lines after `step` are dropped first.

    Those are lines of work that a resumed run does again. Without a path nothing is written.
    """

    def __init__(self, path: Path | None, *, step: int) -> None:
        self._file = None
        if path is not None:
            kept = [_encode(line) for line in lines_of(path) if line["step"] <= step]
            replace_text(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(_encode(line))
            self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _encode(line: dict[str, Any]) -> str:
    """One line of JSON, which has no NaN: what is no number is null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return json.dumps(finite) + "\n"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; those cut short by a crash are left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
