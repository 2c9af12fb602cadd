"""What a trained run loses when its linear layers are stored in half the numbers, and regains.

    python benchmarks/conversion.py [RUN_DIR [STEPS [KEEP]]]

RUN_DIR (else the built-in run is trained first) is converted by each method, with and without
calibration, and each is trained on for STEPS (200). Prints a table and writes conversion.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from longspan.runfile import load_run, saved_run_file
from longspan.sketch_run import convert, open_trained
from longspan.sketching.conversion import Method
from longspan.training import train

METHODS: list[tuple[Method, int]] = [
    ("svd", 0),
    ("svd", 16),
    ("least_squares", 0),
    ("least_squares", 16),
    ("sketch", 0),
]
"""And how many samples to calibrate with."""


def trained_on(run_dir: Path, steps: int) -> float | None:
    """The validation loss of a converted run after `steps`."""
    run = load_run(saved_run_file(run_dir), [f"train.steps={steps}", "track.prompt="])
    return train(run, run_dir, resume=True).validation_loss


def main() -> None:
    given, steps, keep = [*sys.argv[1:], *[""] * 3][:3]
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(given) if given else Path(temporary, "dense")
        if not given:
            train(load_run(None, ["track.prompt="]), base)
        count, share = int(steps or 200), float(keep or 0.5)
        rows = []
        for method, calibrate in METHODS:
            out = Path(temporary, f"{method}-{calibrate}")
            source = open_trained(base)
            made = convert(source, out, keep=share, method=method, calibrate=calibrate)
            errors = [row.weight_error for row in made.report.rows if row.weight_error is not None]
            rows.append(
                {
                    "method": method + (f", {calibrate} samples" if calibrate else ""),
                    "stored": made.report.after.stored / made.report.before.stored,
                    "flops": made.report.after.forward / made.report.before.forward,
                    "weight_error": sum(errors) / len(errors),
                    "before": made.loss_before,
                    "after": made.loss_after,
                    "recovered": trained_on(out, count),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    name = given or "built-in run"
    print(f"{name}, keep {share}, {count} steps, torch {torch.__version__}")
    print("| method | stored | FLOPs forward | weight error | before | after | trained on |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['method']} | {row['stored']:.0%} | {row['flops']:.0%} | "
            f"{row['weight_error']:.3f} | {row['before']:.4f} | {row['after']:.4f} | "
            f"{row['recovered']:.4f} |"
        )
    Path("conversion.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
