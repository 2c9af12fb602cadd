"""longspan profile: train a few steps of a run and say where their time goes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.parser import Commands
from longspan.cli.shared import (
    DONE,
    FAILED,
    add_run_arguments,
    builtin_name,
    check_nproc,
    split_items,
)
from longspan.errors import UserError
from longspan.progress import Progress
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.config import Run

SCHEDULE = {"wait": 4, "active": 3}
"""Of [track.profile] for a run without one. The first step compiles, the fourth captures CUDA
graphs at the latest."""


class _Profiled(Exception):
    """The summary is written, and the run need not go on."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "profile",
        "profile a few steps of a run and say where their time goes",
        "profile run.toml layout.shard=2 --nproc 2",
        verb=profile,
        group="training",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start (default: product of the layout's axes)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="DIR",
        help="new run folder (default: runs/ and the file's name and time)",
    )


def profile(args: argparse.Namespace) -> None:
    from longspan.launching.local import run_processes
    from longspan.runfile import RUN_FILE, check_run_folder, dump_run, new_run_dir
    from longspan.tracking import HISTORY, History, read_metrics
    from longspan.tracking.trace import FOLDER, SUMMARY, read_summary

    check_nproc(args.nproc)
    file, overrides = split_items(args.items)
    run, processes = _profiled_run(file, overrides, args.nproc)
    stem = file.stem if file else "builtin"
    run_dir = args.out or new_run_dir(Path("runs"), Path(f"profile-{stem}"))
    check_run_folder(run_dir, resume=False)
    written = run_dir / FOLDER / SUMMARY
    written.unlink(missing_ok=True)  # of an earlier call

    received: list[int] = []  # signals

    def poll() -> None:
        if received:
            raise KeyboardInterrupt  # a profile has no checkpoint to wait for
        if written.exists():
            raise _Profiled  # which ends the processes, and saves the time of a checkpoint
        lines = read_metrics(run_dir / "metrics.jsonl")
        progress.detail(f"step {lines[-1]['step']}" if lines else "starting")

    with tempfile.TemporaryDirectory(prefix="longspan-profile-") as folder, Progress() as progress:
        saved = Path(folder) / RUN_FILE
        saved.write_text(dump_run(run), encoding="utf-8")
        command = [sys.executable, "-m", "longspan", "train", str(saved), "--run-dir", str(run_dir)]
        where = f"on {counted(processes, 'process')}"
        progress.phase(f"profiling steps up to {run.track.profile.steps} {where}")
        try:
            code = run_processes(
                command,
                processes,
                run_dir / "logs",
                quiet=True,
                received=received,
                on_poll=poll,
            )
        except _Profiled:
            code = DONE
            step = run.track.profile.steps
            History(run_dir / HISTORY).write("end", step, stop_requested=True)
    summary = read_summary(run_dir)
    if code != DONE or summary is None:
        raise SystemExit(code or FAILED)
    if args.json:
        print(json.dumps({"run_dir": str(run_dir), **summary.as_dict()}))
        return
    print(summary)
    traces = run_dir / FOLDER / summary.ranks[0].traces[0]
    print(f"\ntrace of rank 0, for Perfetto or chrome://tracing: {traces}\nrun folder: {run_dir}")


def _profiled_run(file: Path | None, overrides: list[str], nproc: int | None) -> tuple[Run, int]:
    """The run with a schedule for the profiler and enough steps for it; the number of processes."""
    from longspan.runfile import load_run

    given = load_run(file, overrides, world=None)
    processes = nproc or given.layout.min_world_size
    builtin = "cpu" if file else builtin_name(processes)
    settings = ["checkpoint.every=0", "train.eval_every=0", "train.eval_samples=1"]
    settings += ["track.log_every=1", "track.prompt="]
    schedule = given.track.profile
    if not schedule.active and any(x.startswith("track.profile.active=") for x in overrides):
        raise UserError("track.profile.active=0 profiles no step: set it to at least 1")
    if not schedule.active:
        settings += [f"track.profile.{key}={value}" for key, value in SCHEDULE.items()]
        schedule = schedule.model_copy(update=SCHEDULE)
    # Rank 0 joins the parts of all ranks after the step that follows the profiled ones.
    if (steps := schedule.steps + 2) > given.train.steps:
        settings.append(f"train.steps={steps}")
    return load_run(file, [*overrides, *settings], builtin=builtin, world=processes), processes
