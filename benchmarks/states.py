"""Memory of model and optimizer on a GPU: what `longspan plan` says, and what a rank takes.

    python benchmarks/states.py PROCESSES section.key=value ...

One process takes three training steps as rank 0 of a world in which there is nobody else: torch's
"fake" backend lets every message arrive at once, with anything in it. Losses mean nothing then,
and memory is that of a real run. The samples are 64 tokens long and blocks are computed again in
the backward pass, so that activations are next to nothing.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from longspan.data import open_source
from longspan.device import autocast, resolve
from longspan.engines import Native
from longspan.parallel.placement import placement
from longspan.parallel.world import World
from longspan.planning import states_of
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.loop import train_step
from longspan.training.state import State

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
    "train.activation_checkpointing=full",
]
MIB = 2**20


def main() -> None:
    world, given, device = int(sys.argv[1]), sys.argv[2:], torch.device("cuda")
    run = resolve(load_run(None, [*OPTIONS, *given], world=world), device)
    planned = states_of(run, world)[0]
    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    source, before = open_source(run.data, run.model), _taken_by_cublas(device)
    with placement(run.layout, World(0, world, 0), device) as placed:
        engine = Native(run, placed, device, lambda: autocast(run))
        state = State(engine, placed, Guard(0.0, device))
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            train_step(state, placed, run, source, device)
        peak = torch.cuda.max_memory_allocated() - before
        between = torch.cuda.memory_allocated() - before
    kept = planned.parameters + planned.optimizer + planned.signs
    print(f"{world} processes, {' '.join(given)}")
    for name, ours, theirs in (
        ("at the peak", planned.on_device, peak),
        ("between steps", kept, between),
    ):
        words = f"planned {ours / MIB:,.0f} MiB, measured {theirs / MIB:,.0f}"
        print(f"  {name:<15}{words} ({theirs / ours - 1:+.1%})")


def _taken_by_cublas(device: torch.device) -> int:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
