"""The local launcher: ranks start, stop and fail together, and failed runs are restarted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.faults import FAULT, FAULT_LOG, LAUNCHER_PID, NAN_STEPS
from longspan.launching import local
from tests.slow import slow

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.global_batch=2",
]
SAVED = ["train.steps=6", "checkpoint.every=2", "checkpoint.async_save=false"]
ENDLESS = ["train.steps=1000000", "track.log_every=1"]
TRAIN = [sys.executable, "-m", "longspan", "train", *SMALL, "--nproc", "2"]


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def last_step(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


# Ranks without torch


WORKER = """
import os, signal, sys, time
from longspan.launching.local import TRACEBACK, join_launcher
join_launcher()
rank = int(os.environ["RANK"])
{body}
"""


def run_body(body: str, tmp_path: Path, nproc: int = 2) -> int:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(body=body))
    return local.run_processes([sys.executable, str(script)], nproc, tmp_path / "logs")


def test_rank_0_writes_to_the_console_and_the_others_to_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_body('print("rank", rank, "of", os.environ["WORLD_SIZE"])', tmp_path, 3) == 0
    assert capfd.readouterr().out == "rank 0 of 3\n"
    assert (tmp_path / "logs" / "rank-2.log").read_text() == "rank 2 of 3\n"


def test_ctrl_c_twice_ends_ranks_that_hang(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a collective with a rank that is stuck: no handler of Python runs there."""
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    body += f"open({str(tmp_path)!r} + f'/ready-{{rank}}', 'w')\ntime.sleep(600)"
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(body=body))
    received: list[int] = []

    def poll() -> None:
        if len(received) < 2 and len(list(tmp_path.glob("ready-*"))) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    command = [sys.executable, str(script)]
    logs = tmp_path / "logs"
    assert local.run_processes(command, 2, logs, received=received, on_poll=poll) == 1
    assert "the ranks hang, and were killed" in capfd.readouterr().err
    assert received == [signal.SIGINT] * 2


def test_the_first_failure_is_shown_and_the_other_ranks_are_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails, rank 0 as a consequence; rank 2 would go on for ten minutes."""
    monkeypatch.setattr(local, "GRACE_S", 1.5)
    body = """
if rank == 1:
    raise ValueError("the cause")
of_rank_1 = os.environ[TRACEBACK].replace("rank-0", "rank-1")
while rank == 0 and not os.path.exists(of_rank_1):
    time.sleep(0.01)
time.sleep(0.05 if rank == 0 else 600)
open("finished", "w") if rank == 2 else None
raise RuntimeError("connection lost")
"""
    monkeypatch.chdir(tmp_path)
    assert run_body(body, tmp_path, 3) == 1
    error = capfd.readouterr().err
    assert error.startswith("longspan: rank 1 failed:\nTraceback")
    assert "ValueError: the cause" in error
    assert "connection lost" not in error
    assert not (tmp_path / "finished").exists()


def test_a_killed_rank_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    body = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)"
    assert run_body(body, tmp_path) == 1
    assert capfd.readouterr().err == "longspan: rank 1 was killed by SIGKILL\n"


def test_the_exit_code_of_the_ranks_is_returned(tmp_path: Path) -> None:
    assert run_body("sys.exit(3)", tmp_path) == 3


def test_ranks_are_killed_when_the_launcher_dies(tmp_path: Path) -> None:
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


# `longspan train --restarts`, with ranks that fail without torch


FAILING = """#!{python}
import os, signal, sys, time
rank, run_dir = os.environ["RANK"], sys.argv[-1]
os.makedirs(run_dir, exist_ok=True)
open(run_dir + "/run.toml", "a").close()
with open(run_dir + "/starts", "a") as file:
    file.write(rank + " " + sys.argv[-2] + "\\n")
{body}
"""


def failing_ranks(tmp_path: Path, body: str) -> Path:
    """A program to be started in place of Python."""
    program = tmp_path / "failing"
    program.write_text(FAILING.format(python=sys.executable, body=body))
    program.chmod(0o755)
    return program


def starts_of_rank_0(run_dir: Path) -> list[str]:
    file = run_dir / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split()[1] for line in lines if line.startswith("0 ")]


def test_a_failed_run_is_restarted_as_often_as_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(failing_ranks(tmp_path, "sys.exit(1)")))
    run_dir = tmp_path / "run"
    command = ["train", *SMALL, "--nproc", "2", "--restarts", "2", "--run-dir", str(run_dir)]
    assert main(command) == 1
    assert starts_of_rank_0(run_dir) == ["--run-dir", "--resume", "--resume"]
    assert main(["train", *SMALL, "--restarts", "2"]) == 2
    assert "needs --nproc of at least 2" in capfd.readouterr().err


def test_a_run_that_was_killed_before_it_wrote_its_run_file_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, run_dir = failing_ranks(tmp_path, "os.kill(os.getpid(), 9)"), tmp_path / "run"
    program.write_text(program.read_text().replace("/run.toml", "/env.json"))
    monkeypatch.setattr(sys, "executable", str(program))
    options = ["--nproc", "2", "--restarts", "1", "--run-dir", str(run_dir)]
    assert main(["train", *SMALL, *options]) == 1
    assert starts_of_rank_0(run_dir) == ["--run-dir", "--run-dir"]


def test_a_run_whose_folder_was_removed_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
import shutil
if rank == "0":
    while len(open(run_dir + "/starts").readlines()) < 2:
        time.sleep(0.01)
    shutil.rmtree(run_dir)
while os.path.exists(run_dir):
    time.sleep(0.01)
sys.exit(1)
"""
    monkeypatch.setattr(sys, "executable", str(failing_ranks(tmp_path, body)))
    run_dir = tmp_path / "run"
    options = ["--nproc", "2", "--restarts", "1", "--run-dir", str(run_dir)]
    assert main(["train", *SMALL, *options]) == 1
    assert "restarting" not in capfd.readouterr().err
    assert not run_dir.exists()


def test_a_run_that_is_told_to_stop_is_not_restarted(tmp_path: Path) -> None:
    """The ranks do not exit on SIGTERM, as if they could not save, and are killed."""
    body = """
signal.signal(signal.SIGTERM, lambda *_: open(run_dir + "/told-" + rank, "w"))
open(run_dir + "/ready-" + rank, "w")
while True:
    time.sleep(1)
"""
    program, run_dir = failing_ranks(tmp_path, body), tmp_path / "run"
    options = [*SMALL, "--nproc", "2", "--restarts", "3", "--run-dir", str(run_dir)]
    launch = (
        f"import sys; sys.executable = {str(program)!r}\n"
        f"from longspan.cli import main; sys.exit(main(['train', *{options!r}]))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", launch])
    wait_until(lambda: len(list(run_dir.glob("ready-*"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: len(list(run_dir.glob("told-*"))) == 2)
    for pid in ranks_of(launcher.pid):
        os.kill(pid, signal.SIGKILL)
    assert launcher.wait(60) == 1
    assert starts_of_rank_0(run_dir) == ["--run-dir"]


def ranks_of(launcher: int) -> list[int]:
    """The processes that `launcher` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        if f"{LAUNCHER_PID}={launcher}" in environment:
            found.append(int(folder.name))
    return found


def listeners(pid: int) -> list[str]:
    """The addresses, as the kernel writes them, at which a process accepts TCP connections."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.append(address.split(":")[0])
    return found


# Training runs


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was stopped by SIGINT; beside it, where they had listened."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    process = subprocess.Popen([*TRAIN, *ENDLESS, "--run-dir", str(run_dir)])
    wait_until(lambda: last_step(run_dir) > 0)
    found = [address for pid in ranks_of(process.pid) for address in listeners(pid)]
    (run_dir.parent / "listeners").write_text("\n".join([*found, *listeners(process.pid)]))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 3
    return run_dir


def test_a_signal_stops_all_ranks_with_a_checkpoint(stopped: Path) -> None:
    (path,) = (stopped / "checkpoints").iterdir()
    assert path.name == f"step-{last_step(stopped):08d}"


def test_the_processes_of_one_machine_listen_on_loopback_only(stopped: Path) -> None:
    found = (stopped.parent / "listeners").read_text().split()
    assert found  # gloo's, between the ranks
    assert set(found) == {"0100007F"}  # 127.0.0.1


@slow("elastic")
@pytest.mark.parametrize("point", ["gradient norm", "data"])
def test_a_resumed_run_that_hangs_exits_and_names_the_rank(
    tmp_path: Path, stopped: Path, point: str
) -> None:
    """Rank 1 hangs; rank 0 waits for it in an all-reduce and reports it."""
    (newest,) = (path.name for path in (stopped / "checkpoints").iterdir())
    step = int(newest.removeprefix("step-"))
    environment = {**os.environ, FAULT: f"hang@{point}:1:4", FAULT_LOG: str(tmp_path / "fault")}
    options = [*ENDLESS, "checkpoint.every=0", "train.hang_timeout_s=6", "--resume", str(stopped)]
    done = subprocess.run(
        [*TRAIN, *options], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"resuming at step {step}" in done.stderr
    where = f"rank 1 at {point} after step {step + 3}"
    assert "no progress on rank 0 for 6 s, which is blocked in gloo:" in done.stderr
    assert f"furthest behind is {where}" in done.stderr
    assert f"longspan: waiting for {where}" in done.stderr  # before it exits
    assert f"hang, furthest behind rank 1 at {point}" in (stopped / "history.jsonl").read_text()
    assert "in train_step" in done.stderr  # the stack of rank 0


def test_a_rank_killed_in_a_sequence_exchange_is_restarted_but_a_diverged_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed in its third step, while rank 0 waits for its keys and values.

    The restarted run diverges at steps 3 and 4, as it would again.
    """
    monkeypatch.setenv(FAULT, "kill@backward:1:3")
    monkeypatch.setenv(FAULT_LOG, str(tmp_path / "fault"))
    monkeypatch.setenv(NAN_STEPS, "3,4,5,6,7,8")
    options = ["layout.sequence=2", "attention.segment_lengths=[16,64]"]
    options += ["attention.dilation_rates=[1,4]", "track.log_every=1", *SAVED]
    options += ["train.max_skipped_steps=2", "train.max_rollbacks=0", "--nproc", "2"]
    run_dir = tmp_path / "run"
    assert main(["train", *SMALL, *options, "--restarts", "3", "--run-dir", str(run_dir)]) == 1
    error = capfd.readouterr().err
    assert error.count("longspan: rank 1 was killed by SIGKILL\n") == 1
    assert error.count("restarting") == 1
    assert "2 steps in a row to step 4" in error


@slow("elastic")
def test_after_out_of_memory_the_run_resumes_with_half_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, "oom@backward:1:5")
    monkeypatch.setenv(FAULT_LOG, str(tmp_path / "fault"))
    batch = ["train.global_batch=8", "train.micro_batch=4", "train.halve_on_oom=true"]
    run_dir = tmp_path / "run"
    options = ["--nproc", "2", "--restarts", "2", "--run-dir", str(run_dir)]
    assert main(["train", *SMALL, *SAVED, *batch, *options]) == 0
    error = capfd.readouterr().err
    assert "longspan: rank 1 failed:\nout of memory in step 5" in error
    assert "using train.micro_batch = 2 instead of 4" in error
    assert "1 restart (1 × MemoryError: Tried to allocate" in error  # the cause, not rank 0's
    assert (run_dir / "micro_batch").read_text() == "2\n"
    assert "micro_batch = 4\n" in (run_dir / "run.toml").read_text()


# Errors before any process is started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "2", "train.global_batch=3"], "× 2 data-parallel ranks: use 4"),
        (["--nproc", "2", "layout.replicate=3"], "a multiple of 3 processes, but there are 2"),
        (
            ["--nproc", "4", "layout.pipeline=4", "train.global_batch=8"],
            'layout.pipeline  4 ranks with layout.schedule = "1f1b" need 4 layers, but '
            "model.layers is 1: use at most 1",
        ),
        (
            ["--nproc", "2", "layout.pipeline=2", "model.layers=2", "train.global_batch=1"],
            'train.global_batch  layout.schedule = "1f1b" needs at least 2 micro-batches per '
            "data-parallel rank, got 1: use 2",
        ),
        (["--nproc", "4", "layout.tensor=4"], "4 does not divide model.heads = 2: change one"),
    ],
)
def test_an_invalid_layout_is_rejected_before_any_process(
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


def test_an_invalid_environment_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train", *SMALL]) == 2
    assert "sets WORLD_SIZE to 'two'; expected a number" in capsys.readouterr().err
