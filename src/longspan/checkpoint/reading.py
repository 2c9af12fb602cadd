"""Reading a checkpoint: whole tensors, or the box that a rank is to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longspan.checkpoint.format import Box, Manifest, is_missing, read_manifest
from longspan.errors import Damaged, UserError
from longspan.files import sha256_of


class Checkpoint:
    """A checkpoint whose manifest has been read. Files are checked by `check`, before any use."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._opened: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """What is not a tensor: data position, scaler."""
        return self.manifest.state

    @cached_property
    def files(self) -> list[str]:
        return sorted(self.manifest.files)

    def shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        """Whole shapes of a group's tensors, by name without the group."""
        prefix = f"{group}/"
        return {
            name.removeprefix(prefix): entry.shape
            for name, entry in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def files_of(self, group: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{group}-")]

    def check(self, files: Iterable[str] | None = None) -> None:
        """Damaged unless these files, or all, are as they were written.

        UserError where one cannot be read, which may pass.
        """
        for name in self.files if files is None else files:
            try:
                if sha256_of(self.path / name) != self.manifest.files[name]:
                    raise ValueError(f"{name} is damaged: its SHA-256 is not the manifest's")
            except (OSError, ValueError) as error:
                passes = isinstance(error, OSError) and not is_missing(error)
                kind = UserError if passes else Damaged
                raise kind(f"cannot use the checkpoint {self.path}: {error}") from error

    def close(self) -> None:
        """Let go of its files, so that their space is free once it is removed."""
        self._opened.clear()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The values of a "group/name" in `box`, or all of them."""
        entry = self.manifest.tensors[name]
        whole = Box.whole(entry.shape)
        box = box or whole
        assert not prod(box.shape) or box.shared(whole) == box or not entry.shape, (box, entry)
        found = None
        for stored in entry.boxes:
            shared = stored.shared(box)
            if shared is None and entry.shape:
                continue
            values = self._values(stored.file, name, stored, shared or stored)
            if found is None:
                found = values.new_empty(box.shape)
            found[(shared or box).slices_of(box)] = values
        if found is None:  # a rank that holds nothing of it
            return torch.empty(box.shape)
        return found

    def _values(self, file: str, name: str, stored: Box, wanted: Box) -> Tensor:
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self.path / file, "pt")
            opened = self._opened[file]
            held = opened.get_slice(name)
            dtype, shape = held.get_dtype(), tuple(held.get_shape())
            if (dtype, shape) != (self.manifest.tensors[name].dtype, stored.shape):
                raise ValueError(f"{name} is {dtype} of shape {shape}, not as the manifest says")
            values: Tensor = (
                held[wanted.slices_of(stored)] if stored.shape else opened.get_tensor(name)
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"cannot use the checkpoint {self.path}: {file}: {error}") from error
        return values


def open_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(path, read_manifest(path))


def load(path: Path, group: str) -> dict[str, Tensor]:
    """A group's whole tensors by name, every file of it checked."""
    saved = open_checkpoint(path)
    saved.check(saved.files_of(group))
    return {name: saved.read(f"{group}/{name}") for name in saved.shapes(group)}


def check_shapes(shapes: Mapping[str, tuple[int, ...]], saved: Checkpoint) -> None:
    """Refuse a checkpoint whose weights are not those of `shapes`, by parameter name."""
    found = saved.shapes("model")
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise UserError(
                f"the run's model and {saved.path} differ at {name}: the run has "
                f"{shapes.get(name)}, the checkpoint {found.get(name)}; resume with the [model] it "
                "was trained with"
            )
