"""metrics.jsonl: one JSON object a line, in order of step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends to a metrics file, from which lines after `step` are dropped first.

    Those are lines of work that a resumed run does again.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [line for line in _lines(path) if line["step"] <= step]
        self._file = path.open("w", encoding="utf-8")
        for line in kept:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # a line cut short by a crash
    return lines
