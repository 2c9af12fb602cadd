"""A lost rank is replaced while the others go on, and filled from a replica, not from the disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.faults import FAULT, FAULT_LOG, LAUNCHER_PID
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training import train
from longspan.training.recovery import agree, close_connections
from longspan.wording import counted
from tests.harness import Ranks
from tests.launching.test_local import SMALL, wait_until
from tests.slow import slow

SETTINGS = [*SMALL[:-1], "train.global_batch=4", "train.steps=100", "checkpoint.every=6"]
SETTINGS += ["train.eval_every=9", "train.eval_samples=2", "track.log_every=1", "track.prompt="]


def train_rank(rank: int, world: int, settings: list[str], run_dir: str) -> None:
    run = load_run(None, settings, world=world)
    train(run, Path(run_dir), world=World(rank, world, rank))


def last_checkpoint(run_dir: Path) -> dict[str, bytes]:
    path = run_dir / "checkpoints" / "step-00000100"
    return {file.name: file.read_bytes() for file in path.iterdir()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run_dir / "history.jsonl") if event["event"] == kind]


def steps(run_dir: Path, key: str) -> list[int]:
    return [line["step"] for line in lines(run_dir / "metrics.jsonl") if key in line]


class FaultyRun:
    """A run under `longspan train --nproc --restarts`, whose ranks are killed."""

    def __init__(self, run_dir: Path, world: int, settings: list[str], fault: str) -> None:
        command = [sys.executable, "-m", "longspan", "train", *settings, "--nproc", str(world)]
        command += ["--restarts", "9", "--run-dir", str(run_dir)]
        fault_log = str(run_dir.parent / "fault")
        environment = {**os.environ, FAULT: fault, FAULT_LOG: fault_log}
        self.run_dir, self._world = run_dir, world
        self._process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def pids(self) -> dict[int, int]:
        """The processes by rank, from the heartbeat files that they have open."""
        found = {}
        entry = f"{LAUNCHER_PID}={self._process.pid}"
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if entry not in (folder / "environ").read_text().split("\0"):
                    continue
                for file in (folder / "fd").iterdir():
                    name = Path(os.readlink(file))
                    if name.parent.name == "heartbeats":
                        found[int(name.name[5:])] = int(folder.name)
            except OSError:
                continue  # it has ended
        return found

    def wait_for_recovery(self, count: int) -> None:
        """Wait until the run has recovered so often, and all ranks have taken a step since."""

        def has_recovered() -> bool:
            found = events(self.run_dir, "recovery")
            taken = max(steps(self.run_dir, "loss"), default=0)
            return len(found) == count and taken > found[-1]["step"] + 1

        wait_until(has_recovered, 300)

    def finish(self) -> str:
        _, errors = self._process.communicate(timeout=300)
        assert self._process.returncode == 0, errors
        return errors

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize(
    ("layout", "world", "lost"),
    [
        pytest.param(["layout.replicate=2"], 2, [1, 0], marks=slow("elastic"), id="replicate"),
        pytest.param(
            ["layout.replicate=2", "layout.shard=2"],
            4,
            [3],
            marks=slow("elastic"),
            id="replicate-shard",
        ),
    ],
)
def test_a_lost_rank_is_replaced_and_the_run_ends_with_the_same_bytes(
    ranks: Ranks, tmp_path: Path, layout: list[str], world: int, lost: list[int]
) -> None:
    """The first of the `lost` ranks is killed during a save, others at any moment."""
    settings, reference, run_dir = [*SETTINGS, *layout], tmp_path / "reference", tmp_path / "run"
    slow = [*settings, "train.hang_timeout_s=60"]
    run = FaultyRun(run_dir, world, slow, f"kill@staging:{lost[0]}:2")
    try:
        for count, rank in enumerate(lost):
            wait_until(lambda: len(run.pids()) == world, 300)
            before = run.pids()
            if count > 0:
                os.kill(before[rank], signal.SIGKILL)
            run.wait_for_recovery(count + 1)
            after = run.pids()
            assert after.keys() == set(range(world))
            assert {r for r in before if before[r] != after[r]} <= {rank}
        errors = run.finish()
    finally:
        run.close()
    ranks.run(train_rank, world, settings, str(reference))
    assert last_checkpoint(run_dir) == last_checkpoint(reference)
    assert steps(run_dir, "loss") == list(range(1, 101))
    assert steps(run_dir, "validation_loss") == steps(reference, "validation_loss")
    saved = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert sorted(saved) == sorted(path.name for path in (reference / "checkpoints").iterdir())
    recoveries = events(run_dir, "recovery")
    assert [event["filled"] for event in recoveries] == [
        [[r, (r + world // 2) % world]] for r in lost
    ]
    assert [event["lost_steps"] for event in recoveries] == [0] * len(lost)
    assert recoveries[0]["step"] == 12
    assert len(events(run_dir, "start")) == 1  # nothing was read from a checkpoint
    assert "resuming" not in errors
    assert f"longspan: rank {lost[0]} was killed by SIGKILL\n" in errors
    assert f"longspan: replacing rank {lost[-1]}; {9 - len(lost)} restarts left\n" in errors
    assert f"0 restarts, {counted(len(lost), 'lost rank')} replaced, 0 steps lost" in errors


@pytest.mark.parametrize(
    ("held", "step", "sources"),
    [
        ([7, -1, 7, 7], 7, [0, 3, 0, 3]),
        ([-1, 7, 7, 7], 7, [2, 1, 2, 1]),
        ([7, -1, 8, 7], 7, [0, 3, 0, 3]),  # rank 2 is a step ahead, but the other shard is not
        ([8, 7, 7, 8], 8, [0, 3, 0, 3]),
        ([8, -1, 8, 7], None, []),  # no step that both shards are held of
        ([7, -1, 7, -1], None, []),  # both replicas of a shard are lost
    ],
)
def test_ranks_agree_on_the_newest_step_that_every_shard_is_held_of(
    held: list[int], step: int | None, sources: list[int]
) -> None:
    assert agree([[0, 2], [1, 3]], held) == (step, dict(enumerate(sources)))


def wait_in_a_collective(rank: int, store: str, results: Connection) -> None:
    """Rank 1 never joins the all-reduce of rank 0, nor does it end."""
    file = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        signal.pause()
    threading.Timer(0.2, close_connections).start()
    try:
        dist.all_reduce(torch.ones(1))
        results.send("done")
    except RuntimeError as error:
        results.send(str(error))


def test_a_collective_that_waits_for_a_healthy_rank_is_ended(tmp_path: Path) -> None:
    """As it must be if that rank has left it, because of a rank that this one does not talk to."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    arguments = [(rank, str(tmp_path / "store"), theirs) for rank in range(2)]
    processes = [context.Process(target=wait_in_a_collective, args=args) for args in arguments]
    try:
        for process in processes:
            process.start()
        assert ours.poll(60)
        assert "Connection closed" in ours.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("settings", "world", "replaces"),
    [
        (["layout.replicate=2"], 2, True),
        (["layout.zero=0"], 2, True),
        (["layout.replicate=2", "layout.tensor=2"], 4, True),
        ([], 2, False),
        (["layout.tensor=2"], 2, False),
        (["layout.replicate=2", "engine.name=deepspeed"], 2, False),
        (["layout.replicate=2", "engine.name=accelerate"], 2, False),
        (["layout.replicate=2", "train.device=cuda"], 2, False),
        (["layout.replicate=2", "train.compile=true"], 2, False),
    ],
)
def test_ranks_are_replaced_in_runs_that_can_go_on(
    settings: list[str], world: int, replaces: bool
) -> None:
    run = load_run(None, [*SETTINGS, "train.device=cpu", *settings], world=world)
    assert run.replaces_lost_ranks(world) is replaces
