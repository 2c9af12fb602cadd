"""`longspan runs`: how the runs of a folder stand."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from longspan.errors import UserError
from longspan.reporting.data import Metrics, RunData, read_run
from longspan.runfile import RUN_FILE
from longspan.tracking.history import HISTORY
from longspan.wording import printable

STATE_STYLES = {"running": "green", "finished": "blue", "stopped": "yellow", "failed": "red"}


@dataclass(frozen=True)
class RunStatus:
    """One row of the table."""

    name: str
    folder: str
    state: str
    why: str
    step: int
    steps: int | None
    """Steps that the run is to do, None if its run file cannot be read."""
    loss: float | None
    """The newest; None if there is none, or if it is non-finite."""
    is_loss_finite: bool
    validation_loss: float | None
    rate: float | None
    unit: str
    """What `rate` counts per second: "tokens" or "samples"."""
    bytes: int
    updated: float
    """When the run last wrote something, in seconds since 1970; 0 if never."""


def status_of(data: RunData) -> RunStatus:
    metrics, steps = data.metrics, data.tables.get("train", {})
    total = steps.get("steps") if isinstance(steps, dict) else None
    unit = "tokens" if "tokens_per_s" in metrics else "samples"
    times = [event["time"] for event in data.events]
    return RunStatus(
        name=data.name,
        folder=str(data.folder),
        state=data.state.name,
        why=data.state.why,
        step=data.step,
        steps=total if type(total) is int else None,
        loss=None if metrics.has_diverged("loss") else metrics.last("loss"),
        is_loss_finite=not metrics.has_diverged("loss"),
        validation_loss=metrics.last("validation_loss"),
        rate=metrics.last(f"{unit}_per_s"),
        unit=unit,
        bytes=_size(data.folder),
        updated=max([*times, data.heartbeat or 0.0, 0.0]),
    )


def list_runs(folder: Path) -> list[RunStatus]:
    """The runs in a folder, or the one that it is; those that last wrote something come first."""
    if not os.path.isdir(folder):
        raise UserError(f"expected a folder of runs, got {folder}: it does not exist or is a file")
    try:
        folders = [folder] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()))
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error
    return sorted(map(_status, folders), key=lambda run: -run.updated)


def _is_run(folder: Path) -> bool:
    """Whether a folder has a file of a run, or cannot be looked into."""
    if os.path.isdir(folder) and not os.access(folder, os.X_OK):
        return True
    return any(os.path.isfile(folder / name) for name in (RUN_FILE, HISTORY, "metrics.jsonl"))


def _status(folder: Path) -> RunStatus:
    try:
        return status_of(read_run(folder))
    except UserError as error:  # not ours to read, or just removed
        nothing = RunData(folder, Metrics([]))
        return replace(status_of(nothing), state="unreadable", why=str(error))


def _size(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed. os.walk limits the depth."""
    total, folders = 0, [str(folder)]
    while folders:
        try:
            names = os.listdir(parent := folders.pop())
        except OSError:  # a checkpoint that is being removed
            continue
        for name in names:
            path = os.path.join(parent, name)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            else:
                total += status.st_size
    return total


def as_table(runs: Sequence[RunStatus], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("step", "loss", "validation", "rate", "size", "updated"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for run in runs:
        table.add_row(*cells(run, now))
    return table


def cells(run: RunStatus, now: float) -> list[Text]:
    """The cells of a row. Names and causes are others' text: no markup, no control characters."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    unit = "tok/s" if run.unit == "tokens" else "samples/s"
    texts: list[Any] = [
        printable(run.name),
        Text(run.state, style=STATE_STYLES.get(run.state, "")),
        f"{run.step:,}/{run.steps:,}" if run.steps is not None else f"{run.step:,}",
        number(run.loss, "{:.4f}") if run.is_loss_finite else "non-finite",
        number(run.validation_loss, "{:.4f}"),
        number(run.rate, f"{{:,.0f}} {unit}"),
        size_text(run.bytes),
        ago(now - run.updated) if run.updated else "–",
        printable(run.why),
    ]
    return [text if isinstance(text, Text) else Text(text) for text in texts]


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
