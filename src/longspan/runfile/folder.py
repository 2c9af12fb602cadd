"""The folder of a run: its name, what runs write to it, and whether a run may start in it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from longspan.errors import UserError
from longspan.locking import LOCK

RUN_FILE = "run.toml"
"""Name of the run file in a run folder."""

CHECKPOINTS = "checkpoints"
DRAFT = r"\.step-[0-9]+\.(tmp|removed)"
"""What a run leaves in its folder of checkpoints that is killed while it saves or removes one."""

OURS = {RUN_FILE, CHECKPOINTS, LOCK, "env.json", "tokenizer.json", "tokenizer_config.json"}
OURS |= {"metrics.jsonl", "history.jsonl", "heartbeats", "logs", "micro_batch", "STOP", "SAVE"}
OURS |= {
    "huggingface",
    "sinks.json",
    "tensorboard",
    "wandb",
    "mlruns",
    "profile",
    "report.html",
    "rendezvous",
}
"""All that a run has in its folder."""


def new_run_dir(parent: Path, run_file: Path | None) -> Path:
    """Return an unused folder name made of the run file's name and the time."""
    stem = f"{run_file.stem if run_file else 'builtin'}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def saved_run_file(run_dir: Path) -> Path:
    """Return the path of the run file in a run folder."""
    path = run_dir / RUN_FILE
    if not path.exists():
        text = f"{run_dir} is not a run folder: it has no {RUN_FILE}"
        if run_dir.is_dir() and all(map(_is_ours, run_dir.iterdir())):
            text += "; to start the run in it, give its run file too, or --run-dir"
        raise UserError(text)
    return path


def check_run_folder(run_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that is neither new nor the run to resume.

    A run that was killed before its first checkpoint left nothing to lose: its folder counts as
    new, with a run file or without. A folder with files of others never does.
    """
    try:
        found = list(run_dir.iterdir()) if run_dir.exists() else []
        checkpoints = run_dir / CHECKPOINTS
        saved = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    except OSError as error:
        raise UserError(f"cannot use the run folder {run_dir}: {error.strerror}") from error
    if resume and run_dir / RUN_FILE in found:
        return
    if all(map(_is_ours, found)) and (resume or all(re.fullmatch(DRAFT, name) for name in saved)):
        return
    if resume:
        saved_run_file(run_dir)
    raise UserError(
        f"{run_dir} is not empty: resume it (--resume {run_dir}, in Python resume=True), or choose "
        "another folder"
    )


def is_draft(path: Path) -> bool:
    """Whether a file in a run folder is one of a run that was killed while it wrote it."""
    draft = re.fullmatch(r"\.(.+)\.[0-9]+\.tmp", path.name)
    return draft is not None and draft[1] in OURS


def _is_ours(path: Path) -> bool:
    """Whether an entry of a run folder has a name that runs give."""
    return path.name in OURS or is_draft(path)
