"""Shards are verified when a run starts; damage is an error with the shard's name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config import Layout
from longspan.data import open_source
from longspan.data import verification as module
from longspan.data.build import build
from longspan.data.shards import read_index
from longspan.data.source import TokenSource
from longspan.data.token_split import TokenSplit
from longspan.data.verification import CACHE, Verification
from longspan.errors import UserError
from longspan.parallel.mesh import ParallelMesh, open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training import train
from longspan.training.verified_data import open_verified_source
from tests.harness import Ranks
from tests.steps import CPU

SMALL = ["model.hidden=32", "model.layers=1", "data.context=16", "track.prompt="]
SMALL += ["train.device=cpu", "train.compile=false", "train.precision=fp32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for n in range(8):
        (tmp_path / "in" / f"{n}.txt").write_text(chr(65 + n) * 60)
    build([tmp_path / "in"], tmp_path / "shards", validation=0.2, shard_tokens=150)
    return tmp_path / "shards"


def flip(path: Path, at: int = 3) -> None:
    """Change one byte; size and modification time stay."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def verify(folder: Path) -> None:
    with Verification(folder, read_index(folder)) as verification:
        assert verification.wait() == 0


def test_a_run_does_not_start_or_resume_on_a_changed_shard(folder: Path, tmp_path: Path) -> None:
    options = [*SMALL, f"data.source={folder}", "train.steps=1"]
    train(load_run(None, options), tmp_path / "run")
    flip(folder / "train-00001.bin")
    longer = [*SMALL, f"data.source={folder}", "train.steps=2"]
    for where, resume in ((tmp_path / "other", False), (tmp_path / "run", True)):
        with pytest.raises(UserError, match=r"train-00001\.bin is damaged: its SHA-256"):
            train(load_run(None, longer), where, resume=resume)
    assert not (tmp_path / "other").exists()
    train(load_run(None, [*longer, "data.verify=false"]), tmp_path / "run", resume=True)


def _move_an_end(index: dict[str, Any]) -> None:
    index["shards"][0]["document_ends"][0] -= 1


def _swap(index: dict[str, Any]) -> None:
    shards = index["shards"]
    shards[0], shards[1] = shards[1], shards[0]


@pytest.mark.parametrize("change", [_move_an_end, _swap, lambda index: index.update(vocab=257)])
def test_every_part_of_the_index_counts_in_the_fingerprint(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    run = load_run(None, [*SMALL, f"data.source={folder}", "model.vocab=512"])
    first = open_source(run.data, run.model).fingerprint
    edit_index(folder, lambda index: None)  # spaces alone do not count
    assert open_source(run.data, run.model).fingerprint == first
    edit_index(folder, change)
    assert open_source(run.data, run.model).fingerprint != first


def test_a_run_does_not_resume_on_other_document_ends(folder: Path, tmp_path: Path) -> None:
    train(load_run(None, [*SMALL, f"data.source={folder}", "train.steps=1"]), tmp_path / "run")
    edit_index(folder, _move_an_end)
    run = load_run(None, [*SMALL, f"data.source={folder}", "train.steps=2"])
    with pytest.raises(UserError, match=r"was trained with\n  data was tokens: .* SHA-256"):
        train(run, tmp_path / "run", resume=True)


@pytest.mark.parametrize("next_to_the_shards", [True, False])
def test_a_shard_is_read_again_only_if_it_has_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_to_the_shards: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not next_to_the_shards:
        (folder / CACHE).mkdir()  # what a folder does that may not be written: an OSError
    read: list[str] = []
    opened = module.open_regular
    monkeypatch.setattr(
        module, "open_regular", lambda path, within: read.append(path.name) or opened(path)
    )
    files = sorted(path.name for path in folder.glob("*.bin"))
    verify(folder)
    assert sorted(read) == files
    assert (tmp_path / "cache").exists() is not next_to_the_shards
    read.clear()
    verify(folder)
    assert read == []
    flip(folder / files[1])
    with pytest.raises(UserError, match=f"{files[1]} is damaged"):
        verify(folder)
    flip(folder / files[1])  # back
    read.clear()
    verify(folder)
    assert read == [files[1]]
    read.clear()
    with Verification(folder, read_index(folder), again=True) as again:
        again.wait()
    assert sorted(read) == files


def test_a_user_without_a_home_gets_no_folder_named_tilde(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a uid without a name
    (folder / CACHE).mkdir()
    verify(folder)
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("content", ["[]", "{", '{"train-00000.bin": 3}', "null"])
def test_a_broken_cache_is_ignored(folder: Path, content: str) -> None:
    (folder / CACHE).write_text(content)
    verify(folder)
    flip(folder / "train-00000.bin")
    (folder / CACHE).write_text(content)
    with pytest.raises(UserError, match="is damaged"):
        verify(folder)


def test_a_shard_that_is_truncated_under_a_running_job_is_named(folder: Path) -> None:
    """A memory map of it would end the process by SIGBUS."""
    run = load_run(None, [*SMALL, f"data.source={folder}"])
    source = open_source(run.data, run.model)
    assert isinstance(source, TokenSource)
    for shard in folder.glob("train-*.bin"):
        os.truncate(shard, 0)
    with pytest.raises(UserError, match=r"train-0000\d\.bin was truncated while the run read it"):
        source.sample(0, 0)
    for shard in folder.glob("train-*.bin"):
        shard.unlink()
    with pytest.raises(UserError, match=r"cannot read the shard .*: No such file"):
        source.sample(0, 0)


def test_a_read_opens_only_the_shards_that_it_needs() -> None:
    class Counted:
        def __init__(self, values: np.ndarray[Any, Any]) -> None:
            self.values, self.reads = values, 0

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, which: slice) -> np.ndarray[Any, Any]:
            self.reads += 1
            return self.values[which]

    stream = np.arange(1000)
    cuts = [0, 3, 10, 11, 200, 201, 650, 1000]
    shards = [Counted(stream[a:b]) for a, b in pairwise(cuts)]
    split = TokenSplit(shards, np.array([1000]))
    assert split.total == 1000
    for start in range(0, 999, 7):
        for length in (1, 2, 9, 300):
            stop = min(start + length, 1000)
            before = [shard.reads for shard in shards]
            assert np.array_equal(split.read(start, stop), stream[start:stop])
            needed = [a < stop and b > start for a, b in pairwise(cuts)]
            assert [s.reads - n for s, n in zip(shards, before, strict=True)] == needed


def test_a_token_beyond_the_vocabulary_is_found_at_the_start(folder: Path) -> None:
    shard = folder / "train-00000.bin"
    tokens = np.fromfile(shard, dtype=np.uint8).astype("<u4")
    tokens[5] = 2**32 - 1
    shard.write_bytes(tokens.tobytes())

    def change(index: dict[str, Any]) -> None:
        index["dtype"] = "uint32"
        index["shards"] = [s for s in index["shards"] if s["file"] == shard.name]
        index["shards"][0]["sha256"] = hashlib.sha256(tokens.tobytes()).hexdigest()

    edit_index(folder, change)
    with pytest.raises(UserError, match=r"train-00000\.bin contains token 4294967295"):
        verify(folder)
    run = load_run(None, [*SMALL, f"data.source={folder}"])
    source = open_source(run.data, run.model)
    with pytest.raises(UserError, match="the data contains token 4294967295"):
        [source.sample(0, n) for n in range(40)]


@pytest.mark.parametrize("name", ["index.json", "train-00000.bin", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "link out", "folder"])
def test_what_is_not_a_file_of_the_folder_is_refused_at_once(
    folder: Path, name: str, kind: str
) -> None:
    run = load_run(None, [*SMALL, f"data.source={folder}", "model.vocab=256"])
    path = folder / name
    (folder.parent / "elsewhere").write_bytes(path.read_bytes() if path.exists() else b"{}")
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "link out":
            path.symlink_to(folder.parent / "elsewhere")
        case _:
            path.mkdir()
    load_run(None, [*SMALL, f"data.source={folder}"])  # does not wait for a writer either
    with pytest.raises(UserError, match=f"cannot read .*{name}: it is (not|a link)"):
        open_source(run.data, run.model)


def test_only_one_rank_of_a_machine_verifies(folder: Path) -> None:
    flip(folder / "train-00000.bin")
    run = load_run(None, [*SMALL, f"data.source={folder}"])
    open_verified_source(run, ParallelMesh(Layout(), World(local_rank=1)))
    with pytest.raises(UserError, match="is damaged"):
        open_verified_source(run, ParallelMesh(Layout(), World(local_rank=0)))


def test_verification_is_progress_only_while_it_advances(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the watchdog would end a start that reads terabytes, or never one on a dead disk."""
    remaining, points = iter([9, 9, 9, 4, 4, 0]), list[str]()
    monkeypatch.setattr(Verification, "wait", lambda self, seconds: next(remaining))
    monkeypatch.setattr("longspan.training.verified_data.fault_point", points.append)
    run = load_run(None, [*SMALL, f"data.source={folder}"])
    open_verified_source(run, ParallelMesh(Layout(), World()))
    assert points == ["verifying"] * 2


def problem_of_rank(rank: int, world: int, folder: str) -> str:
    # Rank 1 is the first rank of a second machine, which alone has other data.
    source = folder if rank == 1 else "builtin"
    run = load_run(None, [*SMALL, f"data.source={source}"], world=world)
    with open_mesh(run.layout, World(rank, world, 0), CPU) as mesh:
        try:
            open_verified_source(run, mesh)
        except UserError as error:
            return str(error)
    return ""


def test_damage_on_one_machine_ends_all_ranks(folder: Path, ranks: Ranks) -> None:
    flip(folder / "train-00000.bin")
    found = ranks.run(problem_of_rank, 2, str(folder), timeout=60)
    assert found[0] == "another rank cannot use the data; it says why"
    assert "train-00000.bin is damaged" in found[1]
