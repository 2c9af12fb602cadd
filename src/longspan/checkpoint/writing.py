"""Writing a checkpoint: each rank its own files, then the manifest, then the name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.checkpoint.format import (
    MANIFEST,
    Box,
    Entry,
    Manifest,
    Stored,
    folder_of,
)
from longspan.faults import reach
from longspan.files import fsync, sha256_of


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: the values of `box`, of a whole of `shape`."""

    values: Tensor
    shape: tuple[int, ...]
    box: Box

    @staticmethod
    def whole(x: Tensor) -> Part:
        shape = tuple(x.shape)
        return Part(x, shape, Box.whole(shape))


Parts = Mapping[str, Part]
"""By "group/name", and by "group/name#1", "group/name#2" … what else the rank holds of that tensor,
where that is no one box: a file per group, number and rank."""


REPLACED = ".replaced"


class Draft:
    """The checkpoint of a step, in a folder that has not got its name yet.

    Every rank calls `write`, one of them `commit` once all have; `drop` gives it up. None of them
    needs the others' processes: they meet on the file system.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.path = folder / f".{folder_of(folder, step).name}.tmp"

    def write(self, parts: Parts, rank: int) -> None:
        """The files of one rank, and a list of what they hold."""
        self.path.mkdir(parents=True, exist_ok=True)
        files: dict[str, str] = {}
        tensors: list[tuple[str, dict[str, Any]]] = []
        for (group, number), of_group in _by_group(parts).items():
            path = self.path / f"{group}-{rank:05d}{number}.safetensors"
            values = {name: part.values.contiguous() for name, part in of_group.items()}
            reach("writing")
            save_file(values, path)
            fsync(path)
            files[path.name] = sha256_of(path)
            types = _types(path)
            for name, part in of_group.items():
                stored = {**part.box.model_dump(mode="json"), "file": path.name}
                listing = {"dtype": types[name], "shape": part.shape, "box": stored}
                tensors.append((name, listing))
        listed = self.path / f"rank-{rank:05d}.json"
        listed.write_text(json.dumps({"files": files, "tensors": tensors}), encoding="utf-8")

    def commit(self, state: dict[str, Any], ranks: int) -> Path:
        """Give it its name, once all `ranks` have written."""
        lists = [self.path / f"rank-{rank:05d}.json" for rank in range(ranks)]
        found = [json.loads(path.read_text(encoding="utf-8")) for path in lists]
        manifest = Manifest(
            step=self.step,
            state=state,
            files={name: sha for each in found for name, sha in each["files"].items()},
            tensors=_entries(each["tensors"] for each in found),
        )
        for path in lists:
            path.unlink()
        (self.path / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
        fsync(self.path / MANIFEST)
        fsync(self.path)
        reach("naming")
        target = folder_of(self.folder, self.step)
        old = self.folder / f".{target.name}{REPLACED}"
        if target.exists():
            target.rename(old)
        self.path.rename(target)
        fsync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return target

    def drop(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def save(folder: Path, step: int, parts: Parts, state: dict[str, Any]) -> Path:
    """A checkpoint of one process, at once."""
    remove_leftovers(folder)
    draft = Draft(folder, step)
    try:
        draft.write(parts, 0)
        return draft.commit(state, 1)
    except BaseException:
        draft.drop()
        raise


def remove_leftovers(folder: Path) -> None:
    """Of a process that was killed while it saved or removed one.

    One that was to be replaced, and whose successor had no name yet, gets its own back.
    """
    for old in folder.glob(f".step-*{REPLACED}"):
        target = folder / old.name.removeprefix(".").removesuffix(REPLACED)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    for pattern in (".step-*.tmp", ".step-*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _by_group(parts: Parts) -> dict[tuple[str, str], dict[str, Part]]:
    """By what the file names begin and end with."""
    groups: dict[tuple[str, str], dict[str, Part]] = {}
    for key, part in parts.items():
        name, _, number = key.partition("#")
        file = name.split("/")[0], number and f"-{number}"
        groups.setdefault(file, {})[name] = part
    return groups


def _types(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def _entries(found: Iterable[Iterable[tuple[str, Any]]]) -> dict[str, Entry]:
    boxes: dict[str, list[Stored]] = {}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensors in found:
        for name, listed in tensors:
            known[name] = listed["dtype"], tuple(listed["shape"])
            box = listed["box"]
            stored = Stored(start=tuple(box["start"]), shape=tuple(box["shape"]), file=box["file"])
            boxes.setdefault(name, []).append(stored)
    return {
        name: Entry(dtype=dtype, shape=shape, boxes=tuple(boxes[name]))
        for name, (dtype, shape) in known.items()
    }
