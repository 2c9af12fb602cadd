"""Ranks from each launcher; mpirun, deepspeed and accelerate themselves start two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan.config import Layout
from longspan.errors import UserError
from longspan.faults import LAUNCHER_PID
from longspan.loopback import STORE
from longspan.parallel import launchers
from longspan.parallel.launchers import adopt_launcher, first_host
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World, world_of_environment
from longspan.tracking import read_metrics
from tests.launching.test_elastic import free_port
from tests.slow import slow

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "pod-0.train"}


@pytest.mark.parametrize(
    ("given", "rank", "meets"),
    [
        (OPEN_MPI | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("3", "4", "1"), ("h", "1")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("3", "4", "1"), None),
        (SLURM, ("5", "8", "1"), ("gpu07", "23456")),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, ("5", "8", "1"), None),
        (MPICH | {"PMI_JOBID": "kvs_9_0"}, ("1", "2", "1"), None),
        (INDEXED_JOB | {"MASTER_PORT": "29500"}, ("2", "3", "0"), ("pod-0.train", "29500")),
    ],
)
def test_the_variables_of_each_launcher_become_those_of_torchrun(
    given: dict[str, str], rank: tuple[str, ...], meets: tuple[str, ...] | None
) -> None:
    found = dict(given)
    assert adopt_launcher(found) is not None
    assert tuple(found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")) == rank
    if meets:
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == meets
        assert STORE not in found
    else:  # all on one machine: a file, in a folder of this user's
        assert Path(found[STORE]).parent.stat().st_mode & 0o077 == 0
        assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert adopt_launcher(found) is None  # once


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", **SLURM},  # srun torchrun
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # an interactive shell
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_one_process_and_torchrun_are_left_as_they_are(given: dict[str, str]) -> None:
    found = dict(given)
    assert adopt_launcher(found) is None
    assert found == given


def test_what_cannot_be_known_is_an_error() -> None:
    with pytest.raises(UserError, match="does not say where they meet: set MASTER_ADDR"):
        adopt_launcher(dict(OPEN_MPI))
    with pytest.raises(UserError, match="SLURM_PROCID to 'x'"):
        adopt_launcher(SLURM | {"SLURM_PROCID": "x"})


def test_a_folder_that_others_can_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"longspan-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"longspan-{os.getuid()}").chmod(0o777)
    with pytest.raises(UserError, match="only you can use"):
        adopt_launcher(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a-b.c[7]-ib,x", "a-b.c7-ib"),
        ("one,two", "one"),
        ("", ""),
        ("$(reboot)", ""),
    ],
)
def test_the_first_host_of_slurms_notation(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_plain_pair_of_rank_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert world_of_environment() == World(1, 2, 0)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UserError, match="expected less than WORLD_SIZE, 2"):
        world_of_environment()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun has started 2 processes, which meet at h:1"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"},
            "accelerate launch has started 2 processes, which meet at h:1",
        ),
        (
            {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"},
            "deepspeed has started 2 processes, which meet at h:1",
        ),
        (SLURM, "RANK and WORLD_SIZE are set: this is rank 0 of 2 processes, which meet at h:1"),
        ({"RANK": "1"}, ""),  # rank 0 says it
        ({LAUNCHER_PID: "7"}, ""),  # of longspan train --nproc
    ],
)
def test_rank_0_says_once_who_has_set_rank(
    capsys: pytest.CaptureFixture[str], given: dict[str, str], said: str
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", **given}
    launchers._say.cache_clear()
    for _ in range(2):
        assert adopt_launcher(environment) is None
    assert capsys.readouterr().err.strip() == said


def test_what_was_translated_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    launchers._say.cache_clear()
    environment = SLURM | {"SLURM_PROCID": "0"}
    for _ in range(2):
        adopt_launcher(environment)
    said = "srun has started 8 processes, which meet at gpu07:23456\n"
    assert capsys.readouterr().err == said


def test_processes_that_do_not_know_where_to_meet_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", STORE):
        monkeypatch.delenv(name, raising=False)
    mesh = open_mesh(Layout(), World(0, 2, 0), torch.device("cpu"))
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT is not set: set MASTER_ADDR"):
        mesh.__enter__()


PROGRAM = ["train", "model.hidden=32", "model.heads=2", "model.layers=1", "data.source=recall"]
PROGRAM += ["data.context=64", "data.recall_pairs=4", "train.steps=2", "train.global_batch=2"]
PROGRAM += ["train.eval_samples=2", "layout.shard=2", "--run-dir", "run"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m"]
DEEPSPEED = ["deepspeed", "--num_nodes", "1", "--num_gpus", "2", "--module"]
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m"]


@pytest.mark.parametrize(
    "launcher",
    [
        MPIRUN,
        pytest.param(DEEPSPEED, marks=slow("parity")),
        pytest.param(ACCELERATE, marks=slow("parity")),
    ],
    ids=lambda words: words[0],
)
def test_the_launcher_itself_trains_with_two_ranks(tmp_path: Path, launcher: list[str]) -> None:
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which(launcher[0], path=path):
        pytest.skip(f"{launcher[0]} is not installed")
    port = str(free_port())
    if launcher is not MPIRUN:  # which needs none
        option = "--master_port" if launcher is DEEPSPEED else "--main_process_port"
        launcher = [*launcher[:-1], option, port, launcher[-1]]
    done = subprocess.run(
        [*launcher, "longspan", *PROGRAM],
        env=os.environ | {"PATH": path, "DS_ACCELERATOR": "cpu", "HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    meets = "through a file" if launcher is MPIRUN else f"at 127.0.0.1:{port}"
    said = f"{' '.join(launcher[:2]) if 'launch' in launcher else launcher[0]} has started 2 "
    said += f"processes, which meet {meets}"
    assert done.stderr.count(said) == 1, done.stderr
    assert "shard 2" in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 2


def test_accelerates_one_process_on_the_cpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process without a word."""
    launchers._say.cache_clear()
    assert adopt_launcher({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}) is None
    assert "accelerate launch --cpu starts one process" in capsys.readouterr().err
    assert adopt_launcher({"ACCELERATE_USE_CPU": "True"}) is None  # --num_processes 1
    assert capsys.readouterr().err == ""
