"""RoPE in a config.json of Hugging Face: read, extended to a longer context, and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.config import MAX_INT, Rope
from longspan.errors import UserError
from longspan.rules import ROPE_KEYS
from longspan.wording import shown

TABLES = ("rope_parameters", "rope_scaling")
"""The table of RoPE's settings in transformers 5, and in 4."""
DEFAULT_THETA = 10_000.0
ORIGINAL = "original_max_position_embeddings"
NAMES = {"original_context": ORIGINAL}
"""Keys of [model.rope] that have another name in config.json."""


def read_rope(fields: Mapping[str, Any], max_positions: object) -> tuple[dict[str, Any], list[str]]:
    """RoPE's base and table as the keys `rope_theta` and `rope` of [model], and what is wrong.

    `max_positions` is max_position_embeddings, the default of the context before scaling.
    """
    tables, problems = {}, []
    for name in TABLES:
        table = fields.get(name, {})
        if not isinstance(table, dict):
            problems.append(f"{name}: expected a table, got {shown(table)}")
        elif table:
            tables[name] = {key: value for key, value in table.items() if value is not None}
    theta = fields.get("rope_theta", DEFAULT_THETA)  # of a table that has none
    thetas = [theta] if "rope_theta" in fields or not tables else []
    thetas += [table.get("rope_theta", theta) for table in tables.values()]
    if any(theta != thetas[0] for theta in thetas):
        values = ", ".join(dict.fromkeys(map(shown, thetas)))
        problems.append(f"rope_theta has several values: {values}; keep one")
    read = []
    for name, table in tables.items():
        rope, wrong = _read_table(name, table, max_positions)
        read.append(rope)
        problems += wrong
    if len(read) == 2 and read[0] != read[1] and not problems:
        problems.append(f"{' and '.join(TABLES)} disagree: keep one")
    return {"rope_theta": thetas[0], "rope": read[0] if read else {}}, problems


def _read_table(
    name: str, table: Mapping[str, Any], max_positions: object
) -> tuple[dict[str, Any], list[str]]:
    kind = table.get("rope_type", table.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        only = ", ".join(f'"{known}"' for known in ROPE_KEYS)
        text = f"{name} with rope_type = {shown(kind)} is not supported, only {only}"
        return {}, [f"{text}: use another model"]
    keys = {NAMES.get(key, key): key for key in ROPE_KEYS[kind]}
    if kind == "dynamic":  # transformers takes max_position_embeddings
        del keys[ORIGINAL]
    rope: dict[str, Any] = {"type": kind}
    problems = []
    for field, value in table.items():
        if field in keys:
            rope[keys[field]] = value
        elif field not in ("rope_type", "type", "rope_theta") and not (
            field == "partial_rotary_factor" and value == 1
        ):
            plain = field if field.isidentifier() else shown(field)
            problems.append(f"{name}.{plain} = {shown(value)} is not supported: use another model")
    if "original_context" in ROPE_KEYS[kind]:
        rope.setdefault("original_context", max_positions)
    numbers = (max_positions, rope.get("original_context"))
    are_known = all(type(n) is int and 0 < n <= MAX_INT for n in numbers)
    if kind == "yarn" and "factor" not in rope and are_known:
        rope["factor"] = max_positions / rope["original_context"]
    if kind != "default" and "factor" not in rope:
        problems.append(f"{name}.factor is missing: rope_type = {shown(kind)} needs it")
    return rope, problems


def extend(
    rope: Rope, theta: float, head_dim: int, positions: int, context: int, how: str
) -> dict[str, Any]:
    """The keys of [model] that extend RoPE from `positions` tokens to `context`.

    "theta" multiplies the base by s^(D/(D−2)), s = context / positions: the slowest pair, which
    rotates by theta^(−(D−2)/D) per token, then rotates over the new context as it did over the old.
    "yarn" scales the frequencies by YaRN (Peng et al. 2023), from the original context.
    """
    # What a scaling already reaches: folders of Qwen with YaRN keep the context before it.
    if rope.type in ("yarn", "llama3"):
        positions = max(positions, int(rope.factor * (rope.original_context or positions)))
    elif rope.type == "linear":
        positions = int(rope.factor * positions)
    growth = context / positions
    if how == "none" or growth <= 1:
        return {}
    if rope.type == "dynamic":  # its base grows with the sequence
        return {}
    if how == "theta":
        power = head_dim / (head_dim - 2) if head_dim > 2 else 0
        return {"rope_theta": float(theta * growth**power), "max_positions": context}
    if rope.type not in ("default", "yarn"):
        raise UserError(
            f'"yarn" is not supported with the rope_type "{rope.type}" of the folder: use "theta"'
        )
    original = rope.original_context or positions
    table = rope.model_dump(mode="json", exclude_none=True, exclude={"attention_factor"})
    yarn = {"type": "yarn", "factor": context / original, "original_context": original}
    return {"rope": {**table, **yarn}, "max_positions": context}


def write_rope(rope: Rope, theta: float) -> dict[str, Any]:
    """RoPE as fields of config.json, as transformers 4 writes them and 5 reads them."""
    if rope.type == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    table: dict[str, Any] = {"rope_type": rope.type}
    for key in ROPE_KEYS[rope.type]:
        value = getattr(rope, key)
        if value is not None and not (key == "original_context" and rope.type == "dynamic"):
            table[NAMES.get(key, key)] = value
    return {"rope_theta": theta, "rope_scaling": table}
