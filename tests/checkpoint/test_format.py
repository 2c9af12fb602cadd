"""Checkpoints are complete or absent, checked to the byte, and free of pickle."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspan import checkpoint
from longspan.checkpoint import PendingCheckpoint, Region, TensorShard, writing
from longspan.checkpoint.format import Manifest, read_manifest
from longspan.errors import Damaged, UserError

TENSORS = {
    "model/a": torch.arange(6.0).reshape(2, 3),
    "model/b": torch.randn(4).bfloat16(),
    "rng/cpu": torch.get_rng_state(),
    "rng/scalar": torch.tensor(3.0),
}
SHARDS = {name: TensorShard.full(x) for name, x in TENSORS.items()}


def saved(folder: Path, step: int = 1, state: dict[str, Any] | None = None) -> Path:
    return checkpoint.save(folder, step, SHARDS, state or {})


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = saved(tmp_path, 7, {"samples": 56, "scaler": {}})
    opened = checkpoint.open_checkpoint(path)
    opened.check()
    assert (opened.step, opened.state) == (7, {"samples": 56, "scaler": {}})
    for name, tensor in TENSORS.items():
        assert torch.equal(opened.read(name), tensor)
        assert opened.read(name).dtype == tensor.dtype
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    assert torch.equal(load_file(path / "model-00000.safetensors")["model/a"], TENSORS["model/a"])


REGIONS = [((0, 0), (3, 2)), ((0, 2), (3, 5)), ((3, 0), (2, 4)), ((3, 4), (2, 3))]


def test_shards_of_many_ranks_are_read_in_any_other_sharding(tmp_path: Path) -> None:
    full = torch.arange(35.0).view(5, 7)
    pending = PendingCheckpoint(tmp_path, 3)
    for rank, (start, shape) in enumerate(REGIONS):
        region = Region(start=start, shape=shape)
        local = full[region.slices_within(Region.full((5, 7)))].clone()
        pending.write({"model/x": TensorShard(local, (5, 7), region)}, rank)
    path = pending.commit({}, len(REGIONS))
    opened = checkpoint.open_checkpoint(path)
    assert torch.equal(opened.read("model/x"), full)
    for a in range(5):
        for b in range(a, 6):
            for c in range(0, 7, 2):
                region = Region(start=(a, c), shape=(b - a, 7 - c))
                assert torch.equal(opened.read("model/x", region), full[a:b, c:])
    assert torch.equal(checkpoint.load(path, "model")["x"], full)


def test_latest_and_prune(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for step in (5, 10, 100, 99):
        saved(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2, keep_every=5)
    names = ["step-00000005", "step-00000010", "step-00000099", "step-00000100"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    checkpoint.prune(tmp_path, keep=1, keep_every=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000100"


def test_copies_and_quarantined_checkpoints_are_ignored(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        saved(tmp_path, step)
    shutil.copytree(tmp_path / "step-99999999", tmp_path / "step-best")
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-100000000"
    assert checkpoint.quarantine(newest).name == "bad-step-100000000"
    checkpoint.prune(tmp_path, keep=1)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["bad-step-100000000", "step-99999999", "step-best"]
    shutil.copytree(tmp_path / "step-99999999", tmp_path / "step-100000000")
    assert checkpoint.quarantine(tmp_path / "step-100000000").name == "bad-step-100000000-1"


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    """Flip a bit in every byte of the manifest, and in a sample of each file."""
    path = saved(tmp_path, 1, {"samples": 56, "note": "ä"})
    rng = random.Random(0)
    for file in path.iterdir():
        content = file.read_bytes()
        places = range(len(content))
        if file.name != "manifest.json":
            places = sorted(rng.sample(places, min(len(content), 200)))
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(UserError, match="cannot use the checkpoint"):
                checkpoint.open_checkpoint(path).check()
        file.write_bytes(content)
    checkpoint.open_checkpoint(path).check()


@pytest.mark.parametrize("damage", ["truncate", "remove", "swap"])
def test_damage_is_detected_before_loading(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path)
    file = path / "model-00000.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "remove":
        file.unlink()
    else:
        shutil.copy(path / "rng-00000.safetensors", file)
    with pytest.raises(UserError, match="cannot use the checkpoint") as error:
        checkpoint.load(path, "model")
    assert "model-00000.safetensors" in str(error.value)
    assert set(checkpoint.load(path, "rng")) == {"cpu", "scalar"}


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"step": "3"}', "[" * 99999])
def test_a_damaged_manifest_is_rejected(tmp_path: Path, content: str) -> None:
    path = saved(tmp_path)
    (path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match="cannot use the checkpoint"):
        checkpoint.open_checkpoint(path)


def tamper(manifest: dict[str, Any], kind: str) -> None:
    a = manifest["tensors"]["model/a"]
    shard = a["shards"][0]
    match kind:
        case "format":
            manifest["format"] = "longspan-checkpoint-9"
        case "outside":
            manifest["files"]["../../x.safetensors"] = "0" * 64
        case "another file":
            shard["file"] = "model-00009.safetensors"
        case "a path":
            shard["file"] = "/etc/passwd"
        case "too far":
            shard["start"] = [1, 0]
        case "too little":
            shard["shape"] = [1, 3]
        case "overlap":
            a["shards"] = [{**shard, "shape": [1, 3]}] * 2
        case "group":
            manifest["tensors"]["rng/cpu"]["shards"][0]["file"] = shard["file"]
        case "unused":
            manifest["files"]["model-00001.safetensors"] = "0" * 64
        case "name":
            manifest["tensors"]["model/a\x1b[2J"] = manifest["tensors"].pop("model/a")
        case "no group":
            manifest["tensors"]["a"] = manifest["tensors"].pop("model/a")
        case "dtype":
            a["dtype"] = "F31"
        case "twice":
            a["shards"] = [{**shard, "start": [i, 0], "shape": [1, 3]} for i in range(2)]
        case "dims":
            a["shape"] = [1] * 1000
        case "huge":
            a["shape"] = [1 << 61]
        case "too fine":
            a["shape"] = [64] * 12
            a["shards"] = [{**shard, "start": [i] * 12, "shape": [1] * 12} for i in range(64)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("format", "its format is longspan-checkpoint-9, but this version reads"),
        ("outside", "String should match pattern"),
        ("another file", "model/a has a shard in a file that is not listed"),
        ("a path", "String should match pattern"),
        ("too far", "a shard extends beyond the shape"),
        ("too little", "the shards do not add up to the shape"),
        ("overlap", "shards overlap"),
        ("too fine", "the shards do not add up"),
        ("group", r"rng/cpu has a shard in model-00000\.safetensors, of another group"),
        ("unused", r"model-00001\.safetensors is listed, but holds no tensor"),
        ("name", "String should match pattern"),
        ("no group", "String should match pattern"),
        ("dtype", 'the dtype "F31" is unknown'),
        ("twice", "two shards are in the same file"),
        ("dims", "at most 12 items"),
        ("huge", "less than or equal to"),
    ],
)
def test_a_manifest_that_was_tampered_with_is_rejected(
    tmp_path: Path, kind: str, message: str
) -> None:
    """Even if its checksum were recomputed."""
    body = read_manifest(saved(tmp_path)).model_dump(mode="json")
    tamper(body, kind)
    text = json.dumps({**body, "sha256": "0" * 64})
    with pytest.raises(ValueError, match=message):
        Manifest.from_text(text)


@pytest.mark.parametrize("call", ["sha256_of", "fsync", "save_file"])
def test_a_failed_save_leaves_only_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    saved(tmp_path, 1)

    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, call, fail)
    with pytest.raises(OSError, match="No space"):
        saved(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    checkpoint.open_checkpoint(tmp_path / "step-00000001").check()


def test_leftovers_of_an_interrupted_save_or_removal_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.tmp").mkdir(parents=True)
    (tmp_path / ".step-00000000.removed").mkdir()
    assert checkpoint.latest(tmp_path) is None
    saved(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_commit_fails_until_every_rank_has_written(tmp_path: Path) -> None:
    pending = PendingCheckpoint(tmp_path, 1)
    pending.write(SHARDS, 0)
    with pytest.raises(FileNotFoundError):
        pending.commit({}, 2)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("kind", ["large", "brackets", "lists", "nested", "twice"])
def test_a_manifest_is_bounded_before_it_is_parsed(tmp_path: Path, kind: str) -> None:
    """A gigabyte took ten times its size in memory; a sparse file stands for it."""
    path = saved(tmp_path)
    file = path / "manifest.json"
    text = file.read_text()
    match kind:
        case "large":
            with file.open("r+b") as opened:
                opened.truncate(1 << 40)
        case "brackets":
            file.write_text("[" * (8 << 20))
        case "lists":
            file.write_text(
                text.replace('"state": {}', '"state": {"a": [' + "[]," * 999_999 + "0]}")
            )
        case "nested":
            file.write_text(
                text.replace('"state": {}', '"state": {"a":' + "[" * 99 + "]" * 99 + "}")
            )
        case _:
            file.write_text(text.replace('"step"', '"step": 1,\n "step"'))
    tracemalloc.start()
    with pytest.raises(Damaged, match=r"manifest\.json has more than|not valid JSON"):
        checkpoint.open_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["manifest.json", "model-00000.safetensors"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "link"])
def test_only_regular_files_of_the_folder_are_read(tmp_path: Path, name: str, kind: str) -> None:
    path = saved(tmp_path / "run")
    file = path / name
    file.rename(tmp_path / "elsewhere")
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot use the checkpoint .*(regular|outside)"):
        checkpoint.open_checkpoint(path).check()


def test_a_file_that_is_longer_than_its_tensors_is_not_hashed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with (path / "model-00000.safetensors").open("r+b") as file:
        file.truncate(1 << 42)  # hours of hashing
    with pytest.raises(Damaged, match="it has 4,398,046,511,104 bytes"):
        checkpoint.open_checkpoint(path).check()


def test_a_tensor_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = path / "model-00000.safetensors"
    save_file({name: x for name, x in TENSORS.items() if name.startswith("model/")} | {
        "model/c": torch.zeros(0)
    }, file)  # fmt: skip
    body = read_manifest(path).model_dump(mode="json")
    body["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(Manifest.model_validate_json(json.dumps(body)).to_text())
    with pytest.raises(UserError, match="its tensors are not those of the manifest"):
        checkpoint.load(path, "model")
