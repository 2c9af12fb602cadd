"""The batch script for Slurm: with programs that stand for Slurm's, and with a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.checkpoint import list_checkpoints, step_of
from longspan.cli import main
from longspan.errors import UserError
from longspan.launching.job import Job
from longspan.launching.slurm import script
from longspan.runfile import dump_run
from tests.launching.test_elastic import free_port, starts
from tests.launching.test_local import SMALL, last_step, wait_until
from tests.parallel.test_apply import run_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
is_real = pytest.mark.skipif("LONGSPAN_SLURM" not in os.environ, reason="runs by `make slurm`")

FAKES = {
    "scontrol": """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'gpu07\\ngpu08\\n'; else echo "$@" > "$RECORD.requeue"; fi
""",
    "srun": """#!/usr/bin/env python3
import json, os, pathlib, sys, time
pathlib.Path(os.environ["RECORD"]).write_text(json.dumps(sys.argv[1:]))
stop = pathlib.Path(os.environ["STOP_FILE"])
while os.environ["WAITS"] == "1" and not stop.exists():
    time.sleep(0.01)
sys.exit(int(os.environ["CODE"]))
""",
}


class Slurm:
    """A batch job whose programs of Slurm record what they are asked for."""

    def __init__(self, folder: Path, job: Job, *, waits: bool = False, code: int = 0) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name, text in FAKES.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.record, self._job = folder / "record", job
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "RECORD": str(self.record),
            "STOP_FILE": str(Path(job.run_dir) / "STOP"),
            "WAITS": str(int(waits)),
            "CODE": str(code),
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "gpu[07-08]",
        }
        (folder / "job.sbatch").write_text(script(job))
        self.process = subprocess.Popen(["bash", str(folder / "job.sbatch")], env=environment)

    def words(self) -> list[str]:
        wait_until(lambda: self.record.exists() and self.record.read_text())
        return list(json.loads(self.record.read_text()))


def job_of(folder: Path, **more: Any) -> Job:
    fields = {"nodes": 2, "max_nodes": 2, "gpus_per_node": 8, "processes_per_node": 8, **more}
    return Job("a-job", str(folder / "my run.toml"), str(folder / "it's a run"), **fields)


def test_every_node_runs_torchrun_with_the_first_one_as_the_rendezvous(tmp_path: Path) -> None:
    job = job_of(tmp_path, overrides=("data.path=/a b",), cpus_per_node=64)
    slurm = Slurm(tmp_path, job)
    assert slurm.process.wait(60) == 0
    srun, torchrun = " ".join(slurm.words()).split(" torchrun ")
    assert srun == (
        "--ntasks-per-node=1 --cpu-bind=none --open-mode=append --cpus-per-task=64 "
        f"--kill-on-bad-exit=1 --output={job.run_dir}/logs/%x-%j-node-%n.log"
    )
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 10" in torchrun
    assert f"--rdzv-endpoint gpu07:{20000 + 12345 % 12000} " in torchrun
    assert slurm.words()[-5:] == [
        "train",
        job.run_file,
        "data.path=/a b",
        "--resume",
        job.run_dir,
    ]
    assert not slurm.record.with_suffix(".requeue").exists()


def test_usr1_has_the_run_save_and_the_job_requeued(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, job_of(tmp_path), waits=True)
    slurm.words()  # srun has started
    slurm.process.send_signal(signal.SIGUSR1)
    assert slurm.process.wait(60) == 0
    assert (tmp_path / "record.requeue").read_text() == "requeue 12345\n"


def test_a_failure_is_the_failure_of_the_job(tmp_path: Path) -> None:
    assert Slurm(tmp_path, job_of(tmp_path), code=7).process.wait(60) == 7
    assert not (tmp_path / "record.requeue").exists()


def test_directives_say_what_the_job_needs(tmp_path: Path) -> None:
    text = script(job_of(tmp_path, max_nodes=3, minutes=90, partition="gpu", account="lab"))
    found = {line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line}
    assert found >= {"--job-name=a-job", "--time=90", "--nodes=3", "--ntasks-per-node=1"}
    assert found >= {"--gpus-per-node=8", "--partition=gpu", "--account=lab", "--requeue"}
    assert found >= {"--exclusive", "--mem=0", "--signal=B:USR1@300", "--no-kill"}
    assert "--nnodes 2 " in text  # the third node is a hot spare
    assert "gpus" not in script(job_of(tmp_path, gpus_per_node=0))


def test_a_folder_that_slurm_would_read_as_a_pattern_is_refused() -> None:
    for folder in ("/runs/50%", "/runs/a\\b"):
        with pytest.raises(UserError, match="run folder must not have"):
            script(Job("a-job", "run.toml", folder))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs Debian's shellcheck")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    for more in ({}, {"max_nodes": 3}, {"cpus_per_node": 4, "gpus_per_node": 0}):
        text = script(job_of(tmp_path, **more))
        done = subprocess.run(["shellcheck", "-"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm of two nodes on this machine: its own munged, slurmctld and two slurmd."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurmctld slurmd munge")
    if os.getuid():
        pytest.skip("slurmd needs root")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    text = Path(__file__).with_name("slurm.conf").read_text()
    text = text.replace("FOLDER", str(folder)).replace("HOST", socket.gethostname().split(".")[0])
    for number in range(3):
        text = text.replace(f"PORT{number}", str(free_port()))
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munged += [f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"]
    commands = [munged, ["slurmctld", "-D", "-c"]]
    commands += [["slurmd", "-D", "-N", node] for node in ("127.0.0.2", "127.0.0.3")]
    processes = []
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            if command is munged:
                wait_until((folder / "munge.socket").exists)
        wait_until(lambda: "2 idle" in slurm_says("sinfo", "-h", "-o", "%D %T"))
        yield folder
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def slurm_says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def submit(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """Submit a run by the script that `longspan launch slurm` writes; return its folder."""
    run_file, run_dir = folder / "run.toml", folder / f"run {name}"
    run_file.write_text(dump_run(run_of(1, *SMALL, "train.global_batch=4", "train.steps=40")))
    words = ["slurm", str(run_file), "--nodes", "2", "--gpus-per-node", "0"]
    words += ["--processes-per-node", "2", "--run-dir", str(run_dir), "--time", "20"]
    words += ["checkpoint.every=1000", "track.log_every=1", "--name", name]
    assert main(["launch", *words, "-o", str(folder / f"{name}.sbatch")]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[0] == "sbatch"
    subprocess.run(command, check=True, cwd=folder)
    return run_dir


@is_real
def test_a_job_is_requeued_and_ends_with_the_same_weights(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes with two ranks each. USR1 ends one job early; it is requeued, and resumes."""
    whole, broken = (submit(tmp_path, name, capsys) for name in ("whole", "broken"))
    try:
        wait_until(lambda: last_step(broken) >= 3, 300)
        slurm_says("scancel", "--batch", "--signal=USR1", "--name=broken")
        # Slurm holds a requeued job back for two minutes, unless it is told otherwise.
        wait_until(lambda: "PENDING" in slurm_says("squeue", "-h", "-n", "broken", "-o", "%T"))
        job = slurm_says("squeue", "-h", "-n", "broken", "-o", "%A").strip()
        while slurm_says("squeue", "-h", "-n", "broken", "-o", "%T").strip() == "PENDING":
            slurm_says("scontrol", "update", f"jobid={job}", "StartTime=now")
            time.sleep(1)
        wait_until(lambda: not slurm_says("squeue", "-h"), 300)
    finally:
        for log in [*tmp_path.glob("*.log"), *broken.glob("logs/*.log")]:
            print(f"--- {log.name}\n{log.read_text()}")
    first, second = starts(broken)
    assert first["ranks"] == second["ranks"] == 4
    assert 3 <= second["step"] < 40
    assert second["cause"] == "stop requested"
    ends = [list_checkpoints(run / "checkpoints")[-1] for run in (whole, broken)]
    for name in sorted(path.name for path in ends[0].glob("*.safetensors")):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name
    assert {path.name for path in (broken / "logs").iterdir()} == {
        f"broken-{job}-node-{node}.log" for node in (0, 1)
    }


@is_real
def test_a_cancelled_job_saves_and_srun_alone_resumes_it(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM reaches torchrun and its workers, and these a second time from torchrun."""
    run_dir = submit(tmp_path, "cancelled", capsys)
    wait_until(lambda: last_step(run_dir) >= 3, 300)
    slurm_says("scancel", "--name=cancelled")
    wait_until(lambda: not slurm_says("squeue", "-h"))
    (newest,) = list_checkpoints(run_dir / "checkpoints")
    assert step_of(newest) == last_step(run_dir) < 40
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "longspan"]
    command += ["train", str(tmp_path / "run.toml"), "track.log_every=1", "train.device=cpu"]
    done = subprocess.run(
        [*command, "--resume", str(run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "srun has started 4 processes, which meet at 127.0.0.2:" in done.stderr
    assert starts(run_dir)[-1]["step"] == step_of(newest)
    assert last_step(run_dir) == 40
