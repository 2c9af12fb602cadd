"""The progress of a run in terminals of any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from longspan.tracking import Reporter

LINE = {"step": 7, "loss": 1.5, "tokens_per_s": 123456.0, "mfu": 0.5, "memory_bytes": 2**30}


@pytest.mark.parametrize("width", [40, 70, 120])
def test_the_step_and_the_time_left_are_shown_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("longspan.tracking.console.stderr_console", lambda **_: console)
    with Reporter(steps=14, done=0) as reporter:
        reporter.step(7)
        reporter.metrics(LINE, 60.0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    last = [line for line in re.split(r"[\r\n]", plain) if line.strip()][-1]
    assert re.match(r"step 7/14 .*loss 1\.5.* (-:--:--|\d+:\d\d:\d\d)\s*$", last)
    assert len(last) <= width
    assert ("━" in last) == (width >= 90)
    assert ("1.00 GiB" in last) == (width >= 70)
