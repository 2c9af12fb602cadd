"""The folder of a run: run.toml, env.json, metrics.jsonl, checkpoints/."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from longspan.config import Run
from longspan.errors import UserError
from longspan.runfile import dump_run
from longspan.tracking import describe_environment

RUN_FILE = "run.toml"
CHECKPOINTS = "checkpoints"


def new_run_dir(parent: Path, run_file: Path | None) -> Path:
    """A folder name that is free: the run file's name and the time."""
    stem = f"{run_file.stem if run_file else 'builtin'}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def open_run_folder(run: Run, run_dir: Path, device: torch.device, *, must_be_new: bool) -> None:
    """Make the run's folder and write what is known at the start: run.toml and env.json."""
    try:
        if must_be_new and run_dir.exists() and any(run_dir.iterdir()):
            raise UserError(
                f"{run_dir} is not empty: go on with it by --resume {run_dir}, or choose another"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RUN_FILE).write_text(dump_run(run), encoding="utf-8")
        environment = json.dumps(describe_environment(device), indent=1)
        (run_dir / "env.json").write_text(environment, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error.strerror}") from error


def saved_run_file(run_dir: Path) -> Path:
    """The run file that a run's folder holds."""
    path = run_dir / RUN_FILE
    if not path.exists():
        raise UserError(f"{run_dir} is not a run folder: it has no {RUN_FILE}")
    return path
