"""The dry run: one step of the run, in a process of its own on every rank.

It is what `longspan train` does, so that running out of memory, a crash in a library and a hang
are findings too, and not the end of the doctor.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from longspan.config import Profile, Run
from longspan.doctor.disk import existing_folder
from longspan.doctor.finding import Finding
from longspan.doctor.meeting import Meeting
from longspan.doctor.network import AGENT_STORE, free_port
from longspan.faults import FAULT, LAUNCHER_PID
from longspan.loopback import STORE
from longspan.runfile import RUN_FILE, dump_run
from longspan.tracking import read_metrics

GRACE_S = 5.0
"""How long this rank may go on once another has failed: it may be the one with the reason."""
POLL_S = 0.1
PREFIX = ".longspan-doctor-"
TRACEBACK = "LONGSPAN_TRACEBACK"
"""Of `launching.local`: where a rank of it reports an error, which here is a finding."""


def dry_run(run: Run, world: int) -> Run:
    """The run with one step of one micro-batch per data-parallel rank, and nothing after it."""
    ranks = run.layout.resolve(world)
    per_pass = run.train.micro_batch * ranks["replicate"] * ranks["shard"]
    train = {
        "steps": 1,
        "warmup_steps": 0,
        "schedule": "constant",
        "global_batch": min(run.train.global_batch, per_pass * ranks["pipeline"]),
        "eval_every": 0,
        "eval_samples": 1,
    }
    track = {"log_every": 1, "prompt": "", "sinks": (), "profile": Profile()}
    track["memory_snapshot"] = False
    return run.model_copy(
        update={
            "train": run.train.model_copy(update=train),
            "track": run.track.model_copy(update=track),
            "checkpoint": run.checkpoint.model_copy(update={"every": 0, "keep_every": 0}),
        }
    )


def check_step(
    run: Run, run_dir: Path, meeting: Meeting, hosts: Mapping[int, str], limit_s: float
) -> Iterator[Finding]:
    """Train one step on all ranks at once; `hosts` are known to rank 0."""
    with _shared_folder(run, run_dir, meeting, hosts) as given:
        if given is None:
            yield Finding("one step", "error", f"cannot write a folder next to {run_dir}")
            return
        folder, variables = Path(given[0]), given[1]
        if not _is_visible(folder / RUN_FILE):
            meeting.store.set("step/failed", "")
            yield Finding(
                "one step",
                "error",
                f"a folder that rank 0 has made next to {run_dir} is not on this machine",
                "give a --run-dir on a file system that all machines share",
            )
            return
        with tempfile.TemporaryFile() as output:
            process = _start(folder, variables, output)
            try:
                # The run's own watchdog says more, if it comes first.
                limit_s = min(limit_s, run.train.start_timeout_s + GRACE_S)
                outcome = _wait(process, folder, meeting, limit_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        yield from _findings(outcome, text, meeting.world.rank)


@dataclass(frozen=True)
class Outcome:
    """How a rank's process has ended."""

    kind: str
    """"done", "failed", "other rank" or "timeout"."""
    code: int | None = None
    seconds: float = 0.0
    loss: float = 0.0


@contextmanager
def _shared_folder(
    run: Run, run_dir: Path, meeting: Meeting, hosts: Mapping[int, str]
) -> Iterator[tuple[str, dict[str, str]] | None]:
    """A folder where the run folder will be, with the run file; and variables for its processes.

    It is removed when all ranks have left this context.
    """
    given, folder = None, None
    if meeting.world.rank == 0:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=existing_folder(run_dir))
            text = dump_run(dry_run(run, meeting.world.size))
            Path(folder, RUN_FILE).write_text(text, encoding="utf-8")
            given = folder, _rendezvous(folder, len(set(hosts.values())))
    try:
        yield meeting.share("step/folder", given)
        meeting.gather("step/left", "")
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _rendezvous(folder: str, machines: int) -> dict[str, str]:
    """Where the processes meet: apart from the doctor itself, which still uses its own store."""
    if machines <= 1:
        return {STORE: f"{folder}/store"}
    return {"MASTER_PORT": str(free_port()), AGENT_STORE: "False"}


def _is_visible(path: Path) -> bool:
    """Whether a file of rank 0 is here, too; a network file system may take seconds to show it."""
    deadline = time.monotonic() + GRACE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return path.exists()


def _start(
    folder: Path, variables: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **variables, LAUNCHER_PID: str(os.getpid())}
    for name in (TRACEBACK, FAULT, *(() if STORE in variables else (STORE,))):
        environment.pop(name, None)
    program = [sys.executable, "-m", "longspan", "train", str(folder / RUN_FILE)]
    return subprocess.Popen(
        [*program, "--run-dir", str(folder / "run")],
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def _wait(
    process: subprocess.Popen[bytes], folder: Path, meeting: Meeting, limit_s: float
) -> Outcome:
    """Wait until rank 0 has written the metrics of the step, or this or another rank has failed."""
    started, failed_at = time.monotonic(), math.inf
    while True:
        code, now = process.poll(), time.monotonic()
        if meeting.world.rank == 0 and (line := _metrics(folder)):
            meeting.store.set("step/done", json.dumps(line))
        if meeting.store.check(["step/done"]):
            line = json.loads(meeting.store.get("step/done"))
            return Outcome("done", code, now - started, float(line["loss"]))
        if code:
            meeting.store.set("step/failed", "")
            return Outcome("failed", code)
        if meeting.store.check(["step/failed"]):
            failed_at = min(failed_at, now)
        if now > failed_at + GRACE_S:
            return Outcome("other rank")
        if now > started + limit_s:
            meeting.store.set("step/failed", "")
            return Outcome("timeout", seconds=now - started)
        time.sleep(POLL_S)


def _metrics(folder: Path) -> dict[str, Any] | None:
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return next((line for line in lines if "loss" in line), None)


def _findings(outcome: Outcome, text: str, rank: int) -> Iterator[Finding]:
    name = "one step"
    if outcome.kind == "done" and rank == 0:
        if math.isfinite(outcome.loss):
            seen = f"loss {outcome.loss:.4f} after {outcome.seconds:.1f} s, with the start"
            yield Finding(name, "ok", seen)
        else:
            advice = 'lower train.lr, check the data, or use train.precision = "fp32"'
            yield Finding(name, "error", f"the loss is {outcome.loss}", advice)
    elif outcome.kind == "failed":
        how = f"exit code {outcome.code}"
        if outcome.code is not None and outcome.code < 0:
            how = f"killed by {signal.Signals(-outcome.code).name}"
        yield Finding(name, "error", f"{how}: {_last_words(text)}", "change what it says")
    elif outcome.kind == "timeout":
        yield Finding(
            name,
            "error",
            f"no step within {outcome.seconds:.0f} s: {_last_words(text)}",
            "compiling may take longer (--timeout); a collective may hang: NCCL_DEBUG=INFO shows "
            "which links were chosen",
        )


def _last_words(text: str) -> str:
    """What a process has said about its end: its error message, or else its last line."""
    start = text.rfind("longspan: ")
    lines = [line for line in text.strip().splitlines() if line.strip()]
    words = text[start:].strip() if start >= 0 else lines[-1] if lines else "it has printed nothing"
    return words if len(words) <= 600 else f"{words[:600]}…"
