"""A run folder has one owner, and a run starts in whatever a killed start has left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from longspan import locking
from longspan.cli import main
from longspan.errors import UserError
from longspan.faults import FAULT, FAULT_LOG
from longspan.locking import INHERITED, LOCK, owned
from longspan.runfile import check_run_folder
from tests.launching.test_local import SMALL

HOLD = """
import sys, time
from pathlib import Path
from longspan.locking import owned
with owned(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that owns a folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("processes", [[], ["--nproc", "2"]])
def test_a_second_run_in_a_folder_is_refused_until_the_first_is_killed(
    processes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(locking, "WAIT_S", 0.2)
    run_dir = tmp_path / "run"
    train = ["train", *SMALL, "train.steps=1", "track.prompt="]
    if not processes:
        assert main([*train, "--run-dir", str(run_dir)]) == 0
    owner = hold(run_dir)
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    option = "--run-dir" if processes else "--resume"
    assert main([*train, option, str(run_dir), *processes]) == 2
    error = capsys.readouterr().err
    assert f"{run_dir} is in use by process {owner.pid} on {os.uname().nodename}" in error
    owner.kill()
    owner.wait()
    assert (run_dir / LOCK).exists()  # but no longer locked
    with owned(run_dir):
        pass
    assert sorted([*tmp_path.rglob("*"), run_dir / LOCK]) == before


def test_a_lock_is_held_until_the_last_process_that_inherited_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "WAIT_S", 0.2)
    with owned(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
        monkeypatch.setenv(INHERITED, str(lock))
        with owned(tmp_path):  # as a rank does
            pass
        monkeypatch.delenv(INHERITED)
        os.set_inheritable(lock, True)
        monkeypatch.setattr(Path, "unlink", lambda *_: None)  # as if this process were killed
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"), owned(tmp_path):
        pass
    child.kill()
    child.wait()
    with owned(tmp_path):
        pass


def test_an_owner_leaves_the_lock_of_a_later_one(tmp_path: Path) -> None:
    with owned(tmp_path):
        (tmp_path / LOCK).unlink()  # someone cleaned up
        (tmp_path / LOCK).write_text("the next owner")
    assert (tmp_path / LOCK).read_text() == "the next owner"


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with owned(tmp_path):
        pass
    assert "nothing keeps a second run from using the same folder" in capsys.readouterr().err


# What a killed start leaves


def wreck(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("")
    return folder


WRECKS = [
    ["lock"],
    ["checkpoints/"],
    ["checkpoints/.step-00000005.tmp/"],
    [".run.toml.123.tmp", "env.json", "checkpoints/"],
    ["logs/rank-1.log", "heartbeats/rank-00000"],
    ["metrics.jsonl", "history.jsonl", "tokenizer.json", "checkpoints/"],
]


@pytest.mark.parametrize("names", WRECKS, ids=lambda names: names[0])
@pytest.mark.parametrize("resume", [True, False])
def test_what_a_killed_start_left_counts_as_new(
    names: list[str], resume: bool, tmp_path: Path
) -> None:
    check_run_folder(wreck(tmp_path / "run", *names), resume=resume)
    check_run_folder(wreck(tmp_path / "other", "run.toml", *names), resume=resume)


@pytest.mark.parametrize("name", ["thesis.tex", ".notes.123.tmp", "checkpoint", ".git/config"])
def test_a_folder_with_files_of_others_is_refused(name: str, tmp_path: Path) -> None:
    folder = wreck(tmp_path / "run", "env.json", name)
    with pytest.raises(UserError, match="is not a run folder"):
        check_run_folder(folder, resume=True)
    with pytest.raises(UserError, match="is not empty"):
        check_run_folder(folder, resume=False)


@pytest.mark.parametrize(
    "name", ["step-00000005/", "bad-step-00000005/", ".step-00000005.replaced/"]
)
def test_a_folder_with_a_checkpoint_is_not_new(name: str, tmp_path: Path) -> None:
    folder = wreck(tmp_path / "run", f"checkpoints/{name}")
    with pytest.raises(UserError, match=r"resume it \(--resume .*, in Python resume=True\)"):
        check_run_folder(folder, resume=False)
    check_run_folder(folder, resume=True)


@pytest.mark.parametrize("visit", [1, 2, 3, 4])
def test_a_run_whose_start_failed_starts_again(
    visit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full between two files of the run folder; other starts have left files, too."""
    run_dir, file = tmp_path / "run", tmp_path / "small.toml"
    assert main(["config", "show", *SMALL, "train.steps=2", "track.prompt="]) == 0
    file.write_text(capsys.readouterr().out)
    monkeypatch.setattr("longspan.faults._visits", Counter())
    monkeypatch.setenv(FAULT, f"disk_full@folder:0:{visit}")
    monkeypatch.setenv(FAULT_LOG, str(tmp_path / "fault"))
    assert main(["train", str(file), "--run-dir", str(run_dir)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (run_dir / "run.toml").exists() == (visit == 4)
    monkeypatch.delenv(FAULT)
    wreck(run_dir, "heartbeats/rank-00007", ".env.json.123.tmp", "tokenizer.json")
    wreck(run_dir, "checkpoints/.step-00000009.tmp/", "checkpoints/.step-00000001.removed/")
    option = "--resume" if visit % 2 else "--run-dir"  # as schedulers do, and people
    assert main(["train", str(file), option, str(run_dir)]) == 0
    left = {path.name for path in run_dir.iterdir()}
    assert left == {
        "run.toml", "env.json", "metrics.jsonl", "history.jsonl", "heartbeats", "checkpoints",
    }  # fmt: skip
    assert [path.name for path in (run_dir / "heartbeats").iterdir()] == ["rank-00000"]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]


def test_folders_of_killed_launchers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspan.launching import local

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, young = tmp_path / "longspan-launch-dead", tmp_path / "longspan-launch-young"
    wreck(dead, "logs/rank-0.log")
    young.mkdir()
    an_hour_ago = time.time() - 3600
    os.utime(dead, (an_hour_ago, an_hour_ago))
    live = f"import os, time; assert len(os.listdir({str(tmp_path)!r})) == 2"
    assert local.run_processes([sys.executable, "-c", live], 1, tmp_path / "no" / "logs") == 0
    assert list(tmp_path.iterdir()) == [young]
