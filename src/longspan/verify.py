"""`longspan verify`: the same steps in one process and in a layout, side by side.

A layout is a way to compute a step, so losses, gradient norms and weights must agree to within the
rounding of sums taken in another order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspan.checkpoint import load
from longspan.config import Run
from longspan.errors import UserError
from longspan.launching.local import run_processes
from longspan.runfile import ONE_PROCESS, load_run

TOLERANCES = {
    "fp32": (1e-5, 1e-4, 1e-4, "float32 sums taken in another order"),
    "16-bit": (5e-3, 5e-2, 5e-2, "16-bit products, whose rounding another order shows"),
}
"""Relative, of losses, gradient norms and weights, by precision, and why."""


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference of one quantity, and where it was first too large."""

    name: str
    largest: float
    tolerance: float
    first_wrong: str | None


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    layout: str
    steps: int
    precision: str
    reason: str
    comparisons: list[Comparison]

    @property
    def agrees(self) -> bool:
        return all(comparison.first_wrong is None for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees}

    def __str__(self) -> str:
        lines = [f"{self.layout} against one process, {self.steps} steps, {self.precision}"]
        for found in self.comparisons:
            wrong = f"  first at {found.first_wrong}" if found.first_wrong else ""
            lines.append(
                f"  {found.name:<14} largest relative difference {found.largest:.1e}, "
                f"allowed {found.tolerance:.0e}{wrong}"
            )
        lines.append(f"  allowed for {self.reason}")
        lines.append("they agree" if self.agrees else "THEY DIFFER")
        return "\n".join(lines)


def verify(
    file: Path | None,
    overrides: Sequence[str],
    *,
    builtin: str,
    nproc: int | None = None,
    steps: int = 5,
) -> Report:
    """Train `steps` steps of the run in one process and in its layout, and compare."""
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    given = load_run(file, overrides, builtin=builtin, world=None)
    world = nproc if nproc is not None else given.layout.fewest
    if world < 2:
        raise UserError(
            "the layout is one process, and there is nothing to compare: set an axis, "
            "for example layout.shard=2, or --nproc"
        )
    fixed = [
        f"train.steps={steps}",
        "checkpoint.every=1",
        f"checkpoint.keep={steps}",
        "track.log_every=1",
        "track.prompt=",
        "train.eval_every=0",
        "train.eval_samples=1",
        # With 1e-8 Adam makes a whole step of the rounding of a gradient that is nearly zero.
        "train.eps=1e-6",
    ]
    if given.train.schedule == "wsd":
        fixed.append("train.schedule=constant")  # its decay is longer than these steps
    run = load_run(file, [*overrides, *fixed], builtin=builtin, world=world)
    with tempfile.TemporaryDirectory(prefix="longspan-verify-") as folder:
        alone, laid_out = Path(folder) / "alone", Path(folder) / "layout"
        files = [str(file)] if file else []
        for where, count, extra in ((alone, 1, ONE_PROCESS), (laid_out, world, [])):
            items = [*files, *overrides, *fixed, *extra]
            command = [sys.executable, "-m", "longspan", "train", *items, "--run-dir", str(where)]
            code = run_processes(command, count, where / "logs", quiet=True)
            if code != 0:
                raise SystemExit(code)
        return _compare(run, world, steps, laid_out, alone)


def _compare(run: Run, world: int, steps: int, laid_out: Path, alone: Path) -> Report:
    on_cpu = run.train.device == "cpu" or not _has_gpu()
    is_exact = run.train.precision == "fp32" or (run.train.precision == "auto" and on_cpu)
    precision = "fp32" if is_exact else run.train.precision
    loss_limit, norm_limit, weight_limit, reason = TOLERANCES["fp32" if is_exact else "16-bit"]
    found, expected = _metrics(laid_out), _metrics(alone)
    comparisons = [
        _compare_numbers("loss", found, expected, loss_limit),
        _compare_numbers("grad_norm", found, expected, norm_limit),
        _compare_weights(laid_out, alone, steps, weight_limit),
    ]
    ranks = run.layout.resolve(world)
    layout = " × ".join(f"{axis} {n}" for axis, n in ranks.items() if n > 1)
    if ranks["shard"] > 1:
        layout += f", ZeRO stage {run.layout.zero}"
    if run.engine.name != "native":
        layout += f", by {run.engine.name}"
    return Report(layout, steps, precision, reason, comparisons)


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def _compare_numbers(
    name: str, found: list[dict[str, Any]], expected: list[dict[str, Any]], limit: float
) -> Comparison:
    largest, wrong = 0.0, None
    for ours, theirs in zip(found, expected, strict=True):
        difference = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-12)
        largest = max(largest, difference)
        if not difference <= limit and wrong is None:
            wrong = f"step {ours['step']}: {ours[name]:.7g} against {theirs[name]:.7g}"
    return Comparison(name, largest, limit, wrong)


def _compare_weights(laid_out: Path, alone: Path, steps: int, limit: float) -> Comparison:
    """By the norm of the difference over the norm, tensor by tensor and step by step."""
    largest, wrong = 0.0, None
    for step in range(1, steps + 1):
        ours, theirs = (
            load(folder / "checkpoints" / f"step-{step:08d}", "model")
            for folder in (laid_out, alone)
        )
        for name, weight in theirs.items():
            difference = float((ours[name] - weight).norm() / weight.norm().clamp(min=1e-12))
            largest = max(largest, difference)
            if not difference <= limit and wrong is None:
                wrong = f"step {step}, {name}: {difference:.1e}"
    return Comparison("weights", largest, limit, wrong)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
