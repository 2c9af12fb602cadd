"""Weights to and from a folder that Hugging Face's transformers reads: a Llama.

Our decoder with dense attention is that model: RMSNorm, rotary halves, a gated SiLU MLP, grouped
key heads. With another attention the weights still have its shape, and `config.json` says under
"longspan" what they were trained with; transformers knows nothing of it and attends densely.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.checkpoint import (
    CHECKPOINTS,
    Box,
    Checkpoint,
    check_shapes,
    folder_of,
    latest,
    open_checkpoint,
)
from longspan.config import Run
from longspan.data.tokenizer import TOKENIZER
from longspan.errors import UserError
from longspan.files import new_folder
from longspan.models import new_decoder, parameter_shapes
from longspan.runfile import load_run, saved_run_file
from longspan.sketching import to_dense

FILE_BYTES = 5 << 30
"""Of one file of weights; more are split."""
INDEX = "model.safetensors.index.json"

PLACES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def their_name(name: str) -> str:
    """blocks.3.mlp.up.weight is model.layers.3.mlp.up_proj.weight."""
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.weight", name)
    assert match is not None, name
    layer, place = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{PLACES[place]}.weight"


def their_config(run: Run) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM."""
    model = run.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": run.data.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": model.rope_theta_for(run.data.context),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "float32",
    }
    if run.attention.kind != "dense":
        config["longspan"] = {"attention": run.attention.model_dump(mode="json")}
    return config


def export(run_dir: Path, out: Path, *, step: int | None = None) -> str:
    """Write a run's weights, of its newest checkpoint or that of `step`; what there is to say."""
    run = load_run(saved_run_file(run_dir), world=None)
    if run.model.sub_layer_norm:
        raise UserError("a Llama has no place for the norms of model.sub_layer_norm")
    folder = run_dir / CHECKPOINTS
    path = latest(folder) if step is None else folder_of(folder, step)
    if path is None or not path.is_dir():
        raise UserError(f"{run_dir} holds no checkpoint" + (f" of step {step}" if step else ""))
    if out.exists():
        raise UserError(f"{out} is there already: choose another folder")
    saved = open_checkpoint(path)
    saved.check(saved.files_of("model"))
    with new_folder(out) as draft:
        _write(draft, _dense_tensors(run, saved))
        (draft / "config.json").write_text(json.dumps(their_config(run), indent=1) + "\n")
        if (run_dir / TOKENIZER).exists():
            shutil.copy(run_dir / TOKENIZER, draft / TOKENIZER)
    kind = run.attention.kind
    warning = f"; transformers will attend densely, the run is {kind}" if kind != "dense" else ""
    if run.model.linear != "dense":
        warning += f"; its {run.model.linear} layers became the dense ones that compute the same"
    return f"step {saved.step} of {run_dir} to {out}{warning}"


def _dense_tensors(run: Run, saved: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's weights by name, those of factored layers multiplied out."""
    if run.model.linear == "dense":
        yield from ((name, saved.read(f"model/{name}")) for name in saved.shapes("model"))
        return
    check_shapes(parameter_shapes(run), saved)
    model = new_decoder(run).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.read(f"model/{name}"))
    to_dense(model)
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def _write(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """In files of at most FILE_BYTES, with an index where they are several."""
    parts: list[dict[str, Tensor]] = [{}]
    where: dict[str, int] = {}
    size = total = 0
    for name, x in tensors:
        if size and size + x.nbytes > FILE_BYTES:
            _write_part(folder, len(parts), parts[-1])
            parts[-1].clear()
            parts.append({})
            size = 0
        parts[-1][their_name(name)] = x
        where[their_name(name)] = len(parts)
        size, total = size + x.nbytes, total + x.nbytes
    _write_part(folder, len(parts), parts[-1])
    names = {n: f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)}
    if len(parts) == 1:
        names = {1: "model.safetensors"}
    for n, name in names.items():
        (folder / f"part-{n}").rename(folder / name)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {k: names[n] for k, n in where.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / f"part-{number}", metadata={"format": "pt"})


def reader_of(folder: Path, run: Run) -> Callable[[str, Box], Tensor]:
    """What reads the weights of a Hugging Face Llama, by our names."""
    files = _files(folder)
    shapes = parameter_shapes(run)
    opened: dict[Path, Any] = {}

    def read(name: str, box: Box) -> Tensor:
        theirs = their_name(name)
        file = files.get(theirs, files.get(""))
        if file is None:
            raise UserError(f"{folder} names no file for {theirs}")
        try:
            if file not in opened:
                opened[file] = safe_open(file, "pt")
            held = opened[file].get_slice(theirs)
            found = tuple(held.get_shape())
            if found != shapes[name]:
                raise ValueError(f"{theirs} has the shape {found}, the run's {shapes[name]}")
            values: Tensor = held[box.slices_of(Box.whole(found))]
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"cannot begin with {folder}: {error}") from error
        return values

    return read


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, or under "" the one of all."""
    if not (folder / INDEX).exists():
        return {"": folder / "model.safetensors"}
    try:
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        if not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names.values()):
            raise ValueError("it names files outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot use {folder / INDEX}: {error}") from error
    return {tensor: folder / name for tensor, name in names.items()}
