"""The frozen weights of a LoRA run, and its updates merged into them.

A checkpoint holds the updates alone. The weights that they are added to are read again: from the
folder `train.init_from`, or without one from `train.seed`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.checkpoint import Checkpoint, Region
from longspan.config import Run
from longspan.costs import is_adapter
from longspan.errors import UserError
from longspan.export.huggingface import weight_reader
from longspan.files import open_regular
from longspan.hf_config import cache_root
from longspan.models import new_decoder, parameter_shapes
from longspan.models.initial import initial_weight

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""What a fingerprint reads of each file of weights."""


def base_reader(run: Run) -> Callable[[str, Region], Tensor]:
    """A function that reads regions of a LoRA run's weights as they are before its first step."""
    folder = run.train.init_from
    read = weight_reader(Path(folder), run) if folder else None
    shapes = parameter_shapes(new_decoder(run))

    def base(name: str, region: Region) -> Tensor:
        if read is not None and not is_adapter(name):
            return read(name, region)
        shape = shapes[name]
        full = initial_weight(run.model, run.train.seed, name, torch.Size(shape))
        return full[region.slices_within(Region.full(shape))]

    return base


def base_key(run: Run) -> dict[str, str]:
    """What identifies the weights that LoRA freezes, of a folder, which a checkpoint lacks."""
    if not run.model.lora.rank or not run.train.init_from:
        return {}
    return {"train.init_from": f"weights {fingerprint(Path(run.train.init_from))}"}


def check_base(run: Run, saved: Checkpoint) -> None:
    """Raise UserError if the frozen weights are not those that a checkpoint was trained on."""
    key = saved.state.get("resume_key")
    key = key if isinstance(key, dict) else {}
    now: dict[str, Any] = base_key(run) or {"train.seed": run.train.seed}
    for name, value in now.items():
        if key.get(name) != value:
            given = json.dumps(getattr(run.train, name.removeprefix("train.")))
            raise UserError(
                f"{saved.path} was trained on other weights than {name} = {given} gives, so that "
                "its LoRA updates do not fit them: restore those weights or that value"
            )


def merged(run: Run, saved: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model, in float32: W + alpha / rank · B A where there is an A."""
    check_base(run, saved)
    base, shapes = base_reader(run), parameter_shapes(new_decoder(run))
    scale = run.model.lora.alpha / max(1, run.model.lora.rank)
    for name, shape in shapes.items():
        if is_adapter(name):
            continue
        weight, layer = base(name, Region.full(shape)).float(), name.removesuffix(".weight")
        if f"{layer}.lora_a" in shapes:
            a, b = (saved.read(f"model/{layer}.lora_{x}").float() for x in "ab")
            weight = weight + scale * (b @ a)
        yield name, weight


def fingerprint(folder: Path) -> str:
    """A SHA-256 of the names and sizes of a folder's weight files, and of samples of each.

    Training changes every tensor, so that samples tell other weights; reading all of them at every
    start would take minutes.
    """
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no weights, which LoRA adds its updates to: restore them")
    for path in paths:
        try:
            with open_regular(path, within=cache_root(folder)) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\n".encode())
                for i in range(SAMPLES):
                    file.seek(i * size // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
