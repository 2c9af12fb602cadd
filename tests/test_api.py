"""The public API: its names, their lazy import, and the page that documents them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

import longspan
from tests.api_page import PAGE, render
from tests.harness import Ranks

NAMES = [
    *["attend", "attend_sharded", "Dense", "Dilated", "BlockSparse", "Window"],
    *["DilatedAttention", "BlockSparseAttention"],
    *["MultiheadDilatedAttention", "MultiheadBlockSparseAttention", "KVCache"],
    *["SKLinear", "LowRankLinear", "sketch", "to_dense"],
    *["Trainer", "Task", "load_weights", "Run"],
    *["load_run", "create_model", "train", "verify", "plan", "trace_memory", "UserError"],
]


def test_the_public_names_are_exactly_these() -> None:
    assert list(longspan.PUBLIC) == NAMES
    assert longspan.__all__ == ["__version__", *NAMES]
    assert set(dir(longspan)) >= set(NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'atend'"):
        longspan.atend  # noqa: B018


def test_type_checkers_see_the_names_where_they_are_defined() -> None:
    assert longspan.__file__ is not None
    body = ast.parse(Path(longspan.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == longspan.PUBLIC
    assert all(alias.asname == alias.name for node in imports for alias in node.names)


def test_no_module_hides_a_public_name() -> None:
    """`import longspan.verify` would make `longspan.verify` that module."""
    assert longspan.__file__ is not None
    modules = {path.stem for path in Path(longspan.__file__).parent.iterdir()}
    assert not modules & set(NAMES)


def test_names_are_imported_when_they_are_used() -> None:
    code = """
import sys, longspan
assert "torch" not in sys.modules and "pydantic" not in sys.modules
assert "attend" in dir(longspan)
longspan.load_run
assert "torch" not in sys.modules
longspan.plan
assert "torch.distributed.tensor" not in sys.modules  # which takes a second
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    names: dict[str, object] = {}
    exec("from longspan import *", names)
    for name, module in longspan.PUBLIC.items():
        assert names[name] is getattr(longspan, name) is getattr(import_module(module), name)


def test_the_page_of_the_public_api_is_current() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.api_page"


def train_two_steps(rank: int, world: int, run_dir: str) -> int:
    options = ["model.hidden=32", "data.context=64", "train.steps=2", "train.eval_samples=1"]
    run = longspan.load_run(None, [*options, "track.prompt="], world=world)
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    with patch.dict(os.environ, places):
        return longspan.train(run, run_dir).step


def test_train_finds_the_processes_that_torchrun_has_started(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(train_two_steps, 2, str(tmp_path / "run")) == [2, 2]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 2  # a shard of each rank
