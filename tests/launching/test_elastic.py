"""Under torchrun: workers, agents and nodes that are lost, and one that comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import load
from longspan.faults import FAULT, LOG
from longspan.runfile import dump_run
from longspan.training import train
from tests.launching.test_local import SMALL, is_alive, wait_until
from tests.parallel.test_apply import run_of

FIXED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
"""An agent that does not answer is gone after seconds, not most of a minute."""


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Torchruns, which end with the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        agent.kill()
        agent.wait()


def torchrun(
    run_dir: Path, options: list[str], run: list[str], **environment: str
) -> subprocess.Popen[bytes]:
    file = run_dir.parent / "run.toml"
    file.write_text(dump_run(run_of(1, *SMALL)))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "longspan", "train"]
    with (run_dir.parent / "console").open("ab") as console:
        return subprocess.Popen(
            [*command, str(file), *run, "--resume", str(run_dir)],
            env={**os.environ, **FIXED, **environment},
            stdout=console,
            stderr=console,
        )


def console(run_dir: Path) -> str:
    """What all torchruns of a test have said."""
    return (run_dir.parent / "console").read_text()


def workers_of(agent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == agent:
                found.append(int(stat.parent.name))
    return found


def starts(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "history.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "start"]


def last_step(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load(run_dir / "checkpoints" / f"step-{step:08d}", "model")


def unbroken(run_dir: Path, steps: int) -> dict[str, torch.Tensor]:
    """Of the same run in one process."""
    train(run_of(1, *SMALL, f"train.steps={steps}", "train.schedule=constant"), run_dir)
    return weights(run_dir, steps)


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-5 * b[name].norm(), name


def test_killed_workers_are_replaced_and_a_killed_agent_takes_its_own_along(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    """Rank 1 is killed in the third step of every start; then the agent is."""
    run_dir = tmp_path / "run"
    run = ["train.schedule=constant", "checkpoint.every=2", "checkpoint.async_save=false"]
    options = ["--nproc-per-node", "2", "--max-restarts", "9", "--standalone"]
    fault = {FAULT: "kill@step:1:3", LOG: str(tmp_path / "fault")}
    agents.append(torchrun(run_dir, options, [*run, "train.steps=6"], **fault))
    assert agents[0].wait(300) == 0, console(run_dir)
    assert [line["step"] for line in starts(run_dir)] == [0, 2, 4]
    assert_close(weights(run_dir, 6), unbroken(tmp_path / "unbroken", 6))

    agents.append(torchrun(run_dir, options, [*run, "train.steps=1000000"]))
    wait_until(lambda: len(starts(run_dir)) == 4 and len(workers_of(agents[1].pid)) == 2)
    workers = workers_of(agents[1].pid)
    agents[1].kill()
    wait_until(lambda: not any(map(is_alive, workers)))


def test_fewer_nodes_go_on_and_one_that_comes_back_joins(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    """Two agents, as of two nodes. Without the one that hosts the rendezvous all end."""
    run_dir = tmp_path / "run"
    port = free_port()
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", *where]
    options += ["--rdzv-id", "a-run", "--rdzv-conf", SOON, "--local-addr", "127.0.0.1"]
    run = ["train.steps=1000000", "train.schedule=constant", "track.log_every=1"]
    run += ["checkpoint.every=5", "train.hang_timeout_s=20"]
    slow = {FAULT: "slow@step:0:1", LOG: str(tmp_path / "fault")}

    def join() -> subprocess.Popen[bytes]:
        agents.append(torchrun(run_dir, options, run, **slow))
        return agents[-1]

    def has_start_of(ranks: int, number: int) -> bool:
        found = starts(run_dir)
        return len(found) >= number and found[-1]["ranks"] == ranks

    host = join()
    wait_until(lambda: is_listening(port))
    other = join()
    wait_until(lambda: has_start_of(2, 1) and last_step(run_dir) >= 7, 120)
    other.send_signal(signal.SIGKILL)
    wait_until(lambda: has_start_of(1, 2), 120)
    at = last_step(run_dir)
    wait_until(lambda: last_step(run_dir) >= at + 7, 120)
    other = join()
    wait_until(lambda: has_start_of(2, 3), 120)
    at = last_step(run_dir)
    wait_until(lambda: last_step(run_dir) >= at + 7, 120)
    host.send_signal(signal.SIGKILL)
    assert other.wait(120) != 0
    assert "RendezvousConnectionError" in console(run_dir)

    steps = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    assert steps > 5
    assert_close(weights(run_dir, steps), unbroken(tmp_path / "unbroken", steps))


def test_a_stop_under_torchrun_is_not_started_again(
    tmp_path: Path, agents: list[subprocess.Popen[bytes]]
) -> None:
    run_dir = tmp_path / "run"
    options = ["--nproc-per-node", "1", "--max-restarts", "3", "--standalone"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    agents.append(torchrun(run_dir, options, ["train.steps=1000000"], **environment))
    wait_until(lambda: last_step(run_dir) > 0)
    (run_dir / "STOP").touch()
    assert agents[0].wait(120) == 0
    assert "stopped at step" in console(run_dir)
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and give torchrun" in console(run_dir)
    assert len(starts(run_dir)) == 1
