"""Ranks from launchers other than torchrun; Open MPI's own starts two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.errors import UserError
from longspan.loopback import STORE
from longspan.parallel.launchers import adopt_launcher, first_host
from longspan.parallel.world import World, world_of_environment
from longspan.tracking import read_metrics

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


@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_mpirun_trains_with_two_ranks(tmp_path: Path) -> None:
    options = ["model.hidden=32", "model.heads=2", "data.context=64", "train.steps=2"]
    options += ["train.global_batch=2", "train.eval_samples=2", "track.prompt=", "layout.shard=2"]
    program = [sys.executable, "-m", "longspan", "train", *options, "--run-dir", "run"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *program]
    done = subprocess.run(mpirun, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mpirun has started 2 processes, which meet through a file" in done.stderr
    assert "shard 2" in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 2
