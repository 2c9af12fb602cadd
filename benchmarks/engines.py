"""Speed and memory of one run under each engine, one after another, each in a process of its own.

python benchmarks/engines.py [section.key=value …]      # 350m on a GPU, tiny on a CPU, unless given
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

STEPS = 12
COUNTED = 6
"""The last so many steps count: the first compile and warm up."""
WAYS = {
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


def main() -> None:
    size = ["model.preset=350m", "data.context=8192", "train.micro_batch=2"]
    size += ["train.global_batch=4", "model.vocab=32000"]
    has_gpu = torch.cuda.is_available()
    fixed = [f"train.steps={STEPS}", "track.log_every=1", "track.prompt=", "train.eval_samples=1"]
    options = [*(size if has_gpu else []), *fixed, "checkpoint.every=0", *sys.argv[1:]]
    print(f"{'engine':<30}{'tokens/s':>12}{'of native':>11}{'GiB':>8}{'last loss':>11}")
    first = None
    for name, own in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="longspan-engines-") as folder:
            run_dir = Path(folder) / "run"
            command = [sys.executable, "-m", "longspan", "train", *options, *own]
            # The rendezvous of one process, which DeepSpeed and Accelerate want too.
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
            done = subprocess.run(
                [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, check=False,
                env={**os.environ, **alone},
            )  # fmt: skip
            if done.returncode != 0:
                said = done.stderr.strip().splitlines() or ["nothing said"]
                print(f"{name:<30}{said[-1]}")
                continue
            lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
            steps = [line for line in lines if "tokens_per_s" in line][-COUNTED:]
        rate = statistics.median(line["tokens_per_s"] for line in steps)
        first = first or rate
        memory, loss = steps[-1]["memory_bytes"] / 2**30, steps[-1]["loss"]
        print(f"{name:<30}{rate:>12,.0f}{rate / first:>11.3f}{memory:>8.2f}{loss:>11.5f}")


if __name__ == "__main__":
    main()
