"""The checkpoints of a run as people see and remove them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longspan.checkpoint.format import ASIDE, all_in, folder_of, remove
from longspan.checkpoint.reading import open_checkpoint
from longspan.errors import UserError


@dataclass(frozen=True)
class Listed:
    """One checkpoint; `problem` says what is wrong with it, as far as it was looked at."""

    name: str
    step: int | None
    bytes: int
    ranks: int
    problem: str | None


def listed(folder: Path, *, checked: bool) -> list[Listed]:
    """All of a run's, oldest first, those set aside last; `checked` reads every byte."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not there: expected the folder of a run")
    aside = sorted(path for path in folder.glob(f"{ASIDE}step-*") if path.is_dir())
    return [_listed(path, checked=checked) for path in [*all_in(folder), *aside]]


def _listed(path: Path, *, checked: bool) -> Listed:
    size = sum(file.lstat().st_size for file in path.iterdir())
    try:
        saved = open_checkpoint(path)
        if checked:
            saved.check()
    except UserError as error:
        return Listed(path.name, None, size, 0, str(error))
    ranks = len(saved.files_of("model"))
    problem = "set aside" if path.name.startswith(ASIDE) else None
    return Listed(path.name, saved.step, size, ranks, problem)


def remove_steps(folder: Path, steps: list[int]) -> None:
    """Remove the checkpoints of some steps, but never the last that is whole."""
    whole = [entry.step for entry in listed(folder, checked=True) if entry.problem is None]
    for step in steps:
        if not folder_of(folder, step).is_dir():
            raise UserError(f"{folder} holds no checkpoint of step {step}")
    if whole and set(whole) <= set(steps):
        raise UserError(
            f"step {whole[-1]} would be the last whole checkpoint to go: leave one, or remove the "
            "run's folder"
        )
    for step in sorted(set(steps)):
        remove(folder_of(folder, step))
