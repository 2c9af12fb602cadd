"""Writing a checkpoint: every rank writes its shards, then one rank writes the manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from longspan.checkpoint.format import (
    MANIFEST,
    Manifest,
    Region,
    StoredShard,
    TensorEntry,
    checkpoint_path,
    max_manifest_bytes,
)
from longspan.checkpoint.signing import SIGNATURE, sign
from longspan.faults import fault_point
from longspan.files import fsync, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

REPLACED = ".replaced"


@dataclass(frozen=True)
class TensorShard:
    """A rank's shard of a tensor: the values of `region`, within the global `shape`."""

    values: Tensor
    shape: tuple[int, ...]
    region: Region

    @staticmethod
    def full(x: Tensor) -> TensorShard:
        """Return a shard that is the entire tensor."""
        shape = tuple(x.shape)
        return TensorShard(x, shape, Region.full(shape))


TensorShards = Mapping[str, TensorShard]
"""Shards by "group/name". Further shards of the same tensor, for a rank whose elements form more
than one region, are named "group/name#1", "group/name#2" …; each number has a file of its own."""


class PendingCheckpoint:
    """The checkpoint of a step while it is written, in a folder with a temporary name.

    Every rank calls `write`. Then one rank calls `commit`, or `discard` to give up. Ranks exchange
    data through the file system alone, not through collectives.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.path = folder / f".{checkpoint_path(folder, step).name}.tmp"

    def write(self, shards: TensorShards, rank: int) -> None:
        """Write the files of one rank, and a list of their contents."""
        self.folder.mkdir(exist_ok=True)  # without its parents: a run folder that was removed
        self.path.mkdir(exist_ok=True)
        files: dict[str, str] = {}
        tensors: list[tuple[str, dict[str, Any]]] = []
        for (group, suffix), of_file in _by_file(shards).items():
            path = self.path / f"{group}-{rank:05d}{suffix}.safetensors"
            values = {name: shard.values.contiguous() for name, shard in of_file.items()}
            fault_point("writing")
            save_file(values, path)
            fsync(path)
            files[path.name] = sha256_of(path)
            dtypes = _dtypes(path)
            for name, shard in of_file.items():
                stored = {**shard.region.model_dump(mode="json"), "file": path.name}
                entry = {"dtype": dtypes[name], "shape": shard.shape, "shard": stored}
                tensors.append((name, entry))
        contents = self.path / f"rank-{rank:05d}.json"
        contents.write_text(json.dumps({"files": files, "tensors": tensors}), encoding="utf-8")

    def commit(self, state: dict[str, Any], ranks: int, key: bytes | None = None) -> Path:
        """Write the manifest and rename the folder, once all `ranks` have written.

        With `key` the manifest is signed.
        """
        paths = [self.path / f"rank-{rank:05d}.json" for rank in range(ranks)]
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        manifest = Manifest(
            step=self.step,
            state=state,
            files={name: sha for of_rank in contents for name, sha in of_rank["files"].items()},
            tensors=_entries(of_rank["tensors"] for of_rank in contents),
        )
        for path in paths:
            path.unlink()
        content = manifest.to_text().encode("utf-8")
        if len(content) > max_manifest_bytes(len(manifest.files)):
            raise ValueError(f"the manifest would have {len(content):,} bytes: use fewer ranks")
        written = {MANIFEST: content}
        if key is not None:
            written[SIGNATURE] = sign(key, content).encode()
        for name, data in written.items():
            (self.path / name).write_bytes(data)
            fsync(self.path / name)
        fsync(self.path)
        fault_point("commit")
        target = checkpoint_path(self.folder, self.step)
        replaced = self.folder / f".{target.name}{REPLACED}"
        if target.exists():
            target.rename(replaced)
        self.path.rename(target)
        fsync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def save(
    folder: Path,
    step: int,
    shards: TensorShards,
    state: dict[str, Any],
    key: bytes | None = None,
) -> Path:
    """Save a checkpoint from a single process, synchronously."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    pending = PendingCheckpoint(folder, step)
    try:
        pending.write(shards, 0)
        return pending.commit(state, 1, key)
    except BaseException:
        pending.discard()
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what a process left behind that was killed while it saved or removed a checkpoint.

    A checkpoint that was about to be replaced gets its name back if its replacement has none yet.
    """
    for replaced in folder.glob(f".step-*{REPLACED}"):
        target = folder / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)
    for pattern in (".step-*.tmp", ".step-*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _by_file(shards: TensorShards) -> dict[tuple[str, str], dict[str, TensorShard]]:
    """Group shards by the file they belong to: (group, suffix of the file name)."""
    files: dict[tuple[str, str], dict[str, TensorShard]] = {}
    for key, shard in shards.items():
        name, _, number = key.partition("#")
        file = name.split("/")[0], number and f"-{number}"
        files.setdefault(file, {})[name] = shard
    return files


def save_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any other new file, by the umask.

    safetensors renames a temporary file of mode 0600 to `path`, and raises an error of its own.
    """
    import safetensors.torch  # late: it imports torch, and `longspan checkpoint` writes no tensor

    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if path.stat().st_mode != mode:
        path.chmod(mode)


def _dtypes(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def _entries(ranks: Iterable[Iterable[tuple[str, Any]]]) -> dict[str, TensorEntry]:
    """Merge what every rank has written into one entry per tensor."""
    shards: dict[str, list[StoredShard]] = {}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensors in ranks:
        for name, entry in tensors:
            known[name] = entry["dtype"], tuple(entry["shape"])
            shard = entry["shard"]
            start, shape = tuple(shard["start"]), tuple(shard["shape"])
            stored = StoredShard(start=start, shape=shape, file=shard["file"])
            shards.setdefault(name, []).append(stored)
    return {
        name: TensorEntry(dtype=dtype, shape=shape, shards=tuple(shards[name]))
        for name, (dtype, shape) in known.items()
    }
