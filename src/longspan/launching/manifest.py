"""YAML that people can read: no anchors, and texts of several lines as such."""

from __future__ import annotations

import sys
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def dump(value: dict[str, Any]) -> str:
    """Return a mapping as YAML, in its order, one line for each line of its texts."""
    # No line is folded: one that continues a text could look like a key.
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
