"""`longspan checkpoint`: list, verify and remove the checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longspan.checkpoint.format import (
    QUARANTINE_PREFIX,
    checkpoint_path,
    list_checkpoints,
    remove,
)
from longspan.checkpoint.reading import open_checkpoint
from longspan.errors import UserError


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint; `problem` is None if it is intact as far as it was checked."""

    name: str
    step: int | None
    bytes: int
    ranks: int
    problem: str | None


def inspect_checkpoints(
    folder: Path, *, verify: bool, key: bytes | None = None
) -> list[CheckpointInfo]:
    """Describe checkpoints, oldest first, quarantined ones last.

    `verify` checks every byte; with `key`, one that is not signed with it has a problem.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: expected the folder of a run")
    pattern = f"{QUARANTINE_PREFIX}step-*"
    quarantined = sorted(path for path in folder.glob(pattern) if path.is_dir())
    paths = [*list_checkpoints(folder), *quarantined]
    return [_inspect(path, verify=verify, key=key) for path in paths]


def _inspect(path: Path, *, verify: bool, key: bytes | None) -> CheckpointInfo:
    size = sum(file.lstat().st_size for file in path.iterdir())
    try:
        saved = open_checkpoint(path, key)
        if verify:
            saved.check()
    except UserError as error:
        return CheckpointInfo(path.name, None, size, 0, str(error))
    ranks = len(saved.files_of("model"))
    problem = "quarantined" if path.name.startswith(QUARANTINE_PREFIX) else None
    return CheckpointInfo(path.name, saved.step, size, ranks, problem)


def remove_steps(folder: Path, steps: list[int], key: bytes | None = None) -> None:
    """Remove the checkpoints of some steps, but never the last intact one."""
    found = inspect_checkpoints(folder, verify=True, key=key)
    intact = [entry.step for entry in found if not entry.problem]
    for step in steps:
        if not checkpoint_path(folder, step).is_dir():
            raise UserError(f"{folder} has no checkpoint of step {step}")
    if intact and set(intact) <= set(steps):
        raise UserError(
            f"step {intact[-1]} is the last intact checkpoint: keep one, or remove the run's folder"
        )
    for step in sorted(set(steps)):
        remove(checkpoint_path(folder, step))
