"""The run folder: run.toml, env.json, metrics.jsonl, checkpoints/ and perhaps tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from longspan.checkpoint import (
    CHECKPOINTS,
    checkpoint_path,
    list_checkpoints,
    open_checkpoint,
    remove_leftovers,
    step_of,
)
from longspan.config import Run
from longspan.data import DatasetSource, Source
from longspan.data.tokenizer import TOKENIZER, JsonTokenizer
from longspan.errors import UserError
from longspan.export.side_files import SIDE_FOLDER
from longspan.faults import fault_point
from longspan.files import atomic_folder, atomic_write_text
from longspan.runfile import RUN_FILE, dump_run, is_draft, saved_run_file
from longspan.tracking import describe_environment
from longspan.training.watchdog import HEARTBEATS, heartbeat_path


def fork(run_dir: Path, step: int, out: Path, key: bytes | None = None) -> None:
    """Copy the checkpoint of a step, and the files of its run, to the new run folder `out`.

    A run that is resumed there goes on from that step, whatever becomes of the run it came from.
    """
    saved_run_file(run_dir)
    path = checkpoint_path(run_dir / CHECKPOINTS, step)
    if not path.is_dir():
        steps = ", ".join(str(step_of(x)) for x in list_checkpoints(run_dir / CHECKPOINTS))
        raise UserError(f"{run_dir} has no checkpoint of step {step}, only of {steps or 'none'}")
    if out.exists():
        raise UserError(f"{out} already exists: choose another folder")
    open_checkpoint(path, key).check()
    try:
        with atomic_folder(out) as draft:
            for name in (RUN_FILE, TOKENIZER, "tokenizer_config.json", SIDE_FOLDER):
                if (run_dir / name).is_dir():
                    shutil.copytree(run_dir / name, draft / name, symlinks=True)
                elif (run_dir / name).exists():
                    shutil.copy(run_dir / name, draft / name)
            shutil.copytree(path, draft / CHECKPOINTS / path.name, symlinks=True)
    except OSError as error:
        raise UserError(f"cannot write the run folder {out}: {error.strerror}") from error


def open_run_folder(
    run: Run,
    run_dir: Path,
    device: torch.device,
    source: Source | DatasetSource,
    ranks: int = 1,
) -> None:
    """Create the run folder and write the files that are known at the start, run.toml last.

    What an earlier start of the run, on perhaps more `ranks`, has left is removed.
    `data.accept_changed` holds for one start only, so it is not written.
    """
    data = run.data.model_copy(update={"accept_changed": False})
    run = run.model_copy(update={"data": data})
    try:
        (run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        fault_point("folder")
        remove_leftovers(run_dir / CHECKPOINTS)
        for draft in filter(is_draft, run_dir.iterdir()):
            draft.unlink()
        expected = {heartbeat_path(run_dir, rank) for rank in range(ranks)}
        for stale in set((run_dir / HEARTBEATS).glob("rank-*")) - expected:
            stale.unlink()
        environment = json.dumps(describe_environment(device), indent=1)
        atomic_write_text(run_dir / "env.json", environment)
        fault_point("folder")
        if isinstance(source.tokenizer, JsonTokenizer):
            source.tokenizer.save(run_dir)
        else:  # an earlier start may have had other data
            (run_dir / TOKENIZER).unlink(missing_ok=True)
        fault_point("folder")
        atomic_write_text(run_dir / RUN_FILE, dump_run(run))
        fault_point("folder")
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error.strerror}") from error
