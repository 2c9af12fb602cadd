"""`longspan verify`: train the same steps in one process and in a parallel layout, and compare.

Neither a layout nor chunks change what a step computes, so losses, gradient norms and weights must
agree up to the rounding of sums in another order.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longspan.checkpoint import CHECKPOINTS, checkpoint_path, load
from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import may_have_gpu
from longspan.launching.local import run_processes
from longspan.progress import Progress
from longspan.runfile import ONE_PROCESS, RUN_FILE, dump_run, load_run
from longspan.tracking import read_metrics
from longspan.wording import counted

TOLERANCES = {
    "fp32": (1e-5, 1e-4, 1e-4, "float32 sums in another order"),
    "16-bit": (5e-3, 5e-2, 5e-2, "16-bit matrix products, rounded in another order"),
    "compressed": (1e-4, 5e-3, 5e-3, "gradients reduced in 16 bits, which one process does not"),
}
"""Relative tolerances of losses, gradient norms and weights, and the reason."""

WHOLE = ["train.chunk_tokens=0", "train.offload_chunk_rows=false"]
"""The run that others are compared with takes sequences whole."""


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference of one quantity, and where it first exceeds the tolerance."""

    name: str
    largest: float
    tolerance: float
    first_mismatch: str | None


@dataclass(frozen=True)
class Report:
    """The result of `verify`."""

    layout: str
    steps: int
    precision: str
    reason: str
    comparisons: list[Comparison]

    @property
    def agrees(self) -> bool:
        return all(comparison.first_mismatch is None for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}

    def __str__(self) -> str:
        steps = counted(self.steps, "step")
        lines = [f"{self.layout} compared with one process, {steps}, {self.precision}"]
        for found in self.comparisons:
            mismatch = f"  first at {found.first_mismatch}" if found.first_mismatch else ""
            lines.append(
                f"  {found.name:<14} largest relative difference {found.largest:.1e}, "
                f"tolerance {found.tolerance:.0e}{mismatch}"
            )
        lines.append(f"  tolerances allow for {self.reason}")
        lines.append("all agree" if self.agrees else "THEY DIFFER")
        return "\n".join(lines)


def verify(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    builtin: str = "cpu",
    nproc: int | None = None,
    steps: int = 5,
) -> Report:
    """Train `steps` steps of a run in one process and in its layout, and compare the results.

    The run is that of `load_run(file, overrides)`, and `nproc` by default what its layout needs:
    `verify("run.toml", ["layout.shard=2"]).agrees`. It starts the processes itself;
    if one of the two runs fails it raises SystemExit, with their messages on stderr.
    """
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    given = load_run(file, overrides, builtin=builtin, world=None)
    world = nproc if nproc is not None else given.layout.min_world_size
    if world < 2 and not (world == 1 and (given.train.chunk_tokens or given.layout.offload)):
        raise UserError(
            f"verify compares a layout of at least 2 processes with one, got {world}: set an axis, "
            "for example layout.shard=2, or --nproc; one process is compared with itself only for "
            "its train.chunk_tokens or layout.offload"
        )
    settings = [
        f"train.steps={steps}",
        f"train.warmup_steps={min(steps, given.train.warmup_steps)}",
        "checkpoint.every=1",
        f"checkpoint.keep={steps}",
        "track.log_every=1",
        "track.prompt=",
        "train.eval_every=0",
        "train.eval_samples=1",
        # With 1e-8, Adam turns the rounding of a nearly zero gradient into a full step.
        "train.eps=1e-6",
    ]
    if given.train.schedule == "wsd":
        settings.append("train.schedule=constant")  # its decay is longer than these steps
    run = load_run(file, [*overrides, *settings], builtin=builtin, world=world)
    _check_gpus(run, world)
    with tempfile.TemporaryDirectory(prefix="longspan-verify-") as folder, Progress() as progress:
        reference, parallel = Path(folder) / "reference", Path(folder) / "parallel"
        saved = Path(folder) / RUN_FILE  # one process must not choose another batch
        saved.write_text(dump_run(run), encoding="utf-8")
        for run_dir, nproc, extra in (
            (reference, 1, [*ONE_PROCESS, *WHOLE]),
            (parallel, world, []),
        ):
            items = [str(saved), *extra, "--run-dir", str(run_dir)]
            command = [sys.executable, "-m", "longspan", "train", *items]
            where = f"on {nproc} processes" if nproc > 1 else "in one process"
            where += ", in chunks" if run.train.chunk_tokens and not extra else ""
            progress.phase(f"training {counted(steps, 'step')} {where}")
            code = run_processes(
                command,
                nproc,
                run_dir / "logs",
                quiet=True,
                on_poll=partial(_show_step, progress, run_dir),
            )
            if code != 0:
                raise SystemExit(code)
        progress.phase("comparing losses, gradient norms and weights")
        return _compare(run, world, steps, parallel, reference)


def _check_gpus(run: Run, world: int) -> None:
    if run.train.device == "cpu" or not may_have_gpu():
        return
    import torch

    if 0 < (gpus := torch.cuda.device_count()) < world:
        raise UserError(
            f"verify needs a GPU for each of {world} processes, but this machine has {gpus}: "
            "set train.device=cpu"
        )


def _compare(run: Run, world: int, steps: int, parallel: Path, reference: Path) -> Report:
    on_cpu = run.train.device == "cpu" or not _has_gpu()
    is_exact = run.train.precision == "fp32" or (run.train.precision == "auto" and on_cpu)
    precision = "fp32" if is_exact else run.train.precision
    is_compressed = is_exact and run.layout.gradient_compression == "bf16"
    kind = "compressed" if is_compressed else "fp32" if is_exact else "16-bit"
    loss, grad_norm, weights, reason = TOLERANCES[kind]
    found, expected = _metrics(parallel), _metrics(reference)
    comparisons = [
        _compare_metric("loss", found, expected, loss),
        _compare_metric("grad_norm", found, expected, grad_norm),
        _compare_weights(parallel, reference, steps, weights),
    ]
    ranks = run.layout.resolve(world)
    layout = " × ".join(f"{axis} {n}" for axis, n in ranks.items() if n > 1)
    if ranks["shard"] > 1:
        layout += f", ZeRO stage {run.layout.zero}"
    if run.train.chunk_tokens:
        chunks = f"chunks of {run.train.chunk_tokens:,} tokens"
        layout = f"{layout}, {chunks}" if layout else chunks
    if run.layout.offload:
        layout = f"{layout}, offloaded to CPU" if layout else "offloaded to CPU"
    if run.engine.name != "native":
        layout += f", engine {run.engine.name}"
    return Report(layout, steps, precision, reason, comparisons)


def _show_step(progress: Progress, run_dir: Path) -> None:
    lines = read_metrics(run_dir / "metrics.jsonl")
    progress.detail(f"step {lines[-1]['step']}" if lines else "starting")


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]


def _compare_metric(
    name: str, found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float
) -> Comparison:
    largest, mismatch = 0.0, None
    for line, reference in zip(found, expected, strict=True):
        a, b = line[name], reference[name]
        difference = abs(a - b) / max(abs(b), 1e-12)
        largest = max(largest, difference)
        if not difference <= tolerance and mismatch is None:  # true for NaN, too
            mismatch = f"step {line['step']}: {a:.7g}, expected {b:.7g}"
    return Comparison(name, largest, tolerance, mismatch)


def _compare_weights(parallel: Path, reference: Path, steps: int, tolerance: float) -> Comparison:
    """Compare ‖difference‖ / ‖weight‖ of each tensor after each step."""
    largest, mismatch = 0.0, None
    for step in range(1, steps + 1):
        found, expected = (
            load(checkpoint_path(folder / CHECKPOINTS, step), "model")
            for folder in (parallel, reference)
        )
        for name, weight in expected.items():
            difference = float((found[name] - weight).norm() / weight.norm().clamp(min=1e-12))
            largest = max(largest, difference)
            if not difference <= tolerance and mismatch is None:
                mismatch = f"step {step}, {name}: {difference:.1e}"
    return Comparison("weights", largest, tolerance, mismatch)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
