"""`longspan bench step-memory`: the planned peak of a step against the allocator's, over runs.

One process takes two steps of each run, with the allocator emptied in between. A run that is out of
memory is compared with the memory of the device. On a CPU, tiny models show that it works: the live
tensors are counted.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from longspan.benchmarks.measure import Rows, machine, open_console, require_cuda, write_json
from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import resolve
from longspan.engines import open_engine
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning.memory import DeviceMemory, memory_per_rank
from longspan.planning.tracing import LiveMemory
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.out_of_memory import is_out_of_memory
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

GB = 1e9
COMMON = ["data.source=recall", "train.steps=2", "train.global_batch=1", "checkpoint.every=0"]
COMMON += ["train.cuda_graphs=false"]  # which take what launched passes do
PATTERNS = {
    "dilated": [],
    "dense": ["attention.kind=dense"],
    "block-sparse": ["attention.kind=block_sparse", "attention.local_window=1024"],
}


def options_of(device: str) -> Iterator[list[str]]:
    """The runs: sizes × contexts × activation checkpointing × patterns × optimizers."""
    if device == "cpu":
        tiny = ["model.hidden=64", "model.heads=4", "data.context=512", "train.compile=false"]
        for mode, precision in itertools.product(("none", "selective", "full"), ("fp32", "bf16")):
            checkpointing = f"train.activation_checkpointing={mode}"
            yield [*tiny, checkpointing, f"train.precision={precision}"]
        return
    for preset, context, mode in (
        *itertools.product(("125m", "350m", "1.3b"), (8192,), ("none", "selective", "full")),
        *itertools.product(("125m", "350m", "1.3b"), (65536,), ("selective", "full")),
        ("125m", 65536, "none"),
        ("125m", 131072, "selective"),
        ("350m", 131072, "full"),
        ("125m", 524288, "full"),
        ("350m", 524288, "full"),
        ("125m", 1048576, "full"),
        ("1.3b", 262144, "full"),
        ("1.3b", 524288, "full"),
    ):
        yield [
            f"model.preset={preset}",
            f"data.context={context}",
            f"train.activation_checkpointing={mode}",
        ]
    small = ["model.preset=125m", "model.vocab=50304", "data.context=32768"]
    for pattern, optimizer in itertools.product(PATTERNS, ("adamw", "adamw8bit")):
        yield [*small, *PATTERNS[pattern], f"train.optimizer={optimizer}"]
    accumulated = ["model.preset=350m", "data.context=8192", "train.micro_batch=2"]
    yield [*accumulated, "train.global_batch=4"]
    yield [*accumulated, "train.global_batch=4", "train.compile=false"]


def bench_step_memory(device: str, json_file: Path | None) -> None:
    """Plan and measure each run, print a table and write JSON."""
    if device == "cuda":
        require_cuda("step-memory")
    console, where = open_console(json_file), machine(device)
    console.print(where)
    table = Rows(console, {"planned GB": 10, "measured GB": 13, "error": 7, "run": -1})
    rows = list[dict[str, Any]]()
    for options in options_of(device):
        run = resolve(
            load_run(None, [*COMMON, f"train.device={device}", *options]), torch.device(device)
        )
        (planned,) = memory_per_rank(run, 1)
        measured = _measure(run, torch.device(device))
        rows.append(_row(options, planned, measured))
        error = rows[-1]["error"]
        cells = (
            f"{planned.allocated / GB:,.3f}",
            "out of memory" if measured is None else f"{measured / GB:,.3f}",
            "–" if error is None else f"{error:+.1%}",
        )
        table.add(*cells, " ".join(options))
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        console.print(
            f"{len(errors)} runs: median error {median(map(abs, errors)):.1%}, from "
            f"{min(errors):+.1%} to {max(errors):+.1%}"
        )
    write_json(json_file, where, {"device": device}, rows)


def _row(options: list[str], planned: DeviceMemory, measured: int | None) -> dict[str, Any]:
    error = None if measured is None else planned.allocated / measured - 1
    return {
        "options": options,
        "planned": planned.allocated,
        "planned_on_device": planned.on_device,
        "peak": dict(planned.peak),
        "peak_at": planned.peak_at,
        "measured": measured,
        "error": error,
    }


def _measure(run: Run, device: torch.device) -> int | None:
    """Bytes at the peak of the second step; None if it is out of memory."""
    gc.collect()
    torch.compiler.reset()
    live = LiveMemory() if device.type == "cpu" else None
    if live is None:
        torch.cuda.empty_cache()
    try:
        return _peak_of_a_step(run, device, live)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _peak_of_a_step(run: Run, device: torch.device, live: LiveMemory | None) -> int:
    source = open_source(run.data, run.model)
    with open_mesh(run.layout, World(0, 1, 0), device) as mesh:
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        state = TrainState(engine, mesh, Guard(0.0, device))
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            step = partial(train_step, state, data, run.train, device)
            if live is None:
                for _ in range(2):
                    torch.cuda.reset_peak_memory_stats()
                    step()
                return torch.cuda.max_memory_allocated()
            with live:
                live.add(*engine.model.parameters())
                for _ in range(2):
                    live.reset_peak()
                    step()
            return live.peak
