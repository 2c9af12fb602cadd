"""`longspan watch`: one run, live in a terminal."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from longspan.reporting.data import RunData, Vector, read_run
from longspan.reporting.runs import STATE_STYLES, ago, size_text, status_of
from longspan.wording import clock, printable

BLOCKS = "▁▂▃▄▅▆▇█"
EVENTS = 6
"""How many of the last events are shown."""
CURVES = {
    "loss": "{:.4f}",
    "validation_loss": "{:.4f}",
    "tokens_per_s": "{:,.0f}",
    "samples_per_s": "{:,.1f}",
    "mfu": "{:.1%}",
    "grad_norm": "{:.3g}",
}
"""Metrics that are drawn if a run has them, and how their values are written."""


def watch(folder: Path, console: Console, *, every_s: float = 1.0) -> None:
    """Show the run in `folder` until Ctrl-C; once, if the output is no terminal."""
    if not console.is_terminal:
        console.print(frame(read_run(folder), console.width))
        return
    with Live(console=console, auto_refresh=False) as live:
        seen: object = None
        while True:
            if (now := fingerprint(folder)) != seen or int(time.time()) % 5 == 0:
                live.update(frame(read_run(folder), console.width), refresh=True)
                seen = now
            time.sleep(every_s)


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when a run has written metrics or events, or has begun anew."""
    found = []
    for name in ("metrics.jsonl", "history.jsonl", "run.toml"):
        try:
            status = (folder / name).stat()
            found.append((name, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((name, 0, 0))
    return tuple(found)


def frame(data: RunData, width: int) -> RenderableType:
    """All that is shown, at most `width` characters wide."""
    status = status_of(data)
    head = Text(printable(data.name), style="bold")
    head.append(f"  {status.state}", style=STATE_STYLES.get(status.state, ""))
    if status.why:
        head.append(f": {printable(status.why)}")
    parts: list[RenderableType] = [head]
    if status.steps:
        steps = Table.grid(padding=(0, 1))
        left = _seconds_left(data, status.steps)
        steps.add_row(
            Text(f"step {status.step:,} of {status.steps:,}"),
            ProgressBar(total=status.steps, completed=status.step, width=max(10, width // 3)),
            Text(f"{clock(left)} left" if left is not None else ""),
        )
        parts.append(steps)
    parts.append(_curves(data, width))
    parts.append(_events(data))
    parts += [Text(printable(problem), style="yellow") for problem in data.problems]
    where = printable(str(data.folder))
    parts.append(Text(f"{size_text(status.bytes)} in {where}", style="dim"))
    return Group(*parts)


def _curves(data: RunData, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    room = max(10, width - 48)
    for name, form in CURVES.items():
        if (last := data.metrics.last(name)) is None:
            continue
        values = data.metrics.values(name)
        finite = values[np.isfinite(values)]
        # A null of another metric, such as the MFU, may also mean that it is unknown.
        is_lost = name.endswith(("loss", "norm")) and data.metrics.has_diverged(name)
        newest = "non-finite" if is_lost else form.format(last)
        table.add_row(
            Text(name.replace("_", " ").replace(" per s", "/s")),
            Text(newest, justify="right"),
            Text(sparkline(values, room), style="cyan"),
            Text(f"{form.format(finite.min())} … {form.format(finite.max())}", style="dim"),
        )
    return table


def sparkline(values: Vector, width: int) -> str:
    """The values as a row of at most `width` bars, each the mean of its share; spaces for NaN."""
    parts = np.array_split(values, min(width, len(values))) if len(values) else []
    means = [float(np.mean(x[np.isfinite(x)])) if np.isfinite(x).any() else np.nan for x in parts]
    finite = [mean for mean in means if np.isfinite(mean)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span, top = high - low or 1.0, len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((mean - low) / span * top)] if np.isfinite(mean) else " " for mean in means
    )


def _events(data: RunData) -> Table:
    table = Table.grid(padding=(0, 2))
    for event in data.events[-EVENTS:]:
        cause = event.get("cause")
        table.add_row(
            Text(ago(data.now - event["time"]), style="dim", justify="right"),
            Text(printable(event["event"])),
            Text(f"step {event['step']:,}"),
            Text(printable(cause[:200]) if isinstance(cause, str) else ""),
        )
    return table


def _seconds_left(data: RunData, steps: int) -> float | None:
    if data.state.name != "running" or not data.metrics.last_step:
        return None
    unit = "tokens" if "tokens_per_s" in data.metrics else "samples"
    done, rate = data.metrics.last(unit), data.metrics.last(f"{unit}_per_s")
    if not done or not rate or done < 0 or rate < 0:
        return None
    try:
        left = max(0, steps - data.step) * done / data.metrics.last_step / rate
    except OverflowError:
        return None
    return left if math.isfinite(left) else None
