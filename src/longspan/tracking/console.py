"""Console output: a live progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from longspan.progress import stderr_console
from longspan.wording import clock, counted

WIDE = 90
"""Columns of a terminal from which on a bar is shown too."""


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Format a metrics line for the console."""
    loss = "non-finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    fields = [f"loss {loss}"]
    if "tokens_per_s" in metrics:
        fields.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
    else:
        fields.append(f"{metrics['samples_per_s']:,.1f} samples/s")
    if metrics.get("skipped_steps"):
        fields.append(f"{counted(metrics['skipped_steps'], 'step')} skipped")
    if metrics.get("mfu") is not None:
        fields.append(f"MFU {metrics['mfu']:.1%}")
    fields.append(f"{metrics['memory_bytes'] / 2**30:.2f} GiB")
    if "slowest_rank" in metrics:
        fields.append(f"rank {metrics['slowest_rank']} is slow ({metrics['slowest_in']})")
    return "  ".join(fields)


class Reporter:
    """Shows progress. Everything goes to stderr, so stdout can carry a result."""

    def __init__(self, *, steps: int, done: int, silent: bool = False) -> None:
        self._console = stderr_console(quiet=silent)
        self._steps = steps
        # In a narrow terminal the end of the row is cut, never the step or the time left.
        bar = [BarColumn(bar_width=24)] if self._console.width >= WIDE else []
        self._progress = Progress(
            TextColumn(
                "step {task.completed:.0f}/{task.total:.0f}",
                table_column=Column(no_wrap=True, min_width=len(f"step {steps}/{steps}")),
            ),
            *bar,
            TextColumn(
                "{task.fields[row]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            TimeRemainingColumn(
                elapsed_when_finished=True, table_column=Column(no_wrap=True, min_width=7)
            ),
            console=self._console,
            expand=not bar,
        )
        self._task: TaskID = self._progress.add_task("", total=steps, completed=done, row="")

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def print_table(self, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows))
        for name, value in rows.items():
            self.print(f"  {name:<{width}}  {value}")

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def metrics(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        row = format_metrics(metrics)
        if self._console.is_terminal:
            self._progress.update(self._task, row=row)
        else:
            self.print(f"step {metrics['step']}/{self._steps}  {row}  ETA {clock(seconds_left)}")
