"""metrics.jsonl: one JSON object per line, in order of step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from longspan.errors import UserError
from longspan.files import atomic_write_text, read_json_lines
from longspan.tracking.lines import LineFile
from longspan.tracking.sinks import Sinks


class MetricsFile:
    """Appends to a metrics file, then passes lines to `sinks`; does nothing if `path` is None.

    Opening it drops lines after `step`: a resumed run repeats that work.
    """

    def __init__(self, path: Path | None, *, step: int, sinks: Sinks | None = None) -> None:
        self._file, self._sinks = None, sinks
        if path is not None:
            kept = [json.dumps(finite(line)) for line in read_metrics(path) if line["step"] <= step]
            try:
                atomic_write_text(path, "".join(f"{line}\n" for line in kept))
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror}") from error
            self._file = LineFile(path)

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            line = finite(line)
            self._file.append(json.dumps(line))
            if self._sinks is not None:
                self._sinks.write(line)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def finite(value: Any) -> Any:
    """A value as JSON has it, which has no NaN and no infinity: non-finite numbers become null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, without those that a crash truncated."""
    return [line for line in read_json_lines(path) if isinstance(line.get("step"), int)]
