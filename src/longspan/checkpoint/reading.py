"""Reading a checkpoint: full tensors, or the regions that a rank needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from longspan.checkpoint.format import Manifest, Region, is_missing, read_manifest
from longspan.errors import Damaged, UserError
from longspan.files import MAX_HEADER_BYTES, open_regular, open_safetensors, sha256_of

if TYPE_CHECKING:
    from torch import Tensor


FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights and moments, by safetensors' names."""


class Checkpoint:
    """A checkpoint whose manifest is valid. Call `check` before reading tensors."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._reads_averages = False
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

    @property
    def groups(self) -> set[str]:
        return {name.partition("/")[0] for name in self.manifest.tensors}

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of a group's tensors, by name without the group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): entry.shape
            for name, entry in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def dtype(self, name: str) -> str:
        """The dtype of the tensor "group/name", as safetensors names it."""
        return self.manifest.tensors[name].dtype

    def files_of(self, group: str) -> list[str]:
        groups = ("model-", "ema-") if group == "model" and self._reads_averages else f"{group}-"
        return [name for name in self.files if name.startswith(groups)]

    def read_averages(self) -> None:
        """Read the averages of weights in the place of those weights that have one."""
        if "ema" not in self.groups:
            raise UserError(f"{self.path} has no averages of weights: set train.ema in training")
        self._reads_averages = True

    def check(self, files: Iterable[str] | None = None) -> None:
        """Compare the SHA-256 of these files, or of all, with the manifest.

        Raise Damaged if one differs or is missing, UserError if one cannot be read, which may be
        transient.
        """
        for name in self.files if files is None else files:
            try:
                self._check_size(name)
                if sha256_of(self.path / name, within=self.path) != self.manifest.files[name]:
                    raise ValueError(f"{name} is damaged: its SHA-256 is not the manifest's")
            except (OSError, ValueError) as error:
                is_transient = isinstance(error, OSError) and not is_missing(error)
                kind = UserError if is_transient else Damaged
                raise kind(f"cannot use the checkpoint {self.path}: {error}") from error

    def _check_size(self, name: str) -> None:
        """Refuse a file that is not as long as its tensors, rather than hash what never ends."""
        with open_regular(self.path / name, within=self.path) as file:
            header = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
        expected = 8 + header + sum(self.manifest.sizes_of(name).values())
        if header > MAX_HEADER_BYTES or size != expected:
            raise ValueError(f"{name} is damaged: it has {size:,} bytes, not as the manifest says")

    def close(self) -> None:
        """Close the files, so that removing the checkpoint frees their space."""
        self._open_files.clear()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return `region` of the tensor "group/name", or the full tensor, from all its shards."""
        group, _, stem = name.partition("/")
        if self._reads_averages and group == "model" and f"ema/{stem}" in self.manifest.tensors:
            name = f"ema/{stem}"
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
                opened = open_safetensors(self.path / file, within=self.path)
                if set(opened.keys()) != self.manifest.sizes_of(file).keys():
                    raise ValueError("its tensors are not those of the manifest")
                self._open_files[file] = opened
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


def open_checkpoint(path: Path, key: bytes | None = None) -> Checkpoint:
    """Open a checkpoint, which must be signed with `key` if there is one."""
    return Checkpoint(path, read_manifest(path, key))


def load(path: Path, group: str) -> dict[str, Tensor]:
    """Load a group's full tensors by name, after checking its files."""
    saved = open_checkpoint(path)
    saved.check(saved.files_of(group))
    return {name: saved.read(f"{group}/{name}") for name in saved.shapes(group)}


def check_shapes(shapes: Mapping[str, tuple[int, ...]], saved: Checkpoint) -> None:
    """Raise UserError unless the checkpoint's weights have the names and shapes in `shapes`."""
    found = saved.shapes("model")
    for name in sorted(shapes.keys() | found.keys()):
        dtype = saved.dtype(f"model/{name}") if name in found else ""
        if dtype and dtype not in FLOATS:
            raise UserError(f"{name} is {dtype} in the checkpoint {saved.path}, not floating point")
        if shapes.get(name) != found.get(name):
            raise UserError(
                f"the model and the checkpoint {saved.path} differ at {name}: the model has shape "
                f"{shapes.get(name)}, the checkpoint {found.get(name)}; resume with the [model] it "
                "was trained with"
            )
