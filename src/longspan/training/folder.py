"""The run folder: run.toml, env.json, metrics.jsonl, checkpoints/ and perhaps tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from longspan.checkpoint import CHECKPOINTS, remove_leftovers
from longspan.config import Run
from longspan.data import DatasetSource, Source
from longspan.data.tokenizer import TOKENIZER, JsonTokenizer
from longspan.errors import UserError
from longspan.faults import fault_point
from longspan.files import atomic_write_text
from longspan.runfile import RUN_FILE, dump_run, is_draft
from longspan.tracking import describe_environment
from longspan.training.watchdog import HEARTBEATS, heartbeat_path


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
