"""`longspan bench engines`: throughput and memory of one run under each engine.

Each engine trains in a process of its own, one after another; the first steps compile and warm up,
the last ones count. On a GPU the run is a 350m model unless overrides say otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.benchmarks.measure import Rows, machine, open_console, write_json
from longspan.progress import waiting

STEPS, COUNTED_STEPS = 12, 6
ENGINES: dict[str, list[str]] = {
    "native": [],
    "deepspeed, ZeRO-0": ["engine.name=deepspeed", "layout.zero=0"],
    "deepspeed, ZeRO-1": ["engine.name=deepspeed", "layout.zero=1"],
    "deepspeed, ZeRO-2": ["engine.name=deepspeed", "layout.zero=2"],
    "deepspeed, ZeRO-3": ["engine.name=deepspeed", "layout.zero=3"],
    "accelerate, plain": ["engine.name=accelerate", "engine.mode=plain"],
    "accelerate, FSDP2": ["engine.name=accelerate", "engine.mode=fsdp2"],
    "accelerate, DeepSpeed ZeRO-2": [
        "engine.name=accelerate", "engine.mode=deepspeed", "layout.zero=2",
    ],
}  # fmt: skip
GPU_RUN = [
    "model.preset=350m", "model.vocab=32000", "data.source=recall", "data.context=8192",
    "train.micro_batch=2", "train.global_batch=4",
    "train.compile=false",  # not supported with ZeRO-3
]  # fmt: skip
SHORT_RUN = [f"train.steps={STEPS}", "train.eval_samples=1", "checkpoint.every=0"]
SHORT_RUN += ["track.log_every=1", "track.prompt="]
ONE_PROCESS = {
    # DeepSpeed and Accelerate need a rendezvous even for one process.
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29531",
}  # fmt: skip


def bench_engines(device: str, overrides: Sequence[str], json_file: Path | None) -> None:
    """Train under each engine, print a table and write JSON."""
    console, where = open_console(json_file), machine(device)
    options = [*(GPU_RUN if device == "cuda" else []), *SHORT_RUN, *overrides]
    console.print(f"{where}; {' '.join(overrides)}".removesuffix("; "))
    columns = {"engine": -28, "tokens/s": 10, "of native": 9, "GiB": 8, "last loss": 9}
    table = Rows(console, columns)
    rows: list[dict[str, Any]] = []
    baseline = None
    for name, chosen in ENGINES.items():
        with waiting(f"training {STEPS} steps: {name}"):
            row = {"engine": name, **_train([*options, *chosen])}
        rows.append(row)
        if "error" in row:
            console.print(f"{name:<28}  {row['error']}", markup=False)
            continue
        baseline = baseline or row["tokens_per_s"]
        row["of_native"] = row["tokens_per_s"] / baseline
        memory, loss = f"{row['memory_bytes'] / 2**30:.2f}", f"{row['loss']:.5f}"
        rate = f"{row['tokens_per_s']:,.0f}"
        table.add(name, rate, f"{row['of_native']:.3f}", memory, loss)
    write_json(json_file, where, {"overrides": options}, rows)


def _train(options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="longspan-engines-") as folder:
        run_dir = Path(folder) / "run"
        done = subprocess.run(
            [sys.executable, "-m", "longspan", "train", *options, "--run-dir", str(run_dir)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **ONE_PROCESS},
        )
        if done.returncode != 0:
            return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "tokens_per_s" in line][-COUNTED_STEPS:]
    rate = statistics.median(line["tokens_per_s"] for line in steps)
    last = steps[-1]
    return {"tokens_per_s": rate, "memory_bytes": last["memory_bytes"], "loss": last["loss"]}
