"""Processes of one command: together they start, end and fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.faults import FAULT, LOG, PARENT, POISON
from longspan.launching.local import run_processes

WORKER = """
import os, sys, time
from longspan.launching.local import join_launcher
join_launcher()
rank = int(os.environ["RANK"])
{body}
"""


def run_body(body: str, tmp_path: Path, count: int = 2) -> int:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(body=body))
    return run_processes([sys.executable, str(script)], count, tmp_path / "logs")


def test_rank_0_speaks_and_the_others_write_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_body('print("rank", rank, "of", os.environ["WORLD_SIZE"])', tmp_path, 3) == 0
    assert capfd.readouterr().out == "rank 0 of 3\n"
    assert (tmp_path / "logs" / "rank-2.log").read_text() == "rank 2 of 3\n"


def test_the_first_to_fail_is_shown_and_the_others_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
if rank == 1:
    raise ValueError("the cause")
time.sleep(1 if rank == 0 else 600)
raise RuntimeError("connection lost")
"""
    start = time.monotonic()
    assert run_body(body, tmp_path, 3) == 1
    assert time.monotonic() - start < 60
    error = capfd.readouterr().err
    assert error.startswith("longspan: rank 1 failed:\nTraceback")
    assert "ValueError: the cause" in error
    assert "connection lost" not in error


def test_a_rank_that_is_killed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"
    assert run_body(body, tmp_path) == 1
    assert capfd.readouterr().err == "longspan: rank 1 was ended by SIGKILL\n"


def test_an_exit_code_is_the_whole_s_exit_code(tmp_path: Path) -> None:
    assert run_body("sys.exit(3)", tmp_path) == 3


def test_workers_die_with_the_launcher(tmp_path: Path) -> None:
    body = (
        f"open({str(tmp_path)!r} + f'/pid-{{rank}}', 'w').write(str(os.getpid())); time.sleep(600)"
    )
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(body=body))
    launch = (
        "import sys; from pathlib import Path; from longspan.launching.local import run_processes;"
        f"run_processes([sys.executable, {str(script)!r}], 2, Path('/nowhere/logs'))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", launch])
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(is_alive(int(file.read_text())) for file in files))


def wait_until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.global_batch=2",
]


def test_a_signal_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "longspan", "train", *SMALL, "--nproc", "2"]
    process = subprocess.Popen([*command, "train.steps=1000000", "--run-dir", str(run_dir)])
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 3
    step = int(os.listdir(run_dir / "checkpoints")[0].removeprefix("step-"))
    go_on = [*command, f"train.steps={step + 2}", "--resume", str(run_dir)]
    assert subprocess.run(go_on, check=False).returncode == 0


def pid_of(rank: int, launcher: int) -> int | None:
    """The process that `launcher` started as `rank`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_text().split("\0")
            if {f"{PARENT}={launcher}", f"RANK={rank}"} <= set(environment):
                return int(folder.name)
    return None


def test_a_rank_killed_in_the_exchange_of_a_sequence_is_named(tmp_path: Path) -> None:
    """Every step is full of exchanges; the others end at once instead of waiting for rows."""
    pattern = ["attention.segment_lengths=[16,64]", "attention.dilation_rates=[1,4]"]
    command = [sys.executable, "-m", "longspan", "train", *SMALL, "--nproc", "2", *pattern]
    options = ["layout.sequence=2", "train.steps=1000000", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text())
    pid = pid_of(1, process.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.endswith("longspan: rank 1 was ended by SIGKILL\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "2", "train.global_batch=3"], "× 2 data-parallel ranks: use 4"),
        (["--nproc", "2", "layout.replicate=3"], "needs 3 processes and there are 2"),
        (
            ["--nproc", "4", "layout.pipeline=4", "train.global_batch=8"],
            'layout.pipeline  4 ranks of schedule "1f1b" have 4 stages, and there are 1 layers: '
            "use at most 1",
        ),
        (
            ["--nproc", "2", "layout.pipeline=2", "model.layers=2", "train.global_batch=1"],
            'train.global_batch  schedule "1f1b" needs at least 2 micro-batches per data-parallel '
            "rank, got 1: use 2",
        ),
        (["--nproc", "4", "layout.tensor=4"], "4 does not divide model.heads = 2: change one"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_process(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", None)
    assert main(["train", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_broken_environment_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", *SMALL]) == 2
    assert "sets WORLD_SIZE to 'two'; expected a number" in capsys.readouterr().err


@pytest.mark.parametrize(("action", "point"), [("stop", "data"), ("stop", "gradient norm")])
def test_a_hang_ends_and_names_the_rank(tmp_path: Path, action: str, point: str) -> None:
    """Rank 1 stands still; rank 0, which waits for it, says so."""
    command = [
        sys.executable,
        "-m",
        "longspan",
        "train",
        *SMALL,
        "--nproc",
        "2",
        "train.hang_timeout_s=8",
    ]
    environment = {**os.environ, FAULT: f"{action}@{point}:1:4", LOG: str(tmp_path / "fault")}
    done = subprocess.run(
        [*command, "train.steps=1000000", "--run-dir", str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    where = f"furthest behind is rank 1 at {point} after step 3"
    assert "nothing has moved on rank 0 for 8 s, which waits in gloo:" in done.stderr
    assert where in done.stderr
    assert f"the others wait for rank 1 at {point} after step 3" in done.stderr  # before it ends
    history = (tmp_path / "run" / "history.jsonl").read_text()
    assert f"a hang, furthest behind rank 1 at {point}" in history
    assert "in train_step" in done.stderr  # what rank 0 is doing


SAVED = ["train.steps=6", "checkpoint.every=2", "checkpoint.async_save=false"]


def test_a_run_is_started_again_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed in the third step of every start."""
    monkeypatch.setenv(FAULT, "kill@step:1:3")
    monkeypatch.setenv(LOG, str(tmp_path / "fault"))
    run_dir = tmp_path / "run"
    command = ["train", *SMALL, *SAVED, "--nproc", "2", "--run-dir", str(run_dir)]
    assert main([*command, "--restarts", "1"]) == 1
    assert capfd.readouterr().err.count("rank 1 was ended by SIGKILL") == 2
    assert main(["train", *SMALL, *SAVED, "--nproc", "2", "--resume", str(run_dir)]) == 0
    assert "2 restarts" in capfd.readouterr().err
    assert main(["train", *SMALL, "--restarts", "2"]) == 2
    assert "goes with --nproc" in capfd.readouterr().err


def test_a_rank_out_of_memory_tells_and_all_go_on_with_half_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, "memory@backward:1:5")
    monkeypatch.setenv(LOG, str(tmp_path / "fault"))
    batch = ["train.global_batch=8", "train.micro_batch=4", "train.halve_on_oom=true"]
    run_dir = tmp_path / "run"
    where = ["--nproc", "2", "--restarts", "2", "--run-dir", str(run_dir)]
    assert main(["train", *SMALL, *SAVED, *batch, *where]) == 0
    error = capfd.readouterr().err
    assert "longspan: rank 1 failed:\nout of memory in step 5" in error
    assert "train.micro_batch is 2 and not 4" in error
    assert "1 restarts (1 × MemoryError: Tried to allocate" in error  # the cause, not its wake
    assert (run_dir / "micro_batch").read_text() == "2\n"
    assert "micro_batch = 4\n" in (run_dir / "run.toml").read_text()


def test_what_would_fail_again_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(POISON, "3,4,5,6,7,8")
    bad = ["train.max_skipped_steps=2", "train.max_rollbacks=0", "track.log_every=1"]
    where = ["--nproc", "2", "--restarts", "2", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *SMALL, *SAVED, *bad, *where]) == 1
    error = capfd.readouterr().err
    assert "2 steps in a row to step 4" in error
    assert "starting again" not in error


def test_who_asks_for_an_end_gets_it(tmp_path: Path) -> None:
    """Asked to stop, it fails to: it is not started again."""
    command = [sys.executable, "-m", "longspan", "train", *SMALL, "--nproc", "2"]
    options = ["train.steps=1000000", "--restarts", "3", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text())
    for rank in (0, 1):  # which then cannot save
        pid = pid_of(rank, process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: len(children_of(process.pid)) == 2)
    for pid in children_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "starting again" not in error


def children_of(launcher: int) -> list[int]:
    return [pid for rank in (0, 1) if (pid := pid_of(rank, launcher)) is not None]
