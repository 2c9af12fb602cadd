"""Imports point one way, as drawn in the map below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import longspan

PACKAGE = Path(__file__).parents[1] / "src" / "longspan"
GROUND = {"dtypes", "errors", "faults", "files", "hardware", "hashing", "presets", "toml"}
GROUND |= {"caching", "vocabulary", "checks", "constants", "locking", "loopback", "loopback_server"}
GROUND |= {"progress", "generation", "stop_signals", "torch_internals", "wording"}
"""Plain modules that anyone may import and that import no room."""

MODEL = {"attention", "nn", "sketching", "models", "config", "costs", "flops"}
RUN = {"config", "derived", "device", "runfile", "data", "checkpoint", "tracking"}
MAY_IMPORT = {
    "config": set(),
    "builtin": {"config"},
    "costs": {"config"},
    "flops": {"attention", "config", "costs"},
    "derived": {"attention", "config", "costs"},
    "rules": {"config", "costs"},
    "hf_rope": {"config", "rules"},
    "hf_config": {"config", "hf_rope", "rules"},
    "hf_generation": set(),
    "from_folder": {"config", "hf_config", "hf_rope", "rules"},
    "runfile": {"builtin", "config", "data", "from_folder", "planning", "rules"},
    "device": {"config"},
    "init": {"config", "costs", "data", "device", "runfile"},
    "attention": {"config"},
    "nn": {"attention", "config"},
    "sketching": {"attention", "nn", "tracking", "costs"},
    "data": {"config"},
    "checkpoint": set(),
    "tracking": {"config"},
    "models": {"attention", "nn", "sketching", "config", "costs", "data"},
    "parallel": MODEL | {"device"},
    "engines": MODEL | {"parallel", "data", "checkpoint", "device", "rules"},
    "export": MODEL | RUN | {"hf_config", "hf_rope"},
    "training": MODEL | RUN | {"parallel", "engines", "export", "hf_config", "planning", "rules"},
    "planning": MODEL | {"data", "derived", "device", "engines", "parallel", "rules"},
    "hf": {"attention", "hf_config"},
    "launching": set(),
    "doctor": RUN | {"benchmarks", "costs", "parallel", "planning"},
    "trained": MODEL | RUN | {"export", "hf_config", "parallel"},
    "generate": MODEL | RUN | {"hf_config", "hf_generation", "parallel", "trained"},
    "serve": {"generate", "models"},
    "evaluation": MODEL | RUN | {"export", "hf_config", "parallel", "trained"},
    "sketch_run": MODEL | RUN | {"export", "parallel", "trained", "training"},
    "drill": {"checkpoint", "config", "runfile", "tracking"},
    "create": MODEL | {"device", "parallel", "runfile"},
    "compat": {"attention", "create", "parallel", "sketching"},
    "verification": {"checkpoint", "config", "launching", "runfile", "tracking"},
    "benchmarks": MODEL
    | RUN
    | {"launching", "parallel", "engines", "planning", "sketch_run", "training"},
    "reporting": MODEL | RUN | {"parallel"},
    "cli": MODEL
    | RUN
    | {"benchmarks", "doctor", "drill", "engines", "evaluation", "export", "generate"}
    | {"launching", "parallel"}
    | {
        "init",
        "planning",
        "reporting",
        "serve",
        "sketch_run",
        "trained",
        "training",
        "verification",
    },
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
    if room == "__init__":  # imports when a name is used: tests/test_api.py
        allowed = {module.split(".")[1] for module in longspan.PUBLIC.values()}
    elif room in GROUND:
        allowed = GROUND
    else:
        allowed = MAY_IMPORT[room] | GROUND | {room}
    assert imported_rooms(path) <= allowed
