"""One checkpoint is one folder: safetensors files and a manifest.

    checkpoints/step-00000020/
      manifest.json                  step, state, every tensor's shape and where its parts lie, and
                                     the SHA-256 of every file and of the manifest itself
      model-00000.safetensors        what rank 0 holds of the model's tensors
      model-00001.safetensors        what rank 1 holds
      optimizer-00000.safetensors    …

A tensor is known by its whole shape and is cut into boxes, one per rank that holds a part of it; so
any number of ranks in any layout can read what any other has written. A rank that holds a stretch
of a flattened matrix has up to three boxes of it, the further ones in model-00000-1 and -2. The
folder is written under another name, fsynced and renamed: one named step-… is whole. No file here
can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longspan.errors import Damaged, UserError, first_problem
from longspan.faults import reach

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Where a run's folder holds its checkpoints."""
ASIDE = "bad-"
FORMAT: Literal["longspan-checkpoint-2"] = "longspan-checkpoint-2"
MOST_CELLS = 1 << 20
"""Ranks split a tensor along one or two dimensions, so that even thousands make few cells."""

Size = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^[a-z]+-[0-9]{5}(-[0-9])?\.safetensors$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Box(_Strict):
    """A part of a tensor: where it begins and how far it reaches, in every dimension."""

    start: tuple[Size, ...]
    shape: tuple[Size, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def shared(self, other: Box) -> Box | None:
        """What lies in both, None if nothing does."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start=start, shape=tuple(b - a for a, b in zip(start, stop, strict=True)))

    def slices_of(self, outer: Box) -> tuple[slice, ...]:
        """This box within the values of `outer`, which holds it."""
        begins = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - o, b - o) for a, b, o in begins)

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box(start=(0,) * len(shape), shape=shape)

    @staticmethod
    def of_stretch(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
        """The values `start` to `stop` of a flattened tensor of `shape`: boxes, in their order."""
        if start >= stop:
            return []
        if len(shape) <= 1:
            return [Box(start=(start,), shape=(stop - start,))]
        inner = shape[1:]
        row = prod(inner)
        boxes = []
        while start < stop:
            at, begin = divmod(start, row)
            if begin == 0 and start + row <= stop:
                count = (stop - start) // row
                boxes.append(Box(start=(at, *[0] * len(inner)), shape=(count, *inner)))
                start += count * row
            else:
                end = min(row, begin + stop - start)
                within = Box.of_stretch(begin, end, inner)
                boxes += [Box(start=(at, *x.start), shape=(1, *x.shape)) for x in within]
                start += end - begin
        return boxes


class Stored(Box):
    """A box and the file that holds it, under the tensor's name."""

    file: FileName


class Entry(_Strict):
    """A tensor: its type as safetensors names it, its whole shape, and its boxes."""

    dtype: str
    shape: tuple[Size, ...]
    boxes: Annotated[tuple[Stored, ...], Field(max_length=1 << 16)]

    @model_validator(mode="after")
    def _is_covered_once(self) -> Entry:
        whole = Box.whole(self.shape)
        for box in self.boxes:
            if len(box.start) != len(self.shape) or len(box.shape) != len(self.shape):
                raise ValueError(f"a box has {len(box.shape)} dimensions of {len(self.shape)}")
            if prod(box.shape) and box.shared(whole) != Box(start=box.start, shape=box.shape):
                raise ValueError(f"a box reaches outside the shape {self.shape}")
        if sum(prod(box.shape) for box in self.boxes) != prod(self.shape):
            raise ValueError(f"boxes do not add up to the shape {self.shape}")
        if _overlap([box for box in self.boxes if prod(box.shape)], len(self.shape)):
            raise ValueError("boxes overlap")
        return self


def _overlap(boxes: list[Stored], dimensions: int) -> bool:
    """By marking what each box covers on the grid that the borders of all make."""
    cuts = [
        sorted({at for box in boxes for at in (box.start[d], box.stop[d])})
        for d in range(dimensions)
    ]
    cells = [max(1, len(each) - 1) for each in cuts]
    if prod(cells) > MOST_CELLS:
        raise ValueError(f"{len(boxes)} boxes cut it into {prod(cells)} pieces")
    place = [{at: index for index, at in enumerate(each)} for each in cuts]
    covered = np.zeros(cells, dtype=np.bool_)
    for box in boxes:
        ends = zip(place, box.start, box.stop, strict=True)
        own = tuple(slice(of[a], of[b]) for of, a, b in ends)
        if covered[own].any():
            return True
        covered[own] = True
    return False


class Manifest(_Strict):
    format: Literal["longspan-checkpoint-2"] = FORMAT
    step: Size
    state: dict[str, Any]
    files: dict[FileName, Digest]
    tensors: dict[str, Entry]

    @model_validator(mode="after")
    def _names_its_files(self) -> Manifest:
        for name, entry in self.tensors.items():
            if any(box.file not in self.files for box in entry.boxes):
                raise ValueError(f"{name} lies in a file that is not listed")
        return self

    def to_text(self) -> str:
        """JSON, with the SHA-256 of itself."""
        body = self.model_dump(mode="json")
        own = hashlib.sha256(_canonical(body)).hexdigest()
        return json.dumps({**body, "sha256": own}, indent=1) + "\n"

    @staticmethod
    def of_text(text: str) -> Manifest:
        """The reverse of `to_text`; ValueError where a byte of it has changed."""
        try:
            body = json.loads(text)
        except RecursionError as error:
            raise ValueError("not a manifest") from error
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {type(body).__name__}")
        other = re.fullmatch(r"longspan-checkpoint-[0-9]+", str(body.get("format")))
        if other and body["format"] != FORMAT:
            raise UserError(f"it is of the format {other[0]}, and this version reads {FORMAT}")
        own = body.pop("sha256", None)
        manifest = Manifest.model_validate_json(json.dumps(body))
        if own != hashlib.sha256(_canonical(body)).hexdigest():
            raise ValueError("the manifest is damaged: its SHA-256 is not its own")
        if manifest.to_text() != text:
            raise ValueError("the manifest is damaged: it is not written as we write it")
        return manifest


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(path: Path) -> Manifest:
    """Of the checkpoint in the folder `path`.

    Damaged where it is not as we write it; UserError where it cannot be read now, or by us.
    """
    try:
        manifest = Manifest.of_text((path / MANIFEST).read_text(encoding="utf-8"))
        step = step_of(path)
        if step is not None and step != manifest.step:
            raise ValueError(f"it is of step {manifest.step}, not of the step in its name")
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        is_passing = isinstance(error, UserError | OSError) and not is_missing(error)
        kind = UserError if is_passing else Damaged
        raise kind(f"cannot use the checkpoint {path}: {reason}") from error
    return manifest


def is_missing(error: Exception) -> bool:
    """Whether a file is not there or no file, rather than not to be read just now."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)


def folder_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None where it is not the name of one."""
    match = re.fullmatch(r"step-([0-9]{8,})", path.name)
    is_ours = match and folder_of(path.parent, int(match[1])).name == path.name
    return int(match[1]) if match and is_ours else None


def all_in(folder: Path) -> list[Path]:
    """Checkpoints by step; a folder of another name, such as a copy put aside, is none."""
    found = ((step_of(path), path) for path in folder.glob("step-*") if path.is_dir())
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next(reversed(all_in(folder)), None)


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the `keep` newest, and those of every `keep_every`-th step if that is not 0.

    The name goes first, so that a removal cut short leaves nothing that looks whole.
    """
    for path in all_in(folder)[:-keep]:
        if keep_every and (step_of(path) or 0) % keep_every == 0:
            continue
        remove(path)


def remove(path: Path) -> None:
    if path.is_symlink():  # what it leads to is not ours
        path.unlink()
        return
    going = path.with_name(f".{path.name}.removed")
    path.rename(going)
    reach("pruning")
    shutil.rmtree(going)


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which none takes it for one."""
    number = 0
    while (target := path.with_name(f"{ASIDE}{path.name}{f'-{number}' * bool(number)}")).exists():
        number += 1
    path.rename(target)
    return target
