"""`longspan runs` and `longspan watch` in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from longspan.cli import main
from longspan.reporting import page_data
from longspan.reporting.data import read_run
from longspan.reporting.runs import as_table, list_runs
from longspan.reporting.sections import overview
from longspan.reporting.terminal import frame, sparkline


def write_run(folder: Path, *events: dict[str, Any], steps: int = 20) -> Path:
    """A run folder with two lines of metrics and the given events."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(f"[train]\nsteps = {steps}\n")
    metrics = [
        {"step": 5, "loss": 3.5, "tokens": 500, "tokens_per_s": 90.0, "lr": 0.1},
        {"step": 10, "loss": 2.25, "tokens": 1_000, "tokens_per_s": 100.0, "lr": 0.1},
        {"step": 10, "validation_loss": 2.5},
    ]
    lines = [{"time": time.time() - 100 + n, **event} for n, event in enumerate(events)]
    for name, content in (("metrics.jsonl", metrics), ("history.jsonl", lines)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in content))
    return folder


START = {"event": "start", "step": 0, "ranks": 1, "lost_steps": 0, "cause": None}
ENDED = {"event": "end", "step": 10, "stop_requested": False}
STOPPED = {"event": "end", "step": 10, "stop_requested": True}
FAILED = {"event": "failure", "step": 10, "cause": "ValueError: \x1b[31mred[/red]"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "done", START, ENDED)
    write_run(tmp_path / "stopped", START, STOPPED)
    write_run(tmp_path / "failed [bold]", START, FAILED)
    live = write_run(tmp_path / "live", START)
    (live / "heartbeats").mkdir()
    (live / "heartbeats" / "rank-0.json").write_text(json.dumps({"time": time.time(), "step": 10}))
    (tmp_path / "not a run").mkdir()
    return tmp_path


def test_states_steps_losses_and_speed(folder: Path) -> None:
    runs = {run.name: run for run in list_runs(folder)}
    states = {name: run.state for name, run in runs.items()}
    assert states == {
        "done": "finished",
        "stopped": "stopped",
        "failed [bold]": "failed",
        "live": "running",
    }
    run = runs["done"]
    assert (run.step, run.steps, run.loss, run.validation_loss) == (10, 20, 2.25, 2.5)
    assert (run.rate, run.unit) == (100.0, "tokens")
    files = [path for path in (folder / "done").rglob("*") if path.is_file()]
    assert run.bytes == sum(path.stat().st_size for path in files)
    assert "ValueError" in runs["failed [bold]"].why
    assert next(run.name for run in list_runs(folder)) == "live"  # it wrote last
    assert [run.name for run in list_runs(folder / "done")] == ["done"]


def test_the_table_shows_names_and_causes_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "failed [bold]" in output
    assert "\x1b" not in output
    assert "ValueError: �[31mred[/red]" in output
    assert re.search(r"done +finished +10/20 +2\.2500 +2\.5000 +100 tok/s", output)


def test_a_loss_that_is_no_longer_finite_is_not_the_last_that_was(folder: Path) -> None:
    with (folder / "live" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "loss": null, "tokens": 1500, "tokens_per_s": 100.0}\n')
    run = next(run for run in list_runs(folder) if run.name == "live")
    assert (run.loss, run.is_loss_finite) == (None, False)
    data = read_run(folder / "live")
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(as_table([run], time.time()), frame(data, 100))
    assert captured.get().count("non-finite") == 2
    assert ">non-finite<" in str(overview([data]))


def test_json_and_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--json"]) == 0
    assert {run["state"] for run in json.loads(capsys.readouterr().out)} >= {"running", "failed"}
    assert main(["runs", str(folder / "nowhere")]) == 2
    assert "expected a folder of runs" in capsys.readouterr().err
    assert main(["runs", str(folder / "not a run")]) == 0
    assert "no runs in" in capsys.readouterr().err
    assert main(["watch", str(folder / "not a run")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["watch", str(folder / "done"), "--port", "1"]) == 2
    assert "--port needs --web" in capsys.readouterr().err


def test_a_frame_says_what_people_look_at_first(folder: Path) -> None:
    console = Console(width=72, highlight=False)
    with console.capture() as captured:
        console.print(frame(read_run(folder / "live"), 72))
    text = captured.get()
    assert "live  running" in text
    assert "step 10 of 20" in text
    assert "0:10 left" in text  # 10 steps of 100 tokens at 100 tokens/s
    assert re.search(r"loss +2\.2500 +█▁", text)
    assert max(map(len, text.splitlines())) <= 72


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([1, float("nan"), 8], 3, "▁ █"),
        ([float("nan")], 3, ""),
        ([], 3, ""),
        ([5, 5], 9, "▁▁"),
        ([0, 5e-324], 2, "▁█"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(np.array(values, dtype=np.float64), width) == expected


def test_a_frame_of_hostile_values_is_harmless(tmp_path: Path) -> None:
    huge = write_run(tmp_path / "a\n\x1b[31mb", START, steps=10**400)
    (huge / "heartbeats").mkdir()
    (huge / "heartbeats" / "rank-0.json").write_text("{}")
    lines = ['{"step": 1, "tokens": 1e300, "tokens_per_s": 1e-300, "loss": 1e308}']
    lines += ['{"step": 2, "tokens": 9, "tokens_per_s": 1e-300, "loss": -1e308}']
    (huge / "metrics.jsonl").write_text("\n".join(lines))
    (huge / "env.json").write_text("{")
    console = Console(width=72, highlight=False)
    with console.capture() as captured:
        console.print(frame(read_run(huge), 72))
    text = captured.get()
    assert "a��[31mb  running" in text
    assert "\x1b" not in text
    assert "is not valid JSON" in text.replace("\n", " ")  # what could not be read is said


def test_deep_folders_and_folders_of_others_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "done")
    before = list_runs(folder / "done")[0].bytes
    for _ in range(1_100):  # deeper than Python's stack
        os.mkdir("d")
        os.chdir("d")
    Path("file").write_bytes(bytes(1_000))
    monkeypatch.chdir(folder)
    try:
        assert list_runs(folder / "done")[0].bytes == before + 1_000
    finally:  # shutil, by which pytest removes folders, recurses
        subprocess.run(["rm", "-r", str(folder / "done" / "d")], check=True)

    is_allowed = os.access
    locked = folder / "live"
    monkeypatch.setattr(  # a mode does not keep root out
        os, "access", lambda path, mode: path != locked and is_allowed(path, mode)
    )
    states = {run.name: (run.state, run.why) for run in list_runs(folder)}
    assert states["live"] == ("unreadable", f"cannot read {locked}: permission denied")
    assert states["done"][0] == "finished"


def test_watching_in_a_terminal_follows_the_run_and_ends_by_ctrl_c(folder: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "longspan", "watch", str(folder / "live")])
    shown = read_until(terminal, lambda text: "step 10 of 20" in text)
    assert "Traceback" not in shown
    with (folder / "live" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "loss": 1.125, "tokens": 1500, "tokens_per_s": 100.0}\n')
    read_until(terminal, lambda text: "step 15 of 20" in text and "1.1250" in text)
    os.kill(pid, signal.SIGINT)
    assert "Traceback" not in read_until(terminal, lambda text: False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def read_until(terminal: int, done: Callable[[str], bool], limit_s: float = 60.0) -> str:
    """What the program writes until `done`, or until it ends."""
    output, deadline = "", time.monotonic() + limit_s
    while not done(output):
        assert time.monotonic() < deadline, output
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                output += os.read(terminal, 1 << 16).decode(errors="replace")
            except OSError:  # the program has ended
                break
    return output


def test_the_loss_by_position_is_a_section_of_its_own(folder: Path) -> None:
    with (folder / "done" / "metrics.jsonl").open("a") as file:
        losses = {"0-511": 3.0, "512-1023": 1.5, "<b>-1": 2.0}
        file.write(json.dumps({"step": 10, "loss_by_position": losses}) + "\n")
    data = page_data([read_run(folder / "done")])
    section = data["sections"]["positions"]["html"]
    assert re.search(r"0 to 511.*width:100\.00%.*3\.0000.*512 to 1,023.*width:50\.00%", section)
    assert "<b>-1" not in json.dumps(data)
    assert not any("position" in chart["title"] for chart in data["charts"])


def test_a_heartbeat_of_the_future_is_no_sign_of_life(folder: Path) -> None:
    beat = folder / "live" / "heartbeats" / "rank-0.json"
    os.utime(beat, (time.time() + 1e6, time.time() + 1e6))
    assert read_run(folder / "live").state.name == "failed"
