"""The folder of a run: run.toml, env.json, metrics.jsonl, checkpoints/, perhaps tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from longspan.checkpoint import CHECKPOINTS, remove_leftovers
from longspan.config import Run
from longspan.data import Source
from longspan.data.tokenizer import TOKENIZER, JsonTokenizer
from longspan.errors import UserError
from longspan.files import replace_text
from longspan.runfile import RUN_FILE, dump_run, saved_run_file
from longspan.tracking import describe_environment


def check_run_folder(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that holds something else: not empty, and not the run to resume."""
    try:
        if not run_dir.exists() or not any(run_dir.iterdir()):
            return
    except OSError as error:
        raise UserError(f"cannot use the run folder {run_dir}: {error.strerror}") from error
    if not resume:
        raise UserError(
            f"{run_dir} is not empty: go on with it by --resume {run_dir}, or choose another"
        )
    saved_run_file(run_dir)


def open_run_folder(run: Run, run_dir: Path, device: torch.device, source: Source) -> None:
    """Make the run's folder and write what is known at the start.

    That other data was accepted once does not hold for good.
    """
    data = run.data.model_copy(update={"accept_changed": False})
    run = run.model_copy(update={"data": data})
    try:
        (run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        remove_leftovers(run_dir / CHECKPOINTS)
        replace_text(run_dir / RUN_FILE, dump_run(run))
        environment = json.dumps(describe_environment(device), indent=1)
        replace_text(run_dir / "env.json", environment)
        if isinstance(source.tokenizer, JsonTokenizer):
            replace_text(run_dir / TOKENIZER, source.tokenizer.to_json())
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error.strerror}") from error
