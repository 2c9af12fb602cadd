"""Fills a run from the Hugging Face folder that `model.from` or `train.init_from` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longspan import presets
from longspan.config import Data
from longspan.errors import UserError
from longspan.hf_config import EQUAL, KEYS, FolderConfig, read_folder_config
from longspan.hf_rope import extend
from longspan.rules import Problem


def folder_key(tables: Mapping[str, Any]) -> str:
    """The key that names the folder which decides the model; empty if there is none."""
    for section, key in (("model", "from"), ("train", "init_from")):
        table = tables.get(section, {})
        if isinstance(table, Mapping) and isinstance(table.get(key), str) and table[key]:
            return f"{section}.{key}"
    return ""


def fill_from_folder(
    tables: dict[str, Any],
) -> tuple[dict[str, Any], FolderConfig | None, list[Problem]]:
    """Give [model] and [attention] what they do not set of a folder's model; return its config too.

    A saved run file sets all of it, so a resumed run does not need that folder.
    """
    key = folder_key(tables)
    model, attention, data = (tables.get(name, {}) for name in ("model", "attention", "data"))
    is_known = all(isinstance(table, Mapping) for table in (model, attention, data))
    if not key or not is_known or (attention and all(name in model for name in KEYS)):
        return tables, None, []
    section, name = key.split(".")
    try:
        config = read_folder_config(Path(tables[section][name]))
    except UserError as error:
        return tables, None, [Problem(key, str(error))]
    context, problems = _context(data), []
    filled = config.model_keys()
    if not {"rope_theta", "rope"} & set(model):
        how = model.get("extend_context", "theta")
        rope = (config.rope, config.rope_theta, config.head_dim, config.max_positions)
        try:
            filled |= extend(*rope, context, how)
        except UserError as error:
            problems.append(Problem("model.extend_context", str(error)))
    attention = attention or config.pattern(context).model_dump(mode="json")
    preset = presets.MODELS.get(str(model.get("preset")), {})
    shapes = {name: preset[name] for name in EQUAL if name in preset and name != "vocab"}
    tables = {**tables, "model": {**filled, **shapes, **model}, "attention": attention}
    return tables, config, problems


def _context(data: Mapping[str, Any]) -> int:
    try:
        return Data.model_validate({"context": data.get("context", Data().context)}).context
    except ValidationError:  # reported by itself
        return Data().context
