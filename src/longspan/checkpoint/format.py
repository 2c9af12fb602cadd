"""One checkpoint is one folder: safetensors files and a manifest with the SHA-256 of each.

    checkpoints/step-00000020/
      manifest.json            step, JSON state, and bytes and SHA-256 of every file
      model.safetensors        one file per group of tensors
      optimizer.safetensors
      rng.safetensors

It is written under another name, fsynced and renamed, so a folder named step-… is whole. No file
here can run code when it is read.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.errors import UserError
from longspan.files import new_folder, sha256_of

FORMAT = "longspan-checkpoint-1"
MANIFEST = "manifest.json"

Groups = dict[str, dict[str, Tensor]]


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
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        manifest = {"format": FORMAT, "step": step, "state": state, "files": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, expected {FORMAT!r}")
        step, state, files = manifest["step"], manifest["state"], manifest["files"]
        wanted = groups or tuple(name.removesuffix(".safetensors") for name in files)
        for name in (f"{group}.safetensors" for group in wanted):
            digest = sha256_of(path / name)
            if digest != files[name]["sha256"]:
                raise ValueError(
                    f"{name} is damaged: its SHA-256 is {digest[:12]}…, "
                    f"the manifest says {files[name]['sha256'][:12]}…"
                )
        tensors = {group: load_file(path / f"{group}.safetensors") for group in wanted}
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"cannot use the checkpoint {path}: {error}. Remove that folder to go on from the "
            "one before it"
        ) from error
    return Checkpoint(path, step, state, tensors)


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())
