"""`longspan drill`: break a run on purpose, again and again, and see whether anything was lost.

The run is trained once unbroken. Then it is trained once more, broken at random points by random
faults and resumed each time, and its last checkpoint is compared with the unbroken one, byte by
byte. In both, the loss of some steps is no number: neither may take them. Faults are injected by
the run itself at exact points (`faults.py`), so that a seed gives the same drill; checkpoints are
damaged while the run is down.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longspan.checkpoint import all_in
from longspan.checkpoint.format import remove
from longspan.config import Run
from longspan.errors import UserError
from longspan.faults import FAULT, LOG, PARENT, POISON
from longspan.runfile import load_run
from longspan.tracking import lines_of

POINTS = ("step", "staging", "writing", "naming", "pruning", "evaluation", "start")
DAMAGES = ("flip a byte", "cut a file short", "remove a file", "remove the manifest")
TIMEOUT_S = 600.0
HANG_S = 30.0
STEPS_PER_POISON = 15
ON_MAIN_ALONE = ("naming", "pruning")


@dataclass(frozen=True)
class Fault:
    """What is done to the run, and to its newest checkpoint while it is down."""

    action: str
    point: str
    rank: int
    number: int
    damage: str | None = None

    @property
    def spec(self) -> str:
        return f"{self.action}@{self.point}:{self.rank}:{self.number}"

    def __str__(self) -> str:
        whom = {
            "kill": f"kill rank {self.rank}",
            "orphan": "kill the launcher",
            "terminate": "SIGTERM",
            "stop": f"rank {self.rank} hangs",
            "full": f"disk full on rank {self.rank}",
        }[self.action]
        return f"{whom}, {self.point}" + (f"; {self.damage}" if self.damage else "")


@dataclass(frozen=True)
class Outcome:
    """`ended_s`: from the fault to the end of all processes; `recovered_s`: from the restart to the
    first new step. None where the run did not end.
    """

    fault: str
    exit_code: int | None
    at_step: int
    resumed_at: int | None
    steps_lost: int
    ended_s: float | None
    recovered_s: float | None


@dataclass(frozen=True)
class Report:
    outcomes: list[Outcome]
    poisoned: list[int]
    """Steps whose loss was no number."""
    same_bytes: bool
    wrong: list[str]

    @property
    def is_fine(self) -> bool:
        return self.same_bytes and not self.wrong

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_fine": self.is_fine}

    def __str__(self) -> str:
        rows = [f"{'fault':<44}{'exit':>5}{'step':>6}{'lost':>6}{'ended in':>10}{'back in':>9}"]
        for o in self.outcomes:
            ended, back = ("–" if x is None else f"{x:.1f} s" for x in (o.ended_s, o.recovered_s))
            code = "–" if o.exit_code is None else str(o.exit_code)
            row = f"{o.fault:<44}{code:>5}{o.at_step:>6}{o.steps_lost:>6}{ended:>10}{back:>9}"
            rows.append(row)
        rows.append(f"no number as loss in steps {', '.join(map(str, self.poisoned))}: not taken")
        rows += self.wrong
        end = "the same bytes as" if self.same_bytes else "NOT THE BYTES OF"
        rows.append(f"after {len(self.outcomes)} faults: {end} the unbroken run")
        return "\n".join(rows)


def drill(
    file: Path | None,
    overrides: Sequence[str],
    *,
    builtin: str,
    nproc: int,
    faults: int,
    seed: int,
) -> Report:
    """Break the run `faults` times on `nproc` processes of this machine."""
    if faults < 1 or nproc < 1:
        raise UserError(f"--faults and --nproc must be at least 1, got {faults} and {nproc}")
    fixed = ["track.log_every=1", "track.prompt=", f"train.hang_timeout_s={HANG_S}"]
    run = load_run(file, [*overrides, *fixed], builtin=builtin, world=nproc)
    if run.checkpoint.every < 2 or run.train.steps < 2 * run.checkpoint.every:
        raise UserError(
            "a drill needs checkpoint.every of at least 2 and at least twice as many train.steps, "
            f"got {run.checkpoint.every} and {run.train.steps}"
        )
    items = [*([str(file)] if file else []), *overrides, *fixed]
    with tempfile.TemporaryDirectory(prefix="longspan-drill-") as folder:
        return _Drill(Path(folder), items, run, nproc, random.Random(seed)).report(faults)


class _Drill:
    def __init__(
        self, folder: Path, items: list[str], run: Run, nproc: int, chance: random.Random
    ) -> None:
        self._items, self._run, self._nproc, self._chance = items, run, nproc, chance
        self._unbroken, self._broken = folder / "unbroken", folder / "broken"
        self._log, self._console = folder / "fault", folder / "console"
        self._wrong: list[str] = []
        self._kept, self._spec, self._full_at = 0, "", 0
        steps = range(2, run.train.steps)
        self._poisoned = sorted(chance.sample(steps, max(1, len(steps) // STEPS_PER_POISON)))

    def report(self, faults: int) -> Report:
        self._finish(self._unbroken)
        outcomes: list[Outcome] = []
        for _ in range(faults):
            outcome = self._break(self._pick(), outcomes)
            outcomes.append(outcome)
            self._start_over_if_done()
        self._finish(self._broken, outcomes)
        both = (self._unbroken, self._broken)
        for folder in both:
            lines = lines_of(folder / "metrics.jsonl")
            lost = [line["step"] for line in lines if line.get("loss", 0.0) is None]
            if lost != self._poisoned:
                self._wrong.append(f"{folder.name}: no number as loss in steps {lost}")
        a, b = (_files(all_in(folder / "checkpoints")[-1]) for folder in both)
        return Report(outcomes, self._poisoned, a == b, self._wrong)

    def _pick(self) -> Fault:
        chance, every = self._chance, self._run.checkpoint.every
        point = chance.choice(POINTS)
        action = "kill"
        if point == "step":
            stop = ("stop",) if self._nproc > 1 else ()  # alone, nobody is left to notice
            action = chance.choice(("kill", "kill", "orphan", "terminate", *stop))
        elif point in ("writing", "naming"):
            action = chance.choice(("kill", "full"))
        rank = 0 if point in ON_MAIN_ALONE else chance.randrange(self._nproc)
        number = chance.randint(1, 2 * every) if point == "step" else 1
        damage = chance.choice((None, None, *DAMAGES)) if action == "kill" else None
        return Fault(action, point, rank, number, damage)

    def _break(self, fault: Fault, before: list[Outcome]) -> Outcome:
        """Run until the fault has done its work, and damage what it says while the run is down."""
        self._log.unlink(missing_ok=True)
        process = self._launch(self._broken, {FAULT: fault.spec, LOG: str(self._log)})
        self._watch(process, before)
        code: int | None = process.poll()
        if code is None:  # a full disk, which the run survives
            process.kill()
            process.wait()
        self._until(lambda: not _alive(process.pid))
        ended, at = time.time(), self._last_step()
        began = float(self._log.read_text()) if self._log.exists() else None
        expected = {"kill": 1, "orphan": -9, "terminate": 3, "stop": 1}.get(fault.action)
        if began is not None and code not in (expected, None):
            self._wrong.append(f"{fault}: exit code {code}, expected {expected}")
        if began is None and code != 0:
            self._wrong.append(f"{fault}: ended with {code} before it came to it")
        self._kept = self._good_step(fault.damage)
        lost = max(0, at - self._kept) if code != 0 else 0
        # A save may still have been under way, and a damaged one counts as none.
        if lost > self._run.checkpoint.every * (2 if fault.damage is None else 3):
            self._wrong.append(f"{fault}: {lost} steps lost")
        took = None if began is None or code is None else ended - began
        return Outcome(str(fault), code, at, None, lost, took, None)

    def _watch(self, process: subprocess.Popen[bytes], before: list[Outcome]) -> None:
        """Until the run ends, or has survived a full disk; note where and when it went on."""
        start, went_on = time.monotonic(), None
        while process.poll() is None:
            if went_on is None and self._has_new_line():
                went_on = time.monotonic() - start
            if self._survived():
                break
            if time.monotonic() - start > TIMEOUT_S:
                process.kill()
                raise UserError(f"nothing happened for {TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        resumed = self._resumed_at()
        if before and resumed is not None:
            if resumed != self._kept:
                problem = f"resumed at step {resumed}, expected {self._kept}"
                self._wrong.append(f"{before[-1].fault}: {problem}")
            before[-1] = replace(before[-1], resumed_at=resumed, recovered_s=went_on)

    def _survived(self) -> bool:
        """Whether the run has gone on for a step after a disk was full."""
        is_full = self._log.exists() and self._spec.startswith("full")
        self._full_at = self._full_at or (self._last_step() if is_full else 0)
        return is_full and self._last_step() > self._full_at + 1

    def _has_new_line(self) -> bool:
        """Lines beyond the step that a run resumes at are dropped before it begins."""
        resumed = self._resumed_at()
        return resumed is not None and self._last_step() > resumed

    def _resumed_at(self) -> int | None:
        """The step at which the run that was launched last has begun; None if it has not yet."""
        text = self._console.read_text(errors="replace") if self._console.exists() else ""
        found = re.findall(r"resuming at step (\d+)|new run", text)
        return int(found[-1] or 0) if found else None

    def _good_step(self, damage: str | None) -> int:
        """The step of the newest whole checkpoint once the newest of all is damaged."""
        found = all_in(self._broken / "checkpoints")
        if damage is not None and len(found) > 1:
            _damage(found[-1], damage, self._chance)
            found = found[:-1]
        return int(found[-1].name.removeprefix("step-")) if found else 0

    def _start_over_if_done(self) -> None:
        """A run that comes to its end is set back to its oldest checkpoint."""
        found = all_in(self._broken / "checkpoints")
        if self._kept < self._run.train.steps - 3 * self._run.checkpoint.every:
            return
        for path in found[1:]:
            remove(path)
        self._kept = int(found[0].name.removeprefix("step-"))

    def _finish(self, run_dir: Path, before: list[Outcome] | None = None) -> None:
        process = self._launch(run_dir, {})
        self._watch(process, before or [])
        if process.returncode != 0:
            raise UserError(
                f"the run itself ended with code {process.returncode}:\n"
                + self._console.read_text(errors="replace")
            )

    def _launch(self, run_dir: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._spec, self._full_at = environment.get(FAULT, ""), 0
        resumes = (run_dir / "run.toml").exists()
        where = ["--resume" if resumes else "--run-dir", str(run_dir)]
        many = ["--nproc", str(self._nproc)] if self._nproc > 1 else []
        command = [sys.executable, "-m", "longspan", "train", *self._items, *many, *where]
        poison = {POISON: ",".join(map(str, self._poisoned))}
        with self._console.open("wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, **poison, **environment}, stdout=log, stderr=log
            )

    def _last_step(self) -> int:
        return max((line["step"] for line in lines_of(self._broken / "metrics.jsonl")), default=0)

    def _until(self, condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise UserError(f"nothing happened for {TIMEOUT_S:.0f} s")
            time.sleep(0.01)


def _alive(launcher: int) -> bool:
    """Whether a process that `launcher` started is still there."""
    wanted = f"{PARENT}={launcher}"
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_text().split()[2] == "Z":
                continue
            if wanted in (folder / "environ").read_text(errors="replace").split("\0"):
                return True
        except OSError:
            continue  # it has just ended, or is not ours
    return False


def _damage(path: Path, how: str, chance: random.Random) -> None:
    file = chance.choice(sorted(path.glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    match how:
        case "flip a byte":
            content[chance.randrange(len(content))] ^= 1
            file.write_bytes(content)
        case "cut a file short":
            file.write_bytes(content[: chance.randrange(len(content))])
        case "remove a file":
            file.unlink()
        case _:
            (path / "manifest.json").unlink()


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}
