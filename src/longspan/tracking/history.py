"""history.jsonl: when a run started, saved, went back and ended; and what of its time was of use.

Lines are only ever added, so that it tells of work that was lost, too.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HISTORY = "history.jsonl"
"""Its place in a run's folder."""
WITHOUT_A_WORD = "ended without a word, as by SIGKILL"


class History:
    """Appends to a history; without a path nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, step: int, **fields: Any) -> None:
        if self._path is not None:
            line = {"time": time.time(), "event": event, "step": step, **fields}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """All there is; a line cut short by a crash is left out."""
        if self._path is None or not self._path.exists():
            return []
        found = []
        for text in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and {"time", "event", "step"} <= line.keys():
                found.append(line)
        return found


def cause_of_end(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the run ended the last time; None where it has not begun or came to its end.

    Any rank may have told a failure, the others then that they lost it: the first one counts.
    """
    starts = [number for number, line in enumerate(lines) if line["event"] == "start"]
    if not starts:
        return None
    for line in lines[starts[-1] :]:
        match line:
            case {"event": "end", "was_asked_to_stop": asked}:
                return "asked to stop" if asked else None
            case {"event": "failure", "cause": cause}:
                return str(cause)
    return WITHOUT_A_WORD


@dataclass(frozen=True)
class Goodput:
    """How much of a run's time, from its first start, went into steps that were kept."""

    productive_s: float
    wall_s: float
    restarts: int
    causes: dict[str, int]
    """Of the restarts, and how often each."""
    lost_steps: int
    blocked_s: float
    best_interval_s: float | None
    """Between checkpoints, by Young and Daly: √(2 · time a save blocks · time between failures)."""

    @property
    def share(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def __str__(self) -> str:
        causes = ", ".join(f"{count} × {cause}" for cause, count in self.causes.items())
        restarts = f"{self.restarts} restarts" + (f" ({causes})" if causes else "")
        text = (
            f"goodput {self.share:.0%}: {self.productive_s:.0f} s of {self.wall_s:.0f} s went into "
            f"steps that count; {restarts}, {self.lost_steps} steps lost, "
            f"{self.blocked_s:.1f} s waiting for saves"
        )
        if self.best_interval_s is not None:
            text += f"; least would be lost with a checkpoint every {self.best_interval_s:.0f} s"
        return text


def goodput(
    history: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], now: float
) -> Goodput:
    """From the lines of a run's history and of the metrics that were kept."""
    starts = [line for line in history if line["event"] == "start"]
    saves = [float(line["blocked_s"]) for line in history if line["event"] == "save"]
    productive, tokens = 0.0, 0
    for line in metrics:
        if "tokens_per_s" in line:
            productive += (line["tokens"] - tokens) / line["tokens_per_s"]
            tokens = line["tokens"]
    wall = now - float(starts[0]["time"]) if starts else 0.0
    lost = [int(line.get("lost_steps", 0)) for line in history]
    causes = Counter(str(line["cause"]) for line in starts[1:] if line.get("cause"))
    failures = causes.total() - causes["asked to stop"]
    best = None
    if failures and saves:
        best = math.sqrt(2 * sum(saves) / len(saves) * wall / failures)
    return Goodput(
        productive, wall, max(0, len(starts) - 1), dict(+causes), sum(lost), sum(saves), best
    )
