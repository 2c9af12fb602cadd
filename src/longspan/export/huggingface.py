"""Export to and import from Hugging Face folders: weights, configuration and tokenizer.

The decoder with dense attention is a model of the family `model.family`. With another attention
pattern the weights have the same shapes. `config.json` records the pattern under "longspan", and
names the attention that `longspan.hf` registers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from longspan.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    Region,
    check_shapes,
    checkpoint_path,
    latest,
    open_checkpoint,
    read_key,
    save_file,
)
from longspan.config import Run
from longspan.costs import is_adapter
from longspan.data.tokenizer import MAX_BYTES
from longspan.errors import UserError
from longspan.export.config_json import hf_config, hf_name, needs_longspan
from longspan.export.side_files import (
    GENERATION_CONFIG,
    SIDE_FOLDER,
    TOKENIZER_FILES,
    is_tokenizer_of,
    special_ids_of,
    tokenizer_problems,
)
from longspan.export.tokenizer import special_ids, tokenizer_of, write_tokenizer
from longspan.files import atomic_folder, open_safetensors, read_bounded, read_json_object
from longspan.hf_config import CONFIG, cache_root, read_folder_config
from longspan.models import new_decoder, parameter_shapes, stored_shapes
from longspan.runfile import load_run, saved_run_file
from longspan.sketching import to_dense
from longspan.wording import shown

MAX_SHARD_BYTES = 5 << 30
"""Larger models are split into several safetensors files."""
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 16 << 20
"""Size limit of an index; that of 90,000 tensors has nine megabytes."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""What weights may be stored in, by safetensors' names."""
COMPARED_ROWS = 4096
"""Rows of a head and an embedding that are compared at a time."""
MAX_PROBLEMS = 20
"""Problems of a folder of weights that are listed."""


@dataclass(frozen=True)
class Exported:
    """What was exported, and how it differs from the run."""

    run_dir: str
    step: int
    out: str
    notes: list[str]

    def __str__(self) -> str:
        text = f"exported step {self.step} of {self.run_dir} to {self.out}"
        return "; ".join([text, *self.notes])


EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    key_file: str = "",
    ema: bool = False,
) -> Exported:
    """Export the newest checkpoint of a run, or that of `step`, in a dtype of EXPORT_DTYPES.

    With `ema` the weights are the averages of `train.ema`.
    It must be signed with the key in `key_file`, or else in the run's. A run that started from a
    folder of Hugging Face, on data of its tokenizer, gives back that folder's tokenizer files and
    generation settings.
    """
    run = load_run(saved_run_file(run_dir), world=None)
    for key in ("sub_layer_norm", "learnable_sinks"):
        if getattr(run.model, key):
            raise UserError(
                f"model.{key} = true cannot be exported: transformers has no such model of the "
                f'family "{run.model.family}"'
            )
    folder = run_dir / CHECKPOINTS
    path = latest(folder) if step is None else checkpoint_path(folder, step)
    if path is None or not path.is_dir():
        raise UserError(f"{run_dir} has no checkpoint" + (f" of step {step}" if step else ""))
    if out.exists():
        raise UserError(f"{out} already exists: choose another folder")
    saved = open_checkpoint(path, read_key(key_file or run.checkpoint.key_file))
    if ema:
        saved.read_averages()
    saved.check(saved.files_of("model"))
    tokenizer, side = tokenizer_of(run_dir, run), run_dir / SIDE_FOLDER
    has_side = is_tokenizer_of(side, tokenizer)
    ids = special_ids_of(side) if has_side else special_ids(tokenizer)
    as_torch = EXPORT_DTYPES[dtype]
    try:
        with atomic_folder(out) as draft:
            _write_shards(draft, _dense_tensors(run, saved), as_torch)
            start = read_folder_config(side) if (side / CONFIG).exists() else None
            config = hf_config(run, ids, str(as_torch).removeprefix("torch."), start)
            for name, content in ((CONFIG, config), (GENERATION_CONFIG, ids)):
                (draft / name).write_text(json.dumps(content, indent=1) + "\n")
            if has_side:
                for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
                    if (side / name).exists():
                        kept = read_bounded(side / name, MAX_BYTES, within=side)
                        (draft / name).write_bytes(kept)
            elif tokenizer:
                write_tokenizer(draft, tokenizer, run.data.context)
    except OSError as error:
        raise UserError(f"cannot export to {out}: {error.strerror or error}") from error
    kind, notes = " and ".join(run.attention.kinds), []
    if needs_longspan(run):
        notes.append(f"for its {kind} attention, import longspan.hf before transformers loads it")
    if run.model.linear != "dense":
        notes.append(f"{run.model.linear} layers were exported as the equivalent dense layers")
    if ema:
        notes.append("the weights are averages (train.ema)")
    if run.model.lora.rank:
        notes.append("LoRA's updates were merged into the weights")
    if tokenizer is None:
        notes.append("there is no tokenizer, as the run's data has none")
    elif tokenizer.eos is None:
        notes.append(
            "the tokenizer has no end-of-document token, so generation does not stop at one"
        )
    if not has_side and (side / TOKENIZER_FILES[0]).exists():
        notes.append("its tokenizer is that of the data, not that of the folder it started from")
    return Exported(str(run_dir), saved.step, str(out), notes)


def _dense_tensors(run: Run, saved: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint by name; factored layers are multiplied out."""
    model = new_decoder(run)
    check_shapes(stored_shapes(model), saved)
    if run.model.lora.rank:
        from longspan.export.lora import merged  # which imports this module

        yield from merged(run, saved)
        return
    if run.model.linear == "dense":
        yield from ((name, saved.read(f"model/{name}")) for name in saved.shapes("model"))
        return
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.read(f"model/{name}"))
    to_dense(model)
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write safetensors files of at most MAX_SHARD_BYTES, with an index if there are several."""
    shard: dict[str, Tensor] = {}
    shard_of: dict[str, int] = {}
    count, size, total = 1, 0, 0
    for name, full in tensors:
        x = full.to(dtype)
        if not x.isfinite().all():
            raise UserError(
                f"{hf_name(name)} has values that {dtype} cannot hold: use --dtype bf16"
            )
        if size and size + x.nbytes > MAX_SHARD_BYTES:
            _write_shard(folder, count, shard)
            shard, size, count = {}, 0, count + 1
        shard[hf_name(name)] = x
        shard_of[hf_name(name)] = count
        size, total = size + x.nbytes, total + x.nbytes
    _write_shard(folder, count, shard)
    names = {n: f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    if count == 1:
        names = {1: "model.safetensors"}
    for n, name in names.items():
        (folder / f"shard-{n}").rename(folder / name)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: names[n] for key, n in shard_of.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / f"shard-{number}", metadata={"format": "pt"})


def weight_reader(folder: Path, run: Run) -> Callable[[str, Region], Tensor]:
    """A function that reads regions of the weights in a Hugging Face folder, by our names.

    It is checked first that the folder holds exactly the run's model: config.json, and the name,
    shape and dtype of every tensor.
    """
    config = read_folder_config(folder)
    problems = [f"{key} = {text}" for key, text in config.disagreements(run.model).items()]
    files: dict[str, Any] = {}
    if not problems:  # otherwise every shape differs
        files = _open_tensors(folder)
        problems = _tensor_problems(files, run) + tokenizer_problems(folder, run.model.vocab)
    if problems:
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        lines = [f"  {line}" for line in [*problems[:MAX_PROBLEMS], *more]]
        raise UserError("\n".join([f"cannot initialise from {folder}:", *lines]))

    def read(name: str, region: Region) -> Tensor:
        key = hf_name(name)
        try:
            stored = files[key].get_slice(key)
            values: Tensor = stored[region.slices_within(Region.full(tuple(stored.get_shape())))]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {key} in {folder}: {error}") from error
        if not values.isfinite().all():
            raise UserError(f"{key} in {folder} has NaN or infinite values: use other weights")
        return values

    return read


def _open_tensors(folder: Path) -> dict[str, Any]:
    """The open safetensors file that holds each tensor, by the tensor's name."""
    index = _weight_map(folder)
    files: dict[str, Any] = {}
    for name in sorted(set(index.values())) if index else ["model.safetensors"]:
        try:
            file = open_safetensors(folder / name, within=cache_root(folder))
        except (OSError, UserError) as error:
            raise UserError(f"cannot initialise from {folder / name}: {error}") from error
        for key in file.keys():  # noqa: SIM118
            if key in files or index.get(key, name) != name:
                raise UserError(
                    f"cannot initialise from {folder / name}: it holds {shown(key)}, which "
                    + ("another file holds too" if key in files else f"{INDEX} says another does")
                )
            files[key] = file
    if missing := index.keys() - files.keys():
        raise UserError(
            f"cannot initialise from {folder}: {INDEX} lists {shown(min(missing))}, but "
            f"{shown(index[min(missing)])} does not hold it"
        )
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index; empty if there is none, and so a single file."""
    path = folder / INDEX
    if not os.path.lexists(path):
        return {}
    index = read_json_object(path, MAX_INDEX_BYTES, within=cache_root(folder))
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"cannot use {path}: it has no table weight_map")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise UserError(
                f"cannot use {path}: it refers to {shown(name)}, but only safetensors files of "
                "this folder are read"
            )
    return names


def _tensor_problems(files: dict[str, Any], run: Run) -> list[str]:
    """What differs between the tensors in `files` and the run's model."""
    shapes = parameter_shapes(new_decoder(run))
    expected = {hf_name(n): shape for n, shape in shapes.items() if not is_adapter(n)}
    problems = [f"{name} is missing" for name in expected if name not in files]
    for name, file in files.items():
        stored = file.get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if name not in expected:
            if not _is_redundant(name, files, run):
                problems.append(f"{shown(name)} is not a tensor of this model: remove it")
        elif shape != expected[name]:
            problems.append(f"{name}: expected shape {expected[name]}, got {shape}")
        elif dtype not in DTYPES:
            problems.append(f"{name}: expected dtype {', '.join(DTYPES)}, got {dtype}")
    return problems


def _is_redundant(name: str, files: dict[str, Any], run: Run) -> bool:
    """Whether a tensor only repeats what the model has: RoPE's table, or a tied head."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    head, embedding = hf_name("head.weight"), hf_name("embedding.weight")
    if name != head or not run.model.tie_embeddings or embedding not in files:
        return False
    both = [files[key].get_slice(key) for key in (head, embedding)]
    if len({tuple(stored.get_shape()) for stored in both}) > 1:
        return False
    starts = range(0, run.model.vocab, COMPARED_ROWS)
    return all(torch.equal(*(x[start : start + COMPARED_ROWS] for x in both)) for start in starts)
