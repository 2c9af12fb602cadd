"""One checkpoint is one folder: safetensors files and a manifest with the SHA-256 of each.

    checkpoints/step-00000020/
      manifest.json            step, JSON state, and the SHA-256 of every file
      model.safetensors        one file per group of tensors
      optimizer.safetensors
      rng.safetensors

It is written under another name, fsynced and renamed, so a folder named step-… is whole. No file
here can run code when it is read.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.errors import UserError, first_problem
from longspan.files import new_folder, sha256_of

MANIFEST = "manifest.json"

Groups = dict[str, dict[str, Tensor]]


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["longspan-checkpoint-1"] = "longspan-checkpoint-1"
    step: Annotated[int, Field(ge=0)]
    state: dict[str, Any]
    sha256: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]
    """What is not a tensor: data position, scaler."""
    groups: Groups
    """Tensors by group ("model", "optimizer", …) and name."""


def save(folder: Path, step: int, groups: Groups, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder`, which must not hold one of that step."""
    target = folder / f"step-{step:08d}"
    for leftover in folder.glob(".step-*.tmp"):  # of a process that was killed while saving
        shutil.rmtree(leftover)
    with new_folder(target) as draft:
        files = {}
        for group, tensors in groups.items():
            path = draft / f"{group}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            files[path.name] = sha256_of(path)
        manifest = Manifest(step=step, state=state, sha256=files)
        (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return target


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints."""
    for path in _all(folder)[:-keep]:
        shutil.rmtree(path)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next(reversed(_all(folder)), None)


def load(path: Path, groups: tuple[str, ...] | None = None) -> Checkpoint:
    """Read a checkpoint, or only some of its groups; every file read is checked first."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        wanted = groups or tuple(name.removesuffix(".safetensors") for name in manifest.sha256)
        for name in (f"{group}.safetensors" for group in wanted):
            if sha256_of(path / name) != manifest.sha256.get(name):
                raise ValueError(f"{name} is damaged: its SHA-256 is not the manifest's")
        tensors = {group: load_file(path / f"{group}.safetensors") for group in wanted}
    except (OSError, ValueError, SafetensorError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise UserError(
            f"cannot use the checkpoint {path}: {reason}. Remove that folder to go on from the "
            "one before it"
        ) from error
    return Checkpoint(path, manifest.step, manifest.state, tensors)


def _all(folder: Path) -> list[Path]:
    """Checkpoints by step; a folder of another name, such as a copy put aside, is none."""
    found = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.glob("step-*"))
    by_step = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(by_step)]
