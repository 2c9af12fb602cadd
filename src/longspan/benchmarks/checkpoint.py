"""`longspan bench checkpoint`: how long training waits for synchronous and asynchronous saves.

Random tensors are saved to the current folder's disk several times. The first asynchronous save
also allocates the staging buffers, so it is reported separately; other figures are medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from longspan.benchmarks.measure import Rows, machine, open_console, require_cuda, write_json
from longspan.checkpoint import TensorShard
from longspan.config import Checkpoint, Layout
from longspan.errors import UserError
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.world import World
from longspan.progress import measuring
from longspan.training.saving import Saver

TENSORS, SAVES = 64, 5


def bench_checkpoint(gib: float, device: str, json_file: Path | None) -> None:
    """Save, print a table and write JSON."""
    rows = int(gib * 2**30 / TENSORS / 4 / 1024)
    if rows < 1:
        raise UserError(f"--gib must be at least {TENSORS * 4096 / 2**30:.4f}, got {gib}")
    if device == "cuda":
        require_cuda("checkpoint --device cuda")
    console, where = open_console(json_file), machine(device)
    console.print(f"{where}; {gib:g} GiB in {TENSORS} tensors")
    columns = {"save": -12, "training waits s": 9, "the first time s": 9, "written after s": 9}
    table, found = Rows(console, columns), []
    tensors = [torch.randn(rows, 1024, device=device) for _ in range(TENSORS)]
    shards = {f"model/{i}": TensorShard.full(tensor) for i, tensor in enumerate(tensors)}
    for is_async in (False, True):
        with measuring(
            f"saving {SAVES} times, {'asynchronously' if is_async else 'synchronously'}"
        ):
            row = _measure(shards, is_async)
        found.append(row)
        waits = f"{row['blocked_s']:.3f}", f"{row['first_blocked_s']:.3f}"
        table.add(row["save"], *waits, f"{row['total_s']:.2f}")
    write_json(json_file, where, {"gib": gib, "tensors": TENSORS, "saves": SAVES}, found)


def _measure(shards: dict[str, TensorShard], is_async: bool) -> dict[str, Any]:
    state: Any = SimpleNamespace(
        step=0,
        engine=SimpleNamespace(is_finite=lambda: True),
        tensor_shards=lambda: shards,
        saved_state=dict,
    )
    with tempfile.TemporaryDirectory(prefix="longspan-checkpoint-", dir=".") as folder:
        settings = Checkpoint(async_save=is_async, keep=1)
        saver = Saver(Path(folder), settings, ParallelMesh(Layout(), World()), _warn)
        blocked, total = [], []
        for _ in range(SAVES):
            state.step += 1
            start, blocked_before = time.monotonic(), saver.blocked_s
            saver.begin(state)
            blocked.append(saver.blocked_s - blocked_before)
            saver.finish_all(state)
            total.append(time.monotonic() - start)
    return {
        "save": "asynchronous" if is_async else "synchronous",
        "blocked_s": statistics.median_high(blocked[1:]),
        "first_blocked_s": blocked[0],
        "total_s": statistics.median(total),
    }


def _warn(text: str) -> None:
    print(text, file=sys.stderr)
