"""Files that a run reads cannot execute code or point outside their folder."""

from __future__ import annotations

import ast
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import checkpoint
from longspan.checkpoint import TensorShard
from longspan.checkpoint.format import Manifest
from longspan.errors import UserError
from longspan.runfile import load_run

PACKAGE = Path(__file__).parents[1] / "src" / "longspan"
CASES = int(os.environ.get("LONGSPAN_FUZZ_CASES", "500"))


def dangerous(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [a.name for a in names if a.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=("eval" | "exec" | "compile" | "__import__") as name)):
                found.append(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in CALLS:
                found.append(f"{owner}.{name}")
            case ast.keyword(arg="shell"):
                found.append("shell=")
            case ast.keyword(arg="weights_only" | "allow_pickle"):
                found.append(str(node.arg))
    return found


MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
CALLS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load")}
CALLS |= {("os", "system"), ("os", "popen"), ("dist", "gather_object"), ("np", "load")}


def test_no_file_is_read_as_code() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert dangerous(ast.parse(path.read_text())) == [], path


def test_dangerous_calls_are_found() -> None:
    source = """
import pickle, yaml
from cloudpickle import loads
torch.load(f); yaml.load(x); eval("1"); subprocess.run("ls", shell=True)
"""
    names = ["pickle", "cloudpickle", "torch.load", "yaml.load", "eval", "shell="]
    assert sorted(dangerous(ast.parse(source))) == sorted(names)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


WORDS = [
    "steps", "hidden", "heads", "kv_heads", "layers", "source", "context", "preset", "lr", "kind",
    "segment_lengths", "dilation_rates", "block_size", "shard", "zero", "schedule", "precision",
    "every", "keep", "seed", "optimizer", "activation_checkpointing", "nonsense", "ffn", "vocab",
    "global_batch",
]  # fmt: skip
SECTIONS = ["model", "attention", "data", "layout", "train", "checkpoint", "track", "engine", "x"]
ODD: list[Any] = [
    0, -1, 1, 3, 64, 2**40, 1.5, 1e300, True, "", "dense", "../x", "auto", "zbv", [], [0], [64, 1],
]  # fmt: skip


def test_a_nonsense_run_file_is_rejected(tmp_path: Path) -> None:
    rng, file, rejected = random.Random(1), tmp_path / "run.toml", 0
    for _ in range(CASES):
        lines = []
        for section in rng.sample(SECTIONS, rng.randint(1, 4)):
            lines.append(f"[{section}]")
            keys = rng.sample(WORDS, rng.randint(0, 4))
            lines += [f"{key} = {toml(rng.choice(ODD))}" for key in keys]
        if rng.random() < 0.1:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(["[", "= 3", "\x01", "a.b"]))
        file.write_text("\n".join(lines))
        try:
            load_run(file, world=rng.choice([None, 1, 2, 8]))
        except UserError:
            rejected += 1
    assert CASES // 3 < rejected < CASES


@pytest.mark.parametrize("kind", ["shape", "type", "name", "not safetensors"])
def test_a_file_that_contradicts_the_manifest_is_rejected(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import save_file

    from longspan.files import sha256_of

    path = checkpoint.save(tmp_path, 1, {"model/a": TensorShard.full(torch.zeros(2, 3))}, {})
    file = path / "model-00000.safetensors"
    match kind:
        case "shape":
            save_file({"model/a": torch.zeros(1, 3)}, file)
        case "type":
            save_file({"model/a": torch.zeros(2, 3, dtype=torch.int32)}, file)
        case "name":
            save_file({"model/b": torch.zeros(2, 3)}, file)
        case _:
            file.write_bytes(b"x" * 100)
    body = json.loads((path / "manifest.json").read_text())
    body["files"][file.name] = sha256_of(file)
    del body["sha256"]
    manifest = Manifest.model_validate_json(json.dumps(body))
    (path / "manifest.json").write_text(manifest.to_text())
    with pytest.raises(UserError, match="cannot use the checkpoint"):
        checkpoint.load(path, "model")
