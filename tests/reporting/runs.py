"""Run folders for the tests of reports, written without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longspan.runfile import dump_run, load_run

CONTEXT = 1024


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def metrics(lines: int, every: int = 1) -> list[dict[str, Any]]:
    """Lines as the training loop writes them, with a loss that falls and a spike at the middle."""
    found: list[dict[str, Any]] = []
    for i in range(1, lines + 1):
        step = i * every
        loss = 2 + 3 / math.sqrt(i) + 0.1 * math.sin(7 * i) + 4 * (i == lines // 2)
        found.append(
            {
                "step": step,
                "tokens": step * CONTEXT,
                "loss": loss,
                "lr": 1e-3,
                "grad_norm": 1 + 0.2 * math.cos(3 * i),
                "skipped_steps": 0,
                "tokens_per_s": 1000.0 + 100 * (i % 7),
                "mfu": None,
                "memory_bytes": 500 << 20,
            }
        )
        if i % max(1, lines // 8) == 0:
            found.append({"step": step, "validation_loss": loss - 0.2, "baseline_loss": 2.3})
    return found


def history(*events: tuple[float, str, int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"time": t, "event": name, "step": step, **fields} for t, name, step, fields in events]


ONE_START = history(
    (1000.0, "start", 0, {"lost_steps": 0, "cause": None, "ranks": 1}),
    (1060.0, "save", 50, {"blocked_s": 0.5}),
    (1100.0, "end", 100, {"stop_requested": False}),
)


def write_run(
    folder: Path,
    lines: Iterable[Mapping[str, Any]] = (),
    events: Iterable[Mapping[str, Any]] = ONE_START,
    overrides: Iterable[str] = (),
    world: int = 1,
) -> Path:
    folder.mkdir(parents=True)
    run = load_run(None, [f"data.context={CONTEXT}", *overrides], world=world)
    (folder / "run.toml").write_text(dump_run(run))
    write_lines(folder / "metrics.jsonl", lines or metrics(100))
    write_lines(folder / "history.jsonl", events)
    (folder / "env.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    return folder
