"""`layout = "auto"` and `train.chunk_tokens = "auto"`, once devices and processes are known.

The first layout of a search, and the largest chunks that fit. Every rank finds them for itself:
they depend on the run, the number of processes, the kind of device and, where something must be
offloaded, the memory of the machine. `open_mesh` makes sure that all have found the same layout.
"""

from __future__ import annotations

import os

from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import Device, cpu_device, cpu_memory, device_of, find_device, may_have_gpu
from longspan.planning.chunks import chunk_sizes
from longspan.planning.memory import needed_by
from longspan.planning.run_time import with_precision
from longspan.planning.savings import CHUNKS, ROWS, SAVING_KEYS, is_allowed, savings_text
from longspan.planning.search import MICRO_BATCH, TRAIN_KEYS, Search, search, usable_memory

SHOWN = 8
"""Layouts to look for: the first, those that may be as fast, and what it is compared with."""


def choose_layout(run: Run, world: int, hardware: str | None = None) -> Run:
    """The run with the layout that is predicted to be the fastest of those that fit.

    Also the micro-batch, activation checkpointing and what else saves memory, if the run file does
    not set them. The devices are those of this machine, or `hardware`.
    """
    for key, value in (("model.factory", run.model.factory), ("engine.name", run.engine.name)):
        if value not in ("", "native"):
            raise UserError(
                f'layout = "auto" is not supported with {key} = "{value}", of which nothing is '
                "predicted: set the axes of [layout]"
            )
    device = device_of(hardware) if hardware else this_device(run, world)
    fixed = [key for key in TRAIN_KEYS if key in run.train.model_fields_set]
    if run.train.has_auto_chunks:
        fixed = [key for key in fixed if key not in (CHUNKS, ROWS)]
    here = None if hardware else cpu_memory() // processes_here(world)
    found = search(run, world, device, fixed=fixed, shown=SHOWN, cpu_memory=here)
    if not found.ranked:
        raise UserError(f'layout = "auto": {"; ".join(found.why())}; see longspan plan')
    best = found.best.run
    chosen = {key: getattr(best.train, key) for key in TRAIN_KEYS}
    chosen[ROWS] |= run.train.offload_chunk_rows and chosen[CHUNKS] > 0
    train = run.train.with_chunks(best.train.chunk_tokens).model_copy(update=chosen)
    return run.model_copy(
        update={"layout": best.layout.taken_for(_why(found, fixed)), "train": train}
    )


def choose_chunks(run: Run, world: int, hardware: str | None = None) -> Run:
    """The run with whole sequences if they fit the devices, else in the largest chunks that do.

    The devices are those of this machine, or `hardware`.
    """
    device = device_of(hardware) if hardware else this_device(run, world)
    least = 0
    for size in (0, *chunk_sizes(run)):
        train = run.train.with_chunks(size)
        found = run.model_copy(update={"train": train})
        if not is_allowed(found, world):
            continue
        if needed_by(with_precision(found, device), world) <= usable_memory(device):
            return found
        least = size
    how = f"in chunks of {least:,} tokens" if least else "whole, and chunks are not supported here"
    raise UserError(
        f'train.chunk_tokens = "auto": sequences of {run.data.context:,} tokens do not fit '
        f"{device.title} {how}; see longspan plan"
    )


def this_device(run: Run, world: int) -> Device:
    """What each of the processes of this machine, of `world` in all, has to compute on."""
    if run.train.gpu:
        return device_of(run.train.gpu)
    here = processes_here(world)
    if run.train.device == "cpu" or not may_have_gpu():
        return cpu_device(here)
    import torch

    if not torch.cuda.is_available():
        return cpu_device(here)
    name = torch.cuda.get_device_name()
    found = find_device(name)
    if found is None:
        raise UserError(
            f'"auto" needs a known GPU, but "{name}" is not in the table: set train.gpu '
            "to a file of longspan doctor --calibrate, or the axes of [layout], such as "
            "layout.shard = -1"
        )
    return found


def processes_here(world: int) -> int:
    """The processes of this machine, of `world` in all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _why(found: Search, fixed: list[str]) -> str:
    train, chosen = found.best.run.train, ["the fastest predicted of those that fit"]
    if MICRO_BATCH not in fixed:
        chosen.append(f"micro-batch {train.micro_batch}")
    if not set(SAVING_KEYS) <= set(fixed):
        chosen.append(savings_text(train))
    return "; ".join([", ".join(chosen), *found.why()[:1]])
