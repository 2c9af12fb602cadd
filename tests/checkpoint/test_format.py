"""Checkpoints: whole or absent, checked, without pickle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from longspan import checkpoint, files
from longspan.errors import UserError

GROUPS = {
    "model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.randn(4).bfloat16()},
    "rng": {"cpu": torch.get_rng_state(), "scalar": torch.tensor(3.0)},
}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, GROUPS, {"samples": 56, "scaler": {}})
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.state) == (7, {"samples": 56, "scaler": {}})
    for group, tensors in GROUPS.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded.groups[group][name], tensor)
            assert loaded.groups[group][name].dtype == tensor.dtype
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}


def test_only_some_groups_can_be_read(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, GROUPS, {})
    (path / "rng.safetensors").unlink()
    assert set(checkpoint.load(path, groups=("model",)).groups) == {"model"}


def test_newest_is_found_and_the_oldest_are_removed(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for step in (5, 10, 100, 99):
        checkpoint.save(tmp_path, step, GROUPS, {})
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000099", "step-00000100"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000100"


def test_a_copy_put_aside_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        checkpoint.save(tmp_path, step, GROUPS, {})
    shutil.copytree(tmp_path / "step-99999999", tmp_path / "step-best")
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-100000000"
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-100000000", "step-best"]


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"step": "3"}', "[" * 99999])
def test_a_damaged_manifest_is_told(tmp_path: Path, content: str) -> None:
    path = checkpoint.save(tmp_path, 1, GROUPS, {})
    (path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="cannot use the checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found_before_use(tmp_path: Path, damage: str) -> None:
    path = checkpoint.save(tmp_path, 1, GROUPS, {})
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-3] ^= 4
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-8])
    else:
        file.unlink()
    with pytest.raises(UserError, match="cannot use the checkpoint") as error:
        checkpoint.load(path)
    assert "model.safetensors" in str(error.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, GROUPS, {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": "newer"}))
    with pytest.raises(UserError, match="format: Input should be 'longspan-checkpoint-1'"):
        checkpoint.load(path)


@pytest.mark.parametrize("moment", ["sha256_of", "_fsync"])
def test_a_save_that_fails_leaves_nothing_and_the_last_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoint.save(tmp_path, 1, GROUPS, {})

    def fail(path: Path) -> str:
        raise OSError(28, "No space left on device")

    module = files if moment == "_fsync" else checkpoint.format
    monkeypatch.setattr(module, moment, fail)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, GROUPS, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "step-00000001").step == 1


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.77.tmp").mkdir(parents=True)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, 2, GROUPS, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
