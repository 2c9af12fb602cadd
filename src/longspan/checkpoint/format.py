"""The checkpoint format: one folder of safetensors files and a manifest.

    checkpoints/step-00000020/
      manifest.json                  step, state, shape and shards of every tensor, and the SHA-256
                                     of every file and of the manifest itself
      manifest.hmac                  its signature, with checkpoint.key_file
      model-00000.safetensors        rank 0's shards of the model's tensors
      model-00001.safetensors        rank 1's shards
      optimizer-00000.safetensors    …

The manifest records each tensor's global shape and the region of it that each shard covers, so any
number of ranks in any layout can read what any other layout has written. A rank that holds a range
of a flattened matrix writes it as up to three rectangular shards, the second and third into
model-00000-1 and -2. The folder is written under a temporary name, fsynced and renamed: a folder
named step-… is complete. No file of a checkpoint can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longspan.checkpoint.signing import check_signature
from longspan.errors import Damaged, UserError, first_problem
from longspan.faults import fault_point
from longspan.files import open_regular, parse_json_object
from longspan.wording import shown

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints within a run's folder."""
QUARANTINE_PREFIX = "bad-"
FORMAT: Literal["longspan-checkpoint-3"] = "longspan-checkpoint-3"
MAX_CELLS = 1 << 20
"""Ranks split a tensor along one or two dimensions, so even thousands of ranks make few cells."""

MANIFEST_BYTES, MANIFEST_BYTES_PER_FILE, MAX_MANIFEST_BYTES = 4 << 20, 1 << 20, 1 << 30
"""Limits for a manifest: one of 2,000 tensors has about half a megabyte for each file."""
ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""Bytes of an element, by safetensors' names of dtypes."""

Size = Annotated[int, Field(ge=0, le=1 << 60)]
Sizes = Annotated[tuple[Size, ...], Field(max_length=12)]
TensorName = Annotated[str, Field(pattern=r"^[a-z]+/[^\x00-\x1f\x7f-\x9f]{1,500}$")]
"""A group, and any name that a parameter may have but for control characters."""
FileName = Annotated[str, Field(pattern=r"^[a-z]+-[0-9]{5}(-[0-9])?\.safetensors$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Region(_Strict):
    """A rectangular region of a tensor: its start and its extent in every dimension."""

    start: Sizes
    shape: Sizes

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def intersection(self, other: Region) -> Region | None:
        """Return the region that lies in both, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start=start, shape=tuple(b - a for a, b in zip(start, stop, strict=True)))

    def slices_within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that select this region from the values of `outer`, which holds it."""
        bounds = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(a - o, b - o) for a, b, o in bounds)

    @staticmethod
    def full(shape: tuple[int, ...]) -> Region:
        """Return the region of an entire tensor."""
        return Region(start=(0,) * len(shape), shape=shape)

    @staticmethod
    def of_flat_range(start: int, stop: int, shape: tuple[int, ...]) -> list[Region]:
        """Split the elements `start` to `stop` of a flattened tensor into regions, in order."""
        if start >= stop:
            return []
        if len(shape) <= 1:
            return [Region(start=(start,), shape=(stop - start,))]
        inner = shape[1:]
        row_size = prod(inner)
        regions = []
        while start < stop:
            row, begin = divmod(start, row_size)
            if begin == 0 and start + row_size <= stop:
                count = (stop - start) // row_size
                regions.append(Region(start=(row, *[0] * len(inner)), shape=(count, *inner)))
                start += count * row_size
            else:
                end = min(row_size, begin + stop - start)
                within = Region.of_flat_range(begin, end, inner)
                regions += [Region(start=(row, *x.start), shape=(1, *x.shape)) for x in within]
                start += end - begin
        return regions


class StoredShard(Region):
    """A region of a tensor and the file that holds it, under the tensor's name."""

    file: FileName


class TensorEntry(_Strict):
    """A tensor: its dtype as safetensors names it, its global shape and its shards."""

    dtype: str
    shape: Sizes
    shards: Annotated[tuple[StoredShard, ...], Field(max_length=1 << 16)]

    @model_validator(mode="after")
    def _shards_partition_the_shape(self) -> TensorEntry:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"the dtype {shown(self.dtype)} is unknown")
        full = Region.full(self.shape)
        for shard in self.shards:
            if len(shard.start) != len(self.shape) or len(shard.shape) != len(self.shape):
                raise ValueError(f"a shard has {len(shard.shape)} dims, expected {len(self.shape)}")
            region = Region(start=shard.start, shape=shard.shape)
            if prod(shard.shape) and shard.intersection(full) != region:
                raise ValueError(f"a shard extends beyond the shape {self.shape}")
        if sum(prod(shard.shape) for shard in self.shards) != prod(self.shape):
            raise ValueError(f"the shards do not add up to the shape {self.shape}")
        if _overlap([shard for shard in self.shards if prod(shard.shape)], len(self.shape)):
            raise ValueError("shards overlap")
        if len({shard.file for shard in self.shards}) != len(self.shards):
            raise ValueError("two shards are in the same file, which holds one of each name")
        return self


def _overlap(shards: list[StoredShard], dims: int) -> bool:
    """Mark the cells that each shard covers, on the grid that the borders of all shards form."""
    cuts = [sorted({at for s in shards for at in (s.start[d], s.stop[d])}) for d in range(dims)]
    cells = [max(1, len(each) - 1) for each in cuts]
    if prod(cells) > MAX_CELLS:
        raise ValueError(f"{len(shards)} shards divide it into {prod(cells)} cells")
    index_of = [{at: index for index, at in enumerate(each)} for each in cuts]
    covered = np.zeros(cells, dtype=np.bool_)
    for shard in shards:
        bounds = zip(index_of, shard.start, shard.stop, strict=True)
        local = tuple(slice(index[a], index[b]) for index, a, b in bounds)
        if covered[local].any():
            return True
        covered[local] = True
    return False


class Manifest(_Strict):
    format: Literal["longspan-checkpoint-3"] = FORMAT
    step: Size
    state: dict[str, Any]
    files: dict[FileName, Digest]
    tensors: dict[TensorName, TensorEntry]

    @model_validator(mode="after")
    def _lists_every_file(self) -> Manifest:
        used = set()
        for name, entry in self.tensors.items():
            group = name.partition("/")[0]
            for shard in entry.shards:
                if shard.file not in self.files:
                    raise ValueError(f"{name} has a shard in a file that is not listed")
                if shard.file.partition("-")[0] != group:  # the files of a group are checked
                    raise ValueError(f"{name} has a shard in {shard.file}, of another group")
                used.add(shard.file)
        if unused := self.files.keys() - used:
            raise ValueError(f"{min(unused)} is listed, but holds no tensor")
        return self

    def sizes_of(self, file: str) -> dict[str, int]:
        """The bytes of each tensor's shard in a file, by the tensor's name."""
        return self._sizes[file]

    @cached_property
    def _sizes(self) -> dict[str, dict[str, int]]:
        sizes: dict[str, dict[str, int]] = {file: {} for file in self.files}
        for name, entry in self.tensors.items():
            for shard in entry.shards:
                sizes[shard.file][name] = prod(shard.shape) * ITEM_SIZES[entry.dtype]
        return sizes

    def to_text(self) -> str:
        """Serialize to JSON that includes its own SHA-256."""
        body = self.model_dump(mode="json")
        sha256 = hashlib.sha256(_canonical(body)).hexdigest()
        return json.dumps({**body, "sha256": sha256}, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Reverse `to_text`; raise ValueError if a byte of the text has changed."""
        body = parse_json_object(text.encode("utf-8"))
        other = re.fullmatch(r"longspan-checkpoint-[0-9]+", str(body.get("format")))
        if other and body["format"] != FORMAT:
            raise UserError(f"its format is {other[0]}, but this version reads {FORMAT}")
        sha256 = body.pop("sha256", None)
        manifest = Manifest.model_validate_json(json.dumps(body))
        if sha256 != hashlib.sha256(_canonical(body)).hexdigest():
            raise ValueError("the manifest is damaged: its SHA-256 does not match")
        if manifest.to_text() != text:
            raise ValueError("the manifest is damaged: its text is not in canonical form")
        return manifest


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def max_manifest_bytes(files: int) -> int:
    """The bytes that the manifest of a checkpoint of so many files may have."""
    return min(MAX_MANIFEST_BYTES, MANIFEST_BYTES + files * MANIFEST_BYTES_PER_FILE)


def read_manifest(path: Path, key: bytes | None = None) -> Manifest:
    """Read the manifest of the checkpoint in the folder `path`, signed with `key` if there is one.

    Raise Damaged if it is corrupt or missing, UserError if it cannot be read for another reason: a
    transient I/O error, a format of another version, or a missing or wrong signature.
    """
    try:
        most = max_manifest_bytes(len(os.listdir(path)))
        with open_regular(path / MANIFEST, within=path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"{MANIFEST} has more than {most:,} bytes")
        # A shard has three of them in a hundred bytes or more; each takes time and memory to parse.
        if content.count(b"[") + content.count(b"{") > len(content) // 16 + 100:
            raise ValueError(f"{MANIFEST} has more than one object or list for 16 bytes")
        manifest = Manifest.from_text(content.decode("utf-8"))
        step = step_of(path)
        if step is not None and step != manifest.step:
            raise ValueError(f"it was saved at step {manifest.step}, not at the step in its name")
    except (OSError, ValueError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        is_intact = isinstance(error, UserError | OSError) and not is_missing(error)
        kind = UserError if is_intact else Damaged
        raise kind(f"cannot use the checkpoint {path}: {reason}") from error
    if key is not None:
        check_signature(path, content, key)
    return manifest


def is_missing(error: Exception) -> bool:
    """Whether an error says that a file does not exist, rather than that it cannot be read now."""
    return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None if it is not the name of a checkpoint."""
    match = re.fullmatch(r"step-([0-9]{8,})", path.name)
    is_ours = match and checkpoint_path(path.parent, int(match[1])).name == path.name
    return int(match[1]) if match and is_ours else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return checkpoints in order of step, ignoring folders with other names, such as copies."""
    found = ((step_of(path), path) for path in folder.glob("step-*") if path.is_dir())
    return [path for _, path in sorted((step, path) for step, path in found if step is not None)]


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all but the `keep` newest, and, if `keep_every` > 0, those of every such step."""
    for path in list_checkpoints(folder)[:-keep]:
        if keep_every and (step_of(path) or 0) % keep_every == 0:
            continue
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so an interrupted removal leaves no partial one."""
    if path.is_symlink():  # the target is not ours to delete
        path.unlink()
        return
    removed = path.with_name(f".{path.name}.removed")
    path.rename(removed)
    fault_point("pruning")
    shutil.rmtree(removed)


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is never loaded again."""
    number, prefixed = 0, f"{QUARANTINE_PREFIX}{path.name}"
    while (target := path.with_name(f"{prefixed}-{number}" if number else prefixed)).exists():
        number += 1
    path.rename(target)
    return target
