"""Asynchronous checkpointing: nothing half written, nothing lost, nothing silent."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import TensorShard, open_checkpoint, remove_leftovers, save, writing
from longspan.cli import main
from longspan.errors import SaveFailed, Stopped, UserError
from longspan.parallel.world import World
from longspan.runfile import dump_run
from longspan.training import saving, train
from longspan.training.signals import StopRequests
from tests.disk import small_disk
from tests.harness import Ranks
from tests.parallel.test_apply import run_of

SHORT = ["train.steps=6", "train.global_batch=2", "model.layers=1", "train.schedule=constant"]
EVERY = "checkpoint.every=2"


def train_here(run_dir: Path, *overrides: str, resume: bool = False) -> None:
    train(run_of(1, *SHORT, EVERY, *overrides), run_dir, resume=resume)


def files_of(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_asynchronous_saves_write_the_same_bytes(tmp_path: Path) -> None:
    train_here(tmp_path / "async")
    train_here(tmp_path / "sync", "checkpoint.async_save=false")
    for step in (4, 6):
        assert files_of(tmp_path / "async", step) == files_of(tmp_path / "sync", step)
    assert checkpoints(tmp_path / "async") == ["step-00000004", "step-00000006"]


@pytest.mark.gpu
def test_from_a_gpu_asynchronous_saves_write_the_same_bytes(tmp_path: Path) -> None:
    gpu = ["train.device=cuda", "train.precision=bf16"]
    train_here(tmp_path / "async", *gpu)
    train_here(tmp_path / "sync", *gpu, "checkpoint.async_save=false")
    for step in (4, 6):
        assert files_of(tmp_path / "async", step) == files_of(tmp_path / "sync", step)
    shutil.rmtree(tmp_path / "async" / "checkpoints" / "step-00000006")
    train_here(tmp_path / "async", *gpu, resume=True)
    assert files_of(tmp_path / "async", 6) == files_of(tmp_path / "sync", 6)


def test_keep_every_exempts_checkpoints_from_pruning(tmp_path: Path) -> None:
    train_here(tmp_path / "run", "checkpoint.keep=1", "checkpoint.keep_every=4")
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]


def full_disk(times: int) -> Any:
    """`save_file`, whose first calls run out of disk space and leave half a file."""
    left, real = [times], writing.save_file

    def save(tensors: Any, path: Path) -> None:
        if left[0]:
            left[0] -= 1
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    return save


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "unbroken")
    monkeypatch.setattr(writing, "save_file", full_disk(2))
    train_here(tmp_path / "run", "checkpoint.keep=9")
    error = capfd.readouterr().err
    assert error.count("IS NOT WRITTEN: [Errno 28] No space left on device") == 2
    assert "THE CHECKPOINT OF STEP 2 IS" in error
    assert checkpoints(tmp_path / "run") == ["step-00000006"]
    assert files_of(tmp_path / "run", 6) == files_of(tmp_path / "unbroken", 6)


def test_a_failed_save_is_retried_before_the_next_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "save_file", full_disk(1))
    options = ["checkpoint.every=8", "train.steps=20", "checkpoint.keep=9"]
    monkeypatch.setattr("longspan.training.saving.RETRY_STEPS", 3)
    train_here(tmp_path / "run", *options)
    first, *others = checkpoints(tmp_path / "run")
    assert "step-00000011" <= first < "step-00000016"  # once it is found to have failed
    assert others == ["step-00000016", "step-00000020"]


def after_step(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]) -> None:
    """Call an action after each of these steps."""
    from longspan.training import loop

    real = loop.train_step

    def step(state: Any, *arguments: Any) -> Any:
        found = real(state, *arguments)
        actions.get(state.step, lambda: None)()
        return found

    monkeypatch.setattr(loop, "train_step", step)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Steps and losses, in the order of the file."""
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_disk_that_is_full_for_some_steps_costs_no_line_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Evaluations, saves and lines all fail for steps 1 to 5."""
    options = ["track.log_every=1", "train.eval_every=2"]
    train_here(tmp_path / "unbroken", *options)
    with small_disk(tmp_path / "disk", "4m") as disk:
        run_dir = disk.path / "run"
        after_step(monkeypatch, {1: disk.fill, 6: disk.free})
        train_here(run_dir, *options)
        assert losses(run_dir) == losses(tmp_path / "unbroken")
        assert checkpoints(run_dir) == ["step-00000006"]
        assert files_of(run_dir, 6) == files_of(tmp_path / "unbroken", 6)
    error = capfd.readouterr().err
    assert "THE CHECKPOINT OF STEP 2 IS NOT WRITTEN" in error
    assert error.count("metrics.jsonl: No space left on device; training continues") == 1


def test_a_console_on_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `longspan train 2> FILE`."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        log = (disk.path / "log").open("w", buffering=1)

        def fill() -> None:
            log.write("." * (-log.tell() % 4096))  # no room in the page that is in use
            disk.fill()

        after_step(monkeypatch, {1: fill, 5: disk.free})
        with redirect_stderr(log):
            train_here(tmp_path / "run", "track.log_every=1")
        log.close()
        assert "step 6/6" in (disk.path / "log").read_text()
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize("failures", [2, 9])
def test_a_last_save_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(writing, "save_file", full_disk(failures))
    monkeypatch.setattr(saving, "LAST_RETRIES_S", (0.0, 0.1))
    fails = pytest.raises(SaveFailed, match="step 6, could not be written")
    with fails if failures > 2 else nullcontext():
        train_here(tmp_path / "run", "checkpoint.every=0")
    assert checkpoints(tmp_path / "run") == ([] if failures > 2 else ["step-00000006"])


def test_a_disk_that_stays_full_ends_with_exit_code_1_and_the_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(1, *SHORT, EVERY, "checkpoint.async_save=false")
    (tmp_path / "run.toml").write_text(dump_run(run))
    train_here(tmp_path / "unbroken")
    monkeypatch.setattr(saving, "LAST_RETRIES_S", (0.0,))
    with small_disk(tmp_path / "disk", "4m") as disk:
        run_dir = disk.path / "run"
        after_step(monkeypatch, {5: disk.fill})
        assert main(["train", str(tmp_path / "run.toml"), "--run-dir", str(run_dir)]) == 1
        error = capfd.readouterr().err
        assert error.count("THE CHECKPOINT OF STEP 6 IS NOT WRITTEN") == 2
        assert (
            f"longspan: the last checkpoint, of step 6, could not be written to {run_dir}" in error
        )
        assert "Traceback" not in error
        assert checkpoints(run_dir) == ["step-00000002", "step-00000004"]
        disk.free()
        monkeypatch.undo()
        train_here(run_dir, resume=True)
        assert files_of(run_dir, 6) == files_of(tmp_path / "unbroken", 6)


def test_a_run_folder_that_is_removed_under_a_run_is_reported_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(dump_run(run_of(1, *SHORT, "track.log_every=1")))
    run_dir = tmp_path / "run"
    after_step(monkeypatch, {3: lambda: shutil.rmtree(run_dir)})
    assert main(["train", str(tmp_path / "run.toml"), "--run-dir", str(run_dir)]) == 1
    error = capfd.readouterr().err
    assert f"cannot save step 6: the run folder {run_dir} was removed while the run" in error
    assert "Traceback" not in error
    assert not run_dir.exists()


def test_a_save_that_is_slower_than_the_training_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real, may_write = writing.save_file, threading.Event()

    def save(tensors: Any, path: Path) -> None:
        may_write.wait(60)
        real(tensors, path)

    message = "still writing the checkpoint of step 2: waiting"
    monkeypatch.setattr(writing, "save_file", save)
    from longspan.training.saving import Saver

    finish = Saver.finish

    def finish_then(self: Saver) -> None:
        may_write.set()
        finish(self)

    monkeypatch.setattr(Saver, "finish", finish_then)
    train_here(tmp_path / "run")
    assert message in capfd.readouterr().err
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]


def fail_on_the_second(rank: int, world: int, run_dir: str) -> None:
    real = writing.save_file
    if rank == 1:
        writing.save_file = full_disk(1)
    try:
        run = run_of(world, *SHORT, EVERY, "layout.zero=3")
        train(run, Path(run_dir), world=World(rank, world, rank))
    finally:
        writing.save_file = real


def test_all_ranks_discard_what_one_could_not_write(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(fail_on_the_second, 2, str(tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]


DAMAGES = ["flip", "truncate", "remove", "manifest", "no manifest"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_used(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run")
    unbroken = files_of(tmp_path / "run", 6)
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    file = newest / ("manifest.json" if "manifest" in damage else "optimizer-00000.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "flip" | "manifest":
            file.write_bytes(content)
        case "truncate":
            file.write_bytes(content[:-9])
        case _:
            file.unlink()
    capfd.readouterr()
    train_here(tmp_path / "run", resume=True)
    error = capfd.readouterr().err
    assert "step-00000006: " in error
    assert "it is quarantined" in error
    assert "resuming at step 4" in error
    assert files_of(tmp_path / "run", 6) == unbroken
    assert "bad-step-00000006" in checkpoints(tmp_path / "run")


def test_without_an_intact_checkpoint_nothing_restarts_from_scratch(tmp_path: Path) -> None:
    train_here(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact; 2 were quarantined"):
        train_here(tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train_here(tmp_path / "run", resume=True)  # none at all: from step 0


def test_a_file_in_the_folder_asks_for_a_checkpoint_and_another_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspan.training import loop

    real, run_dir = loop.train_step, tmp_path / "run"

    def step(state: Any, *arguments: Any) -> Any:
        found = real(state, *arguments)
        if state.step == 1:
            (run_dir / "SAVE").touch()
        if state.step == 4:
            (run_dir / "STOP").touch()
        return found

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(Stopped, match="stopped at step 4 of 6, checkpoint saved") as raised:
        train_here(run_dir, "checkpoint.every=0", "checkpoint.keep=9")
    assert not raised.value.by_signal
    assert checkpoints(run_dir) == ["step-00000001", "step-00000004"]
    assert not (run_dir / "SAVE").exists()
    assert not (run_dir / "STOP").exists()


def test_checkpoints_are_listed_checked_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", "checkpoint.keep=9")
    run_dir = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["checkpoint", "ls", run_dir]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "model-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", run_dir]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("intact") for line in lines] == [True, False, True]
    assert "model-00000.safetensors is damaged" in lines[1]
    assert main(["checkpoint", "rm", run_dir, "3"]) == 2
    assert main(["checkpoint", "rm", run_dir, "2", "6"]) == 2
    assert "step 6 is the last intact checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "rm", run_dir, "2", "4"]) == 0
    assert checkpoints(tmp_path / "run") == ["step-00000006"]
    assert main(["checkpoint", "verify", run_dir, "--json"]) == 0
    assert main(["checkpoint", "ls", str(tmp_path / "nothing")]) == 2


def rank_that_cannot_read(rank: int, world: int, run_dir: str, kind: str) -> str:
    from longspan.checkpoint import reading
    from longspan.training import state

    def fail(path: Path, within: Path) -> str:
        raise OSError(5, "Input/output error")

    def fail_to_move(path: Path) -> Path:
        raise OSError(30, "Read-only file system")

    real = reading.sha256_of, state.quarantine
    if kind == "read" and rank == 1:
        reading.sha256_of = fail
    if kind == "quarantine":
        state.quarantine = fail_to_move
    run = run_of(world, *SHORT, EVERY, "layout.zero=3")
    try:
        with pytest.raises(UserError) as caught:
            train(run, Path(run_dir), resume=True, world=World(rank, world, rank))
    finally:
        reading.sha256_of, state.quarantine = real
    return str(caught.value)


@pytest.mark.parametrize("kind", ["read", "quarantine", "all bad", "another version"])
def test_a_transient_error_ends_all_ranks_and_nothing_is_quarantined(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    train_here(tmp_path / "run")
    before = checkpoints(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        manifest = path / "manifest.json"
        if kind in ("quarantine", "all bad"):
            manifest.unlink()
        if kind == "another version":
            manifest.write_text(manifest.read_text().replace("checkpoint-3", "checkpoint-9"))
    messages = ranks.run(rank_that_cannot_read, 2, str(tmp_path / "run"), kind, timeout=60)
    expected = {
        "read": ("another rank could not read", "Input/output error"),
        "quarantine": ("Read-only file system", "cannot use the checkpoint"),
        "all bad": ("is intact; 2 were quarantined",) * 2,
        "another version": ("its format is longspan-checkpoint-9",) * 2,
    }
    assert all(part in text for part, text in zip(expected[kind], messages, strict=True))
    after = checkpoints(tmp_path / "run")
    assert after == ([f"bad-{name}" for name in before] if kind == "all bad" else before)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    train_here(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "step-00000100")
    shutil.copytree(folder / "step-00000004", folder / "step-000000005")
    train_here(tmp_path / "run", "train.steps=8", resume=True)
    names = ["bad-step-00000100", "step-000000005", "step-00000006", "step-00000008"]
    assert checkpoints(tmp_path / "run") == names


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("longspan.training.saving.prune", fail)
    train_here(tmp_path / "run")
    assert "an old checkpoint could not be removed: [Errno 13]" in capfd.readouterr().err
    assert checkpoints(tmp_path / "run")[-1] == "step-00000006"


def test_a_request_that_cannot_be_removed_counts_once(tmp_path: Path) -> None:
    (tmp_path / "SAVE").mkdir()
    with StopRequests(tmp_path) as requests:
        assert requests.poll() == (False, True)
        assert requests.poll() == (False, False)


def test_a_kill_while_one_is_replaced_loses_neither(tmp_path: Path) -> None:
    shards = {"model/a": TensorShard.full(torch.zeros(3))}
    path = save(tmp_path, 5, shards, {})
    path.rename(tmp_path / ".step-00000005.replaced")  # killed here
    (tmp_path / ".step-00000005.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    save(tmp_path, 5, shards, {"again": 1})
    assert open_checkpoint(path).state == {"again": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_the_history_records_what_a_failure_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from longspan.training import loop

    real = loop.train_step

    def step(state: Any, *arguments: Any) -> Any:
        if state.step == 3:
            raise RuntimeError("a fault")
        return real(state, *arguments)

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(RuntimeError, match="a fault"):
        train_here(tmp_path / "run", "track.log_every=100", "checkpoint.async_save=false")
    monkeypatch.undo()
    train_here(tmp_path / "run", resume=True)
    lines = [json.loads(x) for x in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    starts = [(line["step"], line["lost_steps"]) for line in lines if line["event"] == "start"]
    assert starts == [(0, 0), (2, 1)]
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in metrics if "goodput" in line]
    assert 0 < found["goodput"] < 1
    assert found["causes"] == {"RuntimeError: a fault": 1}
    assert "1 restart (1 × RuntimeError: a fault), 1 step lost" in capfd.readouterr().err
