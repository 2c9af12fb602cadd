"""YAML that people can read: no anchors, and texts of several lines as such."""

from __future__ import annotations

import re
import sys
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


NUMBER = re.compile(r"[-+.]?[0-9].*|[yYnN]")
"""Texts that readers of other versions of YAML take for a number or a boolean: 1e3, 0o7, y."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if NUMBER.fullmatch(text) else None
    if not text.replace("\n", "").isprintable():  # only this style escapes every character
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def dump(value: dict[str, Any]) -> str:
    """Return a mapping as YAML, in its order, one line for each line of its texts."""
    # No line is folded: one that continues a text could look like a key.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
