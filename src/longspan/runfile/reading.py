"""Reads the tables of a run file, in TOML or YAML, and overrides of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from longspan.config import AUTO
from longspan.errors import UserError
from longspan.runfile.folder import RUN_FILE
from longspan.toml import tomllib
from longspan.wording import toml_value

MAX_VALUES = 100_000
"""Of a run file in YAML."""
KEY = r'(?:"[^"]*"|[^."=]+)'
"""A key in the path of an override; it is quoted if it contains a dot."""


def read_tables(path: Path) -> dict[str, Any]:
    if path.is_dir():
        saved = path / RUN_FILE
        advice = f"use {saved}, or longspan train --resume {path}" if saved.exists() else "give one"
        raise UserError(f"{path} is a folder, not a run file: {advice}")
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise UserError(
            f"the run file must end in .toml, .yaml or .yml, got {path}; an override looks like "
            "section.key=value"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read the run file {path}: {reason}") from error
    if path.suffix != ".toml":
        return _parse_yaml(text, path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _parse_yaml(text: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        _check_nodes(yaml.compose(text, yaml.SafeLoader))
        tables = _as_toml(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if tables is None:
        return {}
    if not isinstance(tables, dict):
        raise UserError(f"{path} must contain one table per section, got a {type(tables).__name__}")
    return tables


def _check_nodes(root: Any) -> None:
    """Refuse two equal keys in one table, of which YAML would silently use the last.

    And more values than a run file has: aliases of aliases grow exponentially.
    """
    from yaml import MappingNode, SequenceNode

    nodes, count = [root], 0
    while nodes:
        node, count = nodes.pop(), count + 1
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(node, SequenceNode):
            nodes += node.value
        elif isinstance(node, MappingNode):
            keys = [key.value for key, _ in node.value]
            for key, value in node.value:
                if keys.count(key.value) > 1:
                    line = key.start_mark.line + 1
                    raise ValueError(f"the key {key.value} occurs twice, in line {line}")
                nodes.append(value)


def _as_toml(value: Any) -> Any:
    """Convert YAML to what TOML gives: string keys, and a float for 3e-4, a string in YAML 1.1."""
    if isinstance(value, dict):
        return {str(key): _as_toml(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_toml(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


Keys = tuple[str, ...]


def parse_override(override: str) -> tuple[Keys, Any]:
    """Return the path of keys and the value of section.key=value."""
    path, equals, text = override.partition("=")
    if path == "layout" and text == AUTO:
        return (path,), text
    if not (equals and re.fullmatch(rf"{KEY}(\.{KEY})+", path)):
        raise UserError(
            f"an override must look like section.key=value, got {toml_value(override)}; "
            "for example train.steps=100"
        )
    return tuple(key.strip('"') for key in re.findall(KEY, path)), parse_value(text)


def apply_overrides(tables: Mapping[str, Any], changes: Mapping[Keys, Any]) -> dict[str, Any]:
    changed = deepcopy(dict(tables))
    for keys, value in changes.items():
        table = changed
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                where = ".".join(keys[:depth])
                raise UserError(
                    f"the override {'.'.join(keys)} needs a table {where}, but {where} is "
                    f"{toml_value(table)}"
                )
        table[keys[-1]] = value
    return changed


def parse_value(text: str) -> Any:
    """Parse a TOML value; what is not one is a string, so strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
