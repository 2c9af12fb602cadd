"""`longspan bench memory`: planned against measured memory of model and optimizer, on one GPU.

One process takes a few training steps as rank 0 of a world without other processes: collectives of
torch's "fake" backend return at once with undefined data. Losses are meaningless, but memory is
that of a real run. Samples have 64 tokens and activation checkpointing is on, so that activations
hardly count. The workspace of cuBLAS is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from longspan.benchmarks.measure import machine, open_console, require_cuda, write_json
from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import resolve
from longspan.engines import open_engine
from longspan.errors import UserError
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning import memory_per_rank
from longspan.runfile import load_run
from longspan.torch_internals import fake_store
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

OPTIONS = [
    "model.preset=350m",
    "model.vocab=4096",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=8",
    "attention.segment_lengths=[64]",
    "attention.dilation_rates=[1]",
    "train.device=cuda",
    "train.compile=false",
    "train.cuda_graphs=false",
    "train.activation_checkpointing=full",
]
MIB = 2**20


def bench_memory(world: int, overrides: Sequence[str], json_file: Path | None) -> None:
    """Plan and measure, print a table and write JSON."""
    if world < 1:
        raise UserError(f"--gpus must be at least 1, got {world}")
    require_cuda("memory")
    console, where = open_console(json_file), machine("cuda")
    run = resolve(load_run(None, [*OPTIONS, *overrides], world=world), torch.device("cuda"))
    planned = memory_per_rank(run, world)[0]
    libraries = planned.peak["library workspaces"]  # measured before, and subtracted
    states = 0 if run.layout.offload else planned.parameters + planned.optimizer
    measured_peak, measured_between = measure_memory(run, world)
    rows = {
        "peak of a step": (planned.allocated - libraries, measured_peak),
        "between steps": (states + planned.signs, measured_between),
    }
    processes = "processes" if world > 1 else "process"
    console.print(f"{where}; {world:,} {processes}, {' '.join(overrides)}", soft_wrap=True)
    table = Table("memory", "planned MiB", "measured MiB", "difference", box=None)
    for when, (ours, real) in rows.items():
        difference = f"{real / ours - 1:+.1%}" if ours else "–"
        figures = f"{ours / MIB:,.0f}", f"{real / MIB:,.0f}", difference
        table.add_row(when, *figures)
    console.print(table)
    found = [{"when": when, "planned": x, "measured": y} for when, (x, y) in rows.items()]
    write_json(json_file, where, {"gpus": world, "overrides": list(overrides)}, found)


def measure_memory(run: Run, world: int, steps: int = 3) -> tuple[int, int]:
    """Bytes at the peak of the last of `steps` steps, and after it."""
    device = torch.device("cuda")
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=fake_store())
    source, before = open_source(run.data, run.model), _cublas_workspace(device)
    with open_mesh(run.layout, World(0, world, 0), device) as mesh:
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        state = TrainState(engine, mesh, Guard(0.0, device))
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            for _ in range(steps):
                torch.cuda.reset_peak_memory_stats()
                train_step(state, data, run.train, device)
        peak = torch.cuda.max_memory_allocated() - before
        between = torch.cuda.memory_allocated() - before
    if world > 1:
        dist.destroy_process_group()
    return peak, between


def _cublas_workspace(device: torch.device) -> int:
    """Bytes that cuBLAS allocates for itself on first use."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    del x
    return torch.cuda.memory_allocated()
