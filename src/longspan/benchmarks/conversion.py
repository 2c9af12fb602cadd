"""`longspan bench conversion`: the loss of a run after conversion, and after fine-tuning.

A trained run is converted by each method of `longspan sketch`, with and without calibration, and
each result is fine-tuned. Without a run, the built-in one is trained first. The weight error is the
mean of ‖W − Ŵ‖ / ‖W‖ over layers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from longspan.benchmarks.measure import Rows, machine, open_console, write_json
from longspan.errors import UserError
from longspan.runfile import load_run, saved_run_file
from longspan.sketch_run import convert, open_trained
from longspan.sketching.conversion import Method
from longspan.training import train
from longspan.wording import counted

METHODS: list[tuple[Method, int]] = [
    ("svd", 0),
    ("svd", 16),
    ("least_squares", 0),
    ("least_squares", 16),
    ("sketch", 0),
]
"""Each with the number of calibration samples."""

COLUMNS = {
    "method": -25, "parameters": 7, "FLOPs": 7, "weight error": 7, "loss before": 7,
    "converted": 7, "fine-tuned": 7,
}  # fmt: skip


def bench_conversion(
    run_dir: Path | None, steps: int, keep: float, device: str, json_file: Path | None
) -> None:
    """Convert and fine-tune, print a table and write JSON."""
    if steps < 1 or not 0 < keep <= 1:
        raise UserError(f"expected --steps >= 1 and 0 < --keep <= 1, got {steps} and {keep}")
    console, where = open_console(json_file), machine(device)
    name, rows = run_dir or "the built-in run", []
    console.print(f"{where}; {name}, keep {keep:g}, {counted(steps, 'step')} of fine-tuning")
    table = Rows(console, COLUMNS)
    with tempfile.TemporaryDirectory(prefix="longspan-conversion-") as folder:
        dense = run_dir or Path(folder, "dense")
        if run_dir is None:
            train(load_run(None, ["track.prompt="]), dense)
        for method, calibrate in METHODS:
            print(f"converting: {method}, {calibrate} calibration samples", file=sys.stderr)
            out = Path(folder, f"{method}-{calibrate}")
            row = _convert(dense, out, method, calibrate, steps, keep)
            rows.append(row)
            losses = (f"{row[key]:.4f}" for key in ("before", "after", "fine_tuned"))
            ratios = f"{row['parameters']:.0%}", f"{row['flops']:.0%}"
            table.add(row["method"], *ratios, f"{row['weight_error']:.3f}", *losses)
    write_json(json_file, where, {"run": str(name), "steps": steps, "keep": keep}, rows)


def _convert(
    dense: Path, out: Path, method: Method, calibrate: int, steps: int, keep: float
) -> dict[str, Any]:
    made = convert(open_trained(dense), out, keep=keep, method=method, calibrate=calibrate)
    errors = [row.weight_error for row in made.report.rows if row.weight_error is not None]
    run = load_run(saved_run_file(out), [f"train.steps={steps}", "track.prompt="])
    return {
        "method": method + (f", {counted(calibrate, 'sample')}" if calibrate else ""),
        "parameters": made.report.after.stored / made.report.before.stored,
        "flops": made.report.after.forward / made.report.before.forward,
        "weight_error": sum(errors) / len(errors),
        "before": made.loss_before,
        "after": made.loss_after,
        "fine_tuned": train(run, out, resume=True).validation_loss,
    }
