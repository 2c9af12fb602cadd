"""The built-in runs, which follow the layout and the steps that a command asks for.

A built-in run is there to be tried: `longspan verify layout.shard=2` has no run file in which to
raise the batch. A user's own run file is never changed; what does not fit in it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from importlib import resources
from typing import Any

from pydantic import ValidationError

from longspan.checks import layout_problems
from longspan.config import Run, default_ffn
from longspan.toml import tomllib
from longspan.vocabulary import is_folder


def read_builtin(name: str) -> dict[str, Any]:
    """Return the tables of a built-in run."""
    file = resources.files("longspan") / "runs" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def follow(tables: Mapping[str, Any], given: Collection[str], world: int | None) -> dict[str, Any]:
    """Return `tables` of a built-in run with what its steps and layout on `world` processes need.

    Keys in `given` (section.key) are the user's and stay; so does a model whose preset or weights
    were given.
    """
    followed, run = deepcopy(dict(tables)), _valid_part(tables)
    values = {"train.warmup_steps": min(run.train.warmup_steps, run.train.steps)}
    world = run.layout.min_world_size if world is None else world
    if not layout_problems(run.layout.ranks(), world):
        values |= _fit(run, given, run.layout.resolve(world))
    if run.model.factory:
        values = {path: value for path, value in values.items() if path.startswith("train.")}
    if "train.global_batch_tokens" in given:
        values.pop("train.global_batch", None)
    keeps_model = "model.preset" in given or run.model.folder or run.train.init_from
    for path, value in values.items():
        section, key = path.split(".")
        is_fixed = path in given or (section == "model" and keeps_model)
        is_table = isinstance(followed.setdefault(section, {}), dict)
        if is_table and not is_fixed and value != getattr(getattr(run, section), key):
            followed[section][key] = value
    return followed


def _fit(run: Run, given: Collection[str], ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the nearest larger values with which `run` fits these ranks per axis."""
    layout, model, train = run.layout, run.model, run.train
    tensor, depth, sequence = ranks["tensor"], ranks["pipeline"], ranks["sequence"]
    tokens = sequence * (tensor if layout.megatron_sequence_parallel else 1)
    per_pass = train.micro_batch * ranks["replicate"] * ranks["shard"]
    values = {
        "train.global_batch": _round_up(train.global_batch, per_pass * depth),
        "data.context": _round_up(run.data.context, tokens),
        "model.layers": max(model.layers, depth * layout.stages_per_rank if depth > 1 else 1),
    }
    if not any(map(is_folder, run.data.sources)):  # whose tokenizer decides the vocabulary
        values["model.vocab"] = _round_up(model.vocab, tensor)
    if tensor > 1:
        heads = model.heads if "model.heads" in given else _round_up(model.heads, tensor)
        hidden = model.hidden if "model.hidden" in given else heads * model.head_dim
        ffn = _round_up(default_ffn(hidden), math.lcm(tensor, 128))
        values |= {"model.heads": heads, "model.hidden": hidden, "model.ffn": ffn}
    if depth > 1 and layout.schedule == "zbv" and ranks["shard"] * sequence > 1:
        values["layout.zero"] = min(layout.zero, 2)
    return values


def _round_up(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def _valid_part(tables: Mapping[str, Any]) -> Run:
    """Return the run with the defaults of each section that is not valid, and is reported later."""
    sections = {}
    for name, field in Run.model_fields.items():
        try:
            sections[name] = type(field.default).model_validate(tables.get(name, {}))
        except ValidationError:
            sections[name] = field.default
    return Run(**sections)
