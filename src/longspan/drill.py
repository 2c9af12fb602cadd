"""`longspan drill`: inject faults into a run and check that nothing is lost.

The run is trained once without faults. Then it is trained again, interrupted by random faults at
random points and resumed each time, and its last checkpoint is compared with that of the first run,
byte by byte. In both, the loss of some steps is NaN, and neither may take those steps. The run
injects the faults itself at exact points (`faults.py`), so a seed reproduces a drill; checkpoints
are damaged while the run is down. Where a lost rank can be replaced in process, one that is killed
is, and then the launcher is killed. Where this user may mount one, the run's disk is a small file
system that is really filled.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longspan.checkpoint import CHECKPOINTS, list_checkpoints, step_of
from longspan.checkpoint.format import remove
from longspan.config import Run
from longspan.errors import UserError
from longspan.faults import BALLAST, FAULT, FAULT_DISK, FAULT_LOG, LAUNCHER_PID, NAN_STEPS
from longspan.progress import Progress
from longspan.runfile import RUN_FILE, dump_run, load_run
from longspan.tracking import HISTORY, History, read_metrics
from longspan.wording import counted

BUILTIN = "drill"
"""The built-in run of a drill, small and quick: every fault costs a start."""
POINTS = ("step", "staging", "writing", "commit", "pruning", "evaluation", "start")
RANK_0_POINTS = ("commit", "pruning")
DAMAGES = ("flip a byte", "truncate a file", "remove a file", "remove the manifest")
EXIT_CODES = {"kill": 1, "kill_launcher": -9, "terminate": 3, "hang": 1, "disk_full": 0}
TIMEOUT_S = 600.0
HANG_TIMEOUT_S = 30.0
STEPS_PER_NAN = 15
NEW_RUNS = 0.2
"""The share of faults that hit a new run before its first checkpoint."""
FULL_NOTICED = r"No space left|IS NOT WRITTEN"
"""What the console says once a full disk has had an effect."""
SPARE_BYTES = 4 << 20
"""Room on the small disk for all that is no checkpoint."""


@dataclass(frozen=True)
class Fault:
    """A fault in the run, and damage to its newest checkpoint while the run is down."""

    action: str
    point: str
    rank: int
    number: int
    damage: str | None = None
    is_new: bool = False
    """Whether the run is begun anew for it."""

    @property
    def is_replaceable(self) -> bool:
        """Whether it is the loss of a rank once all ranks train."""
        return self.action == "kill" and self.point not in ("start", "folder")

    @property
    def spec(self) -> str:
        return f"{self.action}@{self.point}:{self.rank}:{self.number}"

    def __str__(self) -> str:
        action = {
            "kill": f"kill rank {self.rank}",
            "kill_launcher": "kill the launcher",
            "terminate": "SIGTERM",
            "hang": f"rank {self.rank} hangs",
            "disk_full": f"disk full on rank {self.rank}",
        }[self.action]
        new = " of a new run" if self.is_new else ""
        return f"{action}, {self.point}{new}" + (f"; {self.damage}" if self.damage else "")


@dataclass(frozen=True)
class Outcome:
    """What a fault did to the run.

    `ended_s` is the time from the fault to the exit of all processes, `recovered_s` the time from
    the restart to the first new step. Both are None if the run survived the fault. With
    `is_replaced`, the lost rank was replaced in process, and that took `recovered_s`.
    """

    fault: str
    exit_code: int | None
    at_step: int
    resumed_at: int | None
    steps_lost: int
    ended_s: float | None
    recovered_s: float | None
    is_replaced: bool = False


@dataclass(frozen=True)
class Report:
    outcomes: list[Outcome]
    nan_steps: list[int]
    """Steps whose loss was NaN."""
    same_bytes: bool
    problems: list[str]
    disk: str
    """How a full disk was injected."""

    @property
    def passed(self) -> bool:
        return self.same_bytes and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        rows = [f"{'fault':<52}{'exit':>5}{'step':>6}{'lost':>6}{'ended in':>10}{'resumed in':>12}"]
        for o in self.outcomes:
            ended, back = ("–" if x is None else f"{x:.1f} s" for x in (o.ended_s, o.recovered_s))
            code = "–" if o.exit_code is None else str(o.exit_code)
            fault = o.fault + ", replaced" * o.is_replaced
            row = f"{fault:<52}{code:>5}{o.at_step:>6}{o.steps_lost:>6}{ended:>10}{back:>12}"
            rows.append(row)
        rows.append(f"skipped steps with NaN loss: {', '.join(map(str, self.nan_steps))}")
        if any("disk full" in o.fault for o in self.outcomes):
            rows.append(f"disk full: {self.disk}")
        rows += self.problems
        result = "same bytes as" if self.same_bytes else "DIFFERENT BYTES FROM"
        after = counted(len(self.outcomes), "fault")
        rows.append(f"after {after}: {result} the run without faults")
        return "\n".join(rows)


def drill(
    file: Path | None,
    overrides: Sequence[str],
    *,
    nproc: int | None,
    faults: int,
    seed: int,
) -> Report:
    """Inject `faults` faults into the run on `nproc` processes of this machine.

    By default as many as its layout needs, and at least 2.
    """
    if faults < 1:
        raise UserError(f"--faults must be at least 1, got {faults}")
    if nproc is None:
        nproc = max(2, load_run(file, overrides, builtin=BUILTIN, world=None).layout.min_world_size)
    if nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {nproc}")
    settings = ["track.log_every=1", "track.prompt=", f"train.hang_timeout_s={HANG_TIMEOUT_S}"]
    run = load_run(file, [*overrides, *settings], builtin=BUILTIN, world=nproc)
    if run.checkpoint.every < 2 or run.train.steps < 2 * run.checkpoint.every:
        raise UserError(
            "a drill needs checkpoint.every of at least 2 and train.steps of at least twice that, "
            f"got {run.checkpoint.every} and {run.train.steps}"
        )
    with tempfile.TemporaryDirectory(prefix="longspan-drill-") as folder, Progress() as progress:
        return _Drill(Path(folder), run, nproc, random.Random(seed), progress).report(faults)


class _Drill:
    def __init__(
        self, folder: Path, run: Run, nproc: int, rng: random.Random, progress: Progress
    ) -> None:
        self._run, self._nproc, self._rng, self._progress = run, nproc, rng, progress
        self._run_file = folder / RUN_FILE
        self._run_file.write_text(dump_run(run), encoding="utf-8")
        self._disk = folder / "disk"
        self._disk_refused: str | None = None
        """Why no file system could be mounted at `_disk`."""
        self._reference, self._faulty = folder / "reference", self._disk / "faulty"
        self._checkpoints = self._faulty / CHECKPOINTS
        self._ballast = self._disk / BALLAST
        self._fault_log, self._console = folder / "fault", folder / "console"
        self._problems: list[str] = []
        self._resumable_step, self._spec, self._disk_full_at = 0, "", 0
        self._launched = self._reference
        self._rng_of_new_runs = random.Random()
        self._rng_of_new_runs.setstate(rng.getstate())
        steps = range(2, run.train.steps)
        self._nan_steps = sorted(rng.sample(steps, max(1, len(steps) // STEPS_PER_NAN)))

    def report(self, faults: int) -> Report:
        self._progress.phase(f"training {counted(self._run.train.steps, 'step')} without faults")
        self._finish(self._reference)
        newest = list_checkpoints(self._reference / CHECKPOINTS)[-1]
        # One checkpoint is written, one removed and one quarantined, beside those that are kept.
        size = _size(self._reference) + 3 * _size(newest) + SPARE_BYTES
        with _small_disk(self._disk, size) as self._disk_refused:
            return self._report_faults(faults, size)

    def _report_faults(self, faults: int, disk_bytes: int) -> Report:
        outcomes: list[Outcome] = []
        for number in range(1, faults + 1):
            fault = self._pick()
            self._progress.phase(f"fault {number} of {faults}: {fault}")
            outcomes.append(self._inject(fault, outcomes))
            self._rewind_if_almost_done()
        self._progress.phase("finishing the run without further faults")
        self._finish(self._faulty, outcomes)
        self._progress.phase("comparing the last checkpoints")
        run_dirs = (self._reference, self._faulty)
        for folder in run_dirs:
            lines = read_metrics(folder / "metrics.jsonl")
            skipped = [line["step"] for line in lines if line.get("loss", 0.0) is None]
            if skipped != self._nan_steps:
                self._problems.append(f"{folder.name}: NaN loss in steps {skipped}")
            steps = [line["step"] for line in lines if "loss" in line]
            if steps != list(range(1, self._run.train.steps + 1)):
                self._problems.append(f"{folder.name}: metrics.jsonl has the steps {steps}")
        a, b = (_files(list_checkpoints(folder / CHECKPOINTS)[-1]) for folder in run_dirs)
        disk = f"a file system of {disk_bytes / 2**20:.0f} MiB was filled"
        if self._disk_refused:
            disk = f"only save points raised ENOSPC: {self._disk_refused}"
        return Report(outcomes, self._nan_steps, a == b, self._problems, disk)

    def _pick_of_new_run(self) -> Fault:
        """Pick a fault between the start of a new run and its first checkpoint."""
        rng = self._rng_of_new_runs
        point = rng.choice(("start", "folder", "folder", "step"))
        action = rng.choice(("kill", "kill_launcher"))
        rank = 0 if point == "folder" else rng.randrange(self._nproc)
        number = rng.randint(1, {"folder": 4, "step": self._run.checkpoint.every - 1}.get(point, 1))
        return Fault(action, point, rank, number, is_new=True)

    def _pick(self) -> Fault:
        if self._rng_of_new_runs.random() < NEW_RUNS:
            return self._pick_of_new_run()
        rng, every = self._rng, self._run.checkpoint.every
        point = rng.choice(POINTS)
        action = "kill"
        if point == "step":
            hang = ("hang",) if self._nproc > 1 else ()  # a single rank has no peer to notice it
            actions = ("kill", "kill", "kill_launcher", "terminate", "disk_full", *hang)
            action = rng.choice(actions)
            if action == "disk_full" and self._disk_refused:
                action = "kill"  # a step does not write: only a real disk can be full
        elif point in ("writing", "commit"):
            action = rng.choice(("kill", "disk_full"))
        rank = 0 if point in RANK_0_POINTS else rng.randrange(self._nproc)
        number = rng.randint(1, 2 * every) if point == "step" else 1
        damage = rng.choice((None, None, *DAMAGES)) if action == "kill" else None
        return Fault(action, point, rank, number, damage)

    def _inject(self, fault: Fault, before: list[Outcome]) -> Outcome:
        """Run until the fault has taken effect, then damage a checkpoint while the run is down."""
        self._fault_log.unlink(missing_ok=True)
        environment = {FAULT: fault.spec, FAULT_LOG: str(self._fault_log)}
        if not self._disk_refused:
            environment[FAULT_DISK] = str(self._disk)
        for quarantined in self._checkpoints.glob("bad-*"):
            shutil.rmtree(quarantined)
        if fault.is_new:
            shutil.rmtree(self._faulty, ignore_errors=True)
            self._resumable_step = 0
        process = self._launch(self._faulty, environment, replaces=fault.is_replaceable)
        self._watch(process, [] if fault.is_new else before)
        code: int | None = process.poll()
        if code is None:  # the run survives a full disk, and the loss of a rank that is replaced
            process.kill()
            process.wait()
        _wait_until(lambda: not _has_ranks(process.pid))
        self._ballast.unlink(missing_ok=True)
        ended, at = time.time(), self._last_step()
        began = float(self._fault_log.read_text()) if self._fault_log.exists() else None
        is_launcher = self._nproc == 1 and fault.action == "kill"
        expected = -9 if is_launcher else EXIT_CODES.get(fault.action)
        replaced = self._replaced()
        if began is not None and code not in (expected, None, 0 if replaced else expected):
            self._problems.append(f"{fault}: exit code {code}, expected {expected}")
        if began is None and code != 0:
            self._problems.append(f"{fault}: exit code {code} before the fault was injected")
        self._resumable_step = self._damage_newest(fault.damage)
        lost = max(0, at - self._resumable_step) if code != 0 else 0
        # An asynchronous save may have been in progress, and a damaged checkpoint does not count.
        # While the disk is full, nothing can be saved.
        allowed = self._run.checkpoint.every * (2 if fault.damage is None else 3)
        if lost > allowed and fault.action != "disk_full":
            self._problems.append(f"{fault}: {counted(lost, 'step')} lost")
        took = None if began is None or code is None else ended - began
        if replaced:
            lost, seconds = replaced["lost_steps"], replaced["seconds"]
            return Outcome(str(fault), code, at, None, lost, None, seconds, is_replaced=True)
        return Outcome(str(fault), code, at, None, lost, took, None)

    def _watch(self, process: subprocess.Popen[bytes], before: list[Outcome]) -> None:
        """Wait until the run exits or survives a full disk; record where and when it resumed."""
        start, recovered = time.monotonic(), None
        while process.poll() is None:
            if recovered is None and self._has_new_step():
                recovered = time.monotonic() - start
            self._progress.detail(f"step {self._last_step(self._launched)}")
            if self._ballast.exists() and re.search(FULL_NOTICED, self._console_text()):
                self._ballast.unlink()
            if self._survived():
                break
            if time.monotonic() - start > TIMEOUT_S:
                process.kill()
                raise UserError(f"no progress for {TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        resumed = self._resumed_at()
        if before and resumed is not None:
            if resumed != self._resumable_step:
                problem = f"resumed at step {resumed}, expected {self._resumable_step}"
                self._problems.append(f"{before[-1].fault}: {problem}")
            recovered = before[-1].recovered_s or recovered
            before[-1] = replace(before[-1], resumed_at=resumed, recovered_s=recovered)

    def _survived(self) -> bool:
        """Whether the run has recorded two further steps after the disk was full or a rank was
        replaced.
        """
        if replaced := self._replaced():
            return self._last_step() > int(replaced["step"]) + 1
        is_full = self._fault_log.exists() and self._spec.startswith("disk_full")
        self._disk_full_at = self._disk_full_at or (self._last_step() if is_full else 0)
        is_free = not self._ballast.exists()
        return is_full and is_free and self._last_step() > self._disk_full_at + 1

    def _replaced(self) -> dict[str, Any] | None:
        """The replacement of the rank that the fault has killed, from the run's history."""
        if not self._fault_log.exists() or not self._spec.startswith("kill@"):
            return None
        began = float(self._fault_log.read_text() or "inf")
        for event in History(self._launched / HISTORY).events():
            if event["event"] == "recovery" and event["time"] > began:
                return event
        return None

    def _has_new_step(self) -> bool:
        """Whether a step follows the one the run resumed at, whose later metrics were dropped."""
        resumed = self._resumed_at()
        return resumed is not None and self._last_step() > resumed

    def _resumed_at(self) -> int | None:
        """Return the step at which the latest launch resumed; None if it has not started yet."""
        found = re.findall(r"resuming at step (\d+)|new run", self._console_text())
        return int(found[-1] or 0) if found else None

    def _console_text(self) -> str:
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def _damage_newest(self, damage: str | None) -> int:
        """Damage the newest of several checkpoints; return the step of the newest intact one."""
        found = list_checkpoints(self._checkpoints)
        if damage is not None and len(found) > 1:
            _damage(found.pop(), damage, self._rng)
        return (step_of(found[-1]) or 0) if found else 0

    def _rewind_if_almost_done(self) -> None:
        """Go back to the oldest checkpoint when few steps are left in which to inject a fault."""
        found = list_checkpoints(self._checkpoints)
        if (
            not found
            or self._resumable_step < self._run.train.steps - 3 * self._run.checkpoint.every
        ):
            return
        for path in found[1:]:
            remove(path)
        self._resumable_step = step_of(found[0]) or 0

    def _finish(self, run_dir: Path, before: list[Outcome] | None = None) -> None:
        process = self._launch(run_dir, {})
        self._watch(process, before or [])
        if process.returncode != 0:
            raise UserError(
                f"without faults the run exited with code {process.returncode}:\n"
                + self._console.read_text(errors="replace")
            )

    def _launch(
        self, run_dir: Path, environment: dict[str, str], *, replaces: bool = False
    ) -> subprocess.Popen[bytes]:
        self._spec, self._disk_full_at, self._launched = environment.get(FAULT, ""), 0, run_dir
        options = ["--nproc", str(self._nproc)] if self._nproc > 1 else []
        if replaces and self._nproc > 1 and self._run.replaces_lost_ranks(self._nproc):
            options += ["--restarts", "1"]
        options += ["--resume", str(run_dir)]  # as a scheduler does, whatever is in the folder
        command = [sys.executable, "-m", "longspan", "train", str(self._run_file), *options]
        nan_steps = {NAN_STEPS: ",".join(map(str, self._nan_steps))}
        with self._console.open("wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, **nan_steps, **environment}, stdout=log, stderr=log
            )

    def _last_step(self, run_dir: Path | None = None) -> int:
        lines = read_metrics((run_dir or self._faulty) / "metrics.jsonl")
        return max((line["step"] for line in lines), default=0)


@contextmanager
def _small_disk(path: Path, size: int) -> Iterator[str | None]:
    """Mount a file system of `size` bytes at `path`, a new folder; yield why that is refused."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        refused = (done.stderr.strip() or "mount failed") if done.returncode else None
    except OSError as error:
        refused = f"mount: {error.strerror}"
    try:
        yield refused
    finally:
        if not refused:
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, in whole pages."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in folder.rglob("*"))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise UserError(f"no progress for {TIMEOUT_S:.0f} s")
        time.sleep(0.01)


def _has_ranks(launcher: int) -> bool:
    """Whether a process that `launcher` started is still running."""
    entry = f"{LAUNCHER_PID}={launcher}"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().split()[2] == "Z":
                continue
            if entry in (folder / "environ").read_text(errors="replace").split("\0"):
                return True
        except OSError:
            continue  # it has just exited, or belongs to another user
    return False


def _damage(path: Path, damage: str, rng: random.Random) -> None:
    file = rng.choice(sorted(path.glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    match damage:
        case "flip a byte":
            content[rng.randrange(len(content))] ^= 1
            file.write_bytes(content)
        case "truncate a file":
            file.write_bytes(content[: rng.randrange(len(content))])
        case "remove a file":
            file.unlink()
        case _:
            (path / "manifest.json").unlink()


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
