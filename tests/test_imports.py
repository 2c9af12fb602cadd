"""Imports point one way, as drawn in the map below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "longspan"
GROUND = {"costs", "errors", "faults", "files", "hardware", "presets"}
"""Plain modules that anyone may import and that import no room."""

MAY_IMPORT = {
    "config": {"presets"},
    "rules": {"config"},
    "runfile": {"config", "rules", "errors"},
    "attention": {"config"},
    "nn": {"attention", "config"},
    "models": {"nn", "attention", "config", "runfile"},
    "data": {"config"},
    "parallel": {"models", "nn", "attention", "config"},
    "engines": {"parallel", "models", "nn", "attention", "data", "checkpoint", "config"},
    "launching": set(),
    "planning": {"config", "models", "nn", "parallel"},
    "checkpoint": set(),
    "tracking": {"config"},
    "training": {
        "models",
        "nn",
        "attention",
        "data",
        "checkpoint",
        "tracking",
        "config",
        "runfile",
        "parallel",
        "engines",
    },
    "benchmarks": {"attention", "config", "nn"},
    "cli": {
        "checkpoint",
        "drill",
        "verify",
        "benchmarks",
        "tracking",
        "engines",
        "launching",
        "parallel",
        "planning",
        "training",
        "models",
        "data",
        "config",
        "runfile",
    },
    "drill": {"checkpoint", "config", "runfile", "tracking"},
    "verify": {"checkpoint", "config", "launching", "runfile"},
    "__main__": {"cli"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "longspan":
                names = [f"longspan.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        rooms |= {name.split(".")[1] for name in names if name.startswith("longspan.")}
    return rooms - {"__version__"}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        allowed: set[str] = set()
    elif room in GROUND:
        allowed = GROUND
    else:
        allowed = MAY_IMPORT[room] | GROUND | {room}
    assert imported_rooms(path) <= allowed
