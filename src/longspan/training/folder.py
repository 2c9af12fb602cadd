"""The run folder: run.toml, env.json, metrics.jsonl, checkpoints/ and perhaps tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from longspan.checkpoint import CHECKPOINTS, remove_leftovers
from longspan.config import Run
from longspan.data import Source
from longspan.data.tokenizer import JsonTokenizer
from longspan.errors import UserError
from longspan.files import atomic_write_text
from longspan.runfile import RUN_FILE, dump_run
from longspan.tracking import describe_environment


def open_run_folder(run: Run, run_dir: Path, device: torch.device, source: Source) -> None:
    """Create the run folder and write the files that are known at the start.

    `data.accept_changed` holds for one start only, so it is not written.
    """
    data = run.data.model_copy(update={"accept_changed": False})
    run = run.model_copy(update={"data": data})
    try:
        (run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        remove_leftovers(run_dir / CHECKPOINTS)
        atomic_write_text(run_dir / RUN_FILE, dump_run(run))
        environment = json.dumps(describe_environment(device), indent=1)
        atomic_write_text(run_dir / "env.json", environment)
        if isinstance(source.tokenizer, JsonTokenizer):
            source.tokenizer.save(run_dir)
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error.strerror}") from error
