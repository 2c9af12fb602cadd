"""Under torchrun: workers and agents are lost, and told to stop; test_node.py loses nodes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.checkpoint import list_checkpoints, load, step_of
from longspan.cli import main
from longspan.errors import Stopped
from longspan.faults import FAULT, FAULT_LOG
from longspan.runfile import dump_run
from longspan.tracking.history import STOP_REQUESTED
from longspan.training import train
from tests.launching.test_local import SMALL, is_alive, last_step, wait_until
from tests.parallel.test_apply import run_of
from tests.slow import slow

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
RUN = ["train.schedule=constant", "track.log_every=1", "checkpoint.every=2"]
RUN += ["checkpoint.async_save=false"]
ENDLESS = "train.steps=1000000"
TIMEOUTS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
"""An agent that does not respond is given up after seconds, not most of a minute."""

Agents = list["subprocess.Popen[bytes]"]


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Torchrun agents, killed at the end of the test."""
    started: Agents = []
    yield started
    for agent in started:
        agent.kill()
        agent.wait()


def torchrun(
    run_dir: Path, options: list[str], overrides: list[str], **environment: str
) -> subprocess.Popen[bytes]:
    file = run_dir.parent / "run.toml"
    file.write_text(dump_run(run_of(1, *SMALL)))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "longspan", "train"]
    with (run_dir.parent / "console").open("ab") as console:
        return subprocess.Popen(
            [*command, str(file), *overrides, "--resume", str(run_dir)],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=console,
            stderr=console,
        )


def nodes(tmp_path: Path) -> tuple[list[str], int]:
    """Options of an agent that stands for one of up to two nodes, and the rendezvous port."""
    port = free_port()
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    options += ["--rdzv-id", "a-run", "--rdzv-conf", TIMEOUTS, "--local-addr", "127.0.0.1"]
    return options, port


def console(run_dir: Path) -> str:
    """The output of all agents of a test."""
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


def has_started(run_dir: Path, ranks: int, count: int) -> bool:
    """Whether the run has started `count` times or more, the last time on `ranks` ranks."""
    found = starts(run_dir)
    return len(found) >= count and found[-1]["ranks"] == ranks


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def assert_same_as_uninterrupted(run_dir: Path) -> None:
    """Compare the newest checkpoint with that of the same run in one process."""
    newest = list_checkpoints(run_dir / "checkpoints")[-1]
    reference = run_dir.parent / "uninterrupted"
    train(run_of(1, *SMALL, "train.schedule=constant", f"train.steps={step_of(newest)}"), reference)
    found, expected = load(newest, "model"), load(reference / "checkpoints" / newest.name, "model")
    assert found.keys() == expected.keys()
    for name in found:
        assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@slow("elastic")
def test_killed_workers_are_replaced_until_the_run_is_done(tmp_path: Path, agents: Agents) -> None:
    """Rank 1 is killed in the third step of every start; then the agent, with both its workers."""
    run_dir = tmp_path / "run"
    options = ["--nproc-per-node", "2", "--max-restarts", "9", "--standalone"]
    fault = {FAULT: "kill@step:1:3", FAULT_LOG: str(tmp_path / "fault")}
    agents.append(torchrun(run_dir, options, [*RUN, "train.steps=6"], **fault))
    assert agents[0].wait(300) == 0, console(run_dir)
    assert [start["step"] for start in starts(run_dir)] == [0, 2, 4]
    assert_same_as_uninterrupted(run_dir)

    agents.append(torchrun(run_dir, options, [*RUN, ENDLESS]))
    wait_until(lambda: has_started(run_dir, 2, 4) and len(workers_of(agents[1].pid)) == 2)
    workers = workers_of(agents[1].pid)
    agents[1].kill()
    wait_until(lambda: not any(map(is_alive, workers)))


@slow("elastic")
def test_a_node_that_is_told_to_stop_saves_and_the_other_goes_on(
    tmp_path: Path, agents: Agents
) -> None:
    """As when a scheduler drains one node: its agent gets SIGTERM, and nobody sends the other one
    a signal, which must not take the run for finished.
    """
    run_dir = tmp_path / "run"
    options, port = nodes(tmp_path)
    run = [*RUN, ENDLESS, "checkpoint.every=1000000"]
    agents.append(torchrun(run_dir, options, run))
    wait_until(lambda: is_listening(port))
    agents.append(torchrun(run_dir, options, run))
    wait_until(lambda: has_started(run_dir, 2, 1) and last_step(run_dir) >= 3)
    agents[1].terminate()
    assert agents[1].wait(120) != 0
    wait_until(lambda: has_started(run_dir, 1, 2))
    saved = starts(run_dir)[-1]["step"]
    assert saved >= 3  # and no periodic checkpoint was due
    assert starts(run_dir)[-1]["cause"] == STOP_REQUESTED  # of the other rank
    wait_until(lambda: last_step(run_dir) >= saved + 3)
    assert agents[0].poll() is None
    (run_dir / "STOP").touch()
    assert agents[0].wait(120) == 0
    assert_same_as_uninterrupted(run_dir)


@pytest.mark.parametrize(
    ("restarts", "by_signal", "code"), [(9, True, 3), (9, False, 0), (0, False, 3)]
)
def test_torchrun_is_told_to_restart_workers_that_a_signal_to_another_node_has_stopped(
    restarts: int, by_signal: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(args: object) -> None:
        raise Stopped("stopped", by_signal=by_signal)

    monkeypatch.setattr("longspan.cli.training.train", stop)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    assert main(["train"]) == code


def test_a_store_that_is_shared_with_the_agent_gives_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("from longspan.launching.local import join_launcher\njoin_launcher()\n")
    options = ["--nproc-per-node", "1", "--max-restarts", "3", "--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and pass torchrun" in done.stderr


MANY = """
import sys, torch, longspan
from torch import nn

def loss(model, x):
    return (model(x)[:, 0] - x.sum(1)).square().sum(), len(x)

data = [torch.full((4,), n / 16) for n in range(16)]
run = {"train": {"steps": 1, "global_batch": 2, "device": "cpu"}}
for n in range(6):
    model = nn.Sequential(nn.Linear(4, 1))
    longspan.Trainer(model, loss, data, run=run, run_dir=f"{sys.argv[1]}/{n}").train()
print("all done")
"""


@slow("elastic")
def test_a_program_under_torchrun_trains_several_models(tmp_path: Path) -> None:
    """With the addresses of the first ones left in the store, the fifth could not connect."""
    program = tmp_path / "program.py"
    program.write_text(MANY)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*command, str(program), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.stdout.count("all done") == 2, found.stderr[-2000:]
