"""Reading a checkpoint: full tensors, or the regions that a rank needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from longspan.checkpoint.format import Manifest, Region, is_missing, read_manifest
from longspan.errors import Damaged, UserError
from longspan.files import sha256_of

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint:
    """A checkpoint whose manifest is valid. Call `check` before reading tensors."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._open_files: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """State other than tensors: data position, gradient scaler."""
        return self.manifest.state

    @cached_property
    def files(self) -> list[str]:
        return sorted(self.manifest.files)

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of a group's tensors, by name without the group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): entry.shape
            for name, entry in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def files_of(self, group: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{group}-")]

    def check(self, files: Iterable[str] | None = None) -> None:
        """Compare the SHA-256 of these files, or of all, with the manifest.

        Raise Damaged if one differs or is missing, UserError if one cannot be read, which may be
        transient.
        """
        for name in self.files if files is None else files:
            try:
                if sha256_of(self.path / name) != self.manifest.files[name]:
                    raise ValueError(f"{name} is damaged: its SHA-256 is not the manifest's")
            except (OSError, ValueError) as error:
                is_transient = isinstance(error, OSError) and not is_missing(error)
                kind = UserError if is_transient else Damaged
                raise kind(f"cannot use the checkpoint {self.path}: {error}") from error

    def close(self) -> None:
        """Close the files, so that removing the checkpoint frees their space."""
        self._open_files.clear()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return `region` of the tensor "group/name", or the full tensor, from all its shards."""
        entry = self.manifest.tensors[name]
        full = Region.full(entry.shape)
        region = region or full
        is_inside = region.intersection(full) == region
        assert not prod(region.shape) or is_inside or not entry.shape, (region, entry)
        out = None
        for shard in entry.shards:
            overlap = shard.intersection(region)
            if overlap is None and entry.shape:
                continue
            values = self._read_shard(shard.file, name, shard, overlap or shard)
            if out is None:
                out = values.new_empty(region.shape)
            out[(overlap or region).slices_within(region)] = values
        if out is None:  # an empty region: a rank that holds nothing of this tensor
            import torch  # late: `longspan checkpoint` reads no tensor

            return torch.empty(region.shape)
        return out

    def _read_shard(self, file: str, name: str, shard: Region, wanted: Region) -> Tensor:
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(self.path / file, "pt")
            opened = self._open_files[file]
            stored = opened.get_slice(name)
            dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
            expected = self.manifest.tensors[name].dtype, shard.shape
            if (dtype, shape) != expected:
                raise ValueError(
                    f"{name} is {dtype} of shape {shape}, but the manifest says {expected[0]} of "
                    f"shape {expected[1]}"
                )
            values: Tensor = (
                stored[wanted.slices_within(shard)] if shard.shape else opened.get_tensor(name)
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"cannot use the checkpoint {self.path}: {file}: {error}") from error
        return values


def open_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, read_manifest(path))


def load(path: Path, group: str) -> dict[str, Tensor]:
    """Load a group's full tensors by name, after checking its files."""
    saved = open_checkpoint(path)
    saved.check(saved.files_of(group))
    return {name: saved.read(f"{group}/{name}") for name in saved.shapes(group)}


def check_shapes(shapes: Mapping[str, tuple[int, ...]], saved: Checkpoint) -> None:
    """Raise UserError unless the checkpoint's weights have the names and shapes in `shapes`."""
    found = saved.shapes("model")
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise UserError(
                f"the model and the checkpoint {saved.path} differ at {name}: the model has shape "
                f"{shapes.get(name)}, the checkpoint {found.get(name)}; resume with the [model] it "
                "was trained with"
            )
