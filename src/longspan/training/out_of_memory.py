"""Out of memory: a report by class of tensors, what would free memory, and a smaller retry.

Parameters, gradients and optimizer state are counted; the rest of the peak is activations and
workspace. How much of that a setting would free is an estimate.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.config import Run, Train
from longspan.device import peak_memory
from longspan.files import atomic_write_text
from longspan.parallel.dtensor import to_local
from longspan.planning.ladder import halved, rungs
from longspan.planning.memory import needed_by
from longspan.training.state import TrainState

HINT = "micro_batch"
"""A file of the run folder: the micro-batch to use after an out-of-memory error."""

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Suggestion(NamedTuple):
    """A setting, the bytes per rank that it would free if that is known, and what it costs."""

    setting: str
    frees: float | None
    cost: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or CPU allocation failed."""
    is_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain(error: BaseException, state: TrainState, run: Run, device: torch.device) -> str:
    """A report: the memory of each class of tensors, and settings that would free some."""
    used = memory_by_class(state, device)
    total = sum(used.values())
    message = str(error).splitlines() or [type(error).__name__]
    lines = [f"out of memory in step {state.step + 1}: {message[0]}"]
    lines += [
        f"  {name:<28}{_size(size):>12}{size / max(1, total):>6.0%}" for name, size in used.items()
    ]
    requested = requested_bytes(error)
    lines.append("settings that would free memory, cheapest first:")
    found = [*expandable_segments(error), *suggestions(used, run, state.mesh.world.size)]
    for setting, frees, cost in found:
        if frees is None:
            lines.append(f"  {setting:<40} unknown; costs {cost}")
            continue
        fits = "" if requested is None else ", enough" if frees >= requested else ", not enough"
        lines.append(f"  {setting:<40} about {_size(frees)}{fits}; costs {cost}")
    return "\n".join(lines)


def memory_by_class(state: TrainState, device: torch.device) -> dict[str, int]:
    """Bytes on this rank by class of tensors; the last class is the rest of the peak."""
    parameters = _parameters(state)
    gradients = (p.grad for p in parameters if p.grad is not None)
    used = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer state": optimizer_bytes(state),
    }
    peak = peak_memory(device)
    return {**used, "activations and workspace": max(0, peak - sum(used.values()))}


def parameter_bytes(state: TrainState) -> int:
    """Bytes of the parameters on this rank."""
    return _bytes(_parameters(state))


def optimizer_bytes(state: TrainState) -> int:
    """Bytes of the optimizer state on this rank."""
    return _bytes(x for values in state.engine.optimizer.state.values() for x in values.values())


def _parameters(state: TrainState) -> set[Tensor]:
    groups = state.engine.optimizer.param_groups  # which may hold flattened copies
    flat = (parameter for group in groups for parameter in group["params"])
    return {*state.engine.model.parameters(), *flat}


def suggestions(used: dict[str, int], run: Run, world: int) -> list[Suggestion]:
    """What the run file could still change, cheapest first, and what it frees.

    For the decoder and the native engine the plan says what a rank needs with each change. Of other
    models and engines only what is proportional to `used`, the measured memory, is known.
    """
    is_planned = run.engine.name == "native" and not run.model.factory
    now = needed_by(run, world) if is_planned else 0
    found = []
    for rung in rungs(run, world):
        needed = rung.needed()
        frees = _measured_share(rung.setting, used, run) if needed is None else now - needed
        found.append(Suggestion(rung.setting, frees, rung.cost))
    return found


def _measured_share(setting: str, used: dict[str, int], run: Run) -> float | None:
    """The bytes that a change frees, if they are proportional to what has been measured."""
    rest = used["activations and workspace"]
    states = sum(used.values()) - rest
    if setting.startswith("train.micro_batch="):
        return rest * (1 - halved(run.train.micro_batch) / run.train.micro_batch)
    known = {
        "train.optimizer=adamw8bit": used["optimizer state"] * 0.75,
        "train.offload_activations=true": rest * 0.8,
        "twice the ranks of layout.shard": states / 2,
        "layout.offload=true": states,
    }
    return known.get(setting)


def expandable_segments(error: BaseException) -> list[Suggestion]:
    """The allocator's setting that joins free memory which lies in pieces, if that is enough."""
    variables = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    if any("expandable_segments:True" in os.environ.get(name, "") for name in variables):
        return []
    pieces = _size_in(error, r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")
    free = _size_in(error, r"of which ([\d.]+) (\w+) is free") or 0.0
    if not pieces or pieces + free < (requested_bytes(error) or 0.0):
        return []
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return [Suggestion(setting, pieces + free, "no time: set it in the environment")]


def requested_bytes(error: BaseException) -> float | None:
    """The size of the allocation that failed, from the error's message."""
    return _size_in(error, r"tried to allocate ([\d.]+) (\w+)")


def _size_in(error: BaseException, pattern: str) -> float | None:
    """The size in an error's message that `pattern` finds as number and unit."""
    found = re.search(pattern, str(error), re.IGNORECASE)
    if found is None or found[2] not in (*UNITS, "bytes"):
        return None
    return float(found[1].rstrip(".")) * UNITS.get(found[2], 1)


def halve_micro_batch(train: Train, run_dir: Path) -> bool:
    """Note a smaller micro-batch for the next start.

    False if `train` does not allow one or the disk cannot be written.
    """
    if not train.halve_on_oom or train.micro_batch == 1:
        return False
    try:
        atomic_write_text(run_dir / HINT, f"{halved(train.micro_batch)}\n")
    except OSError as error:
        print(f"longspan: cannot write {run_dir / HINT}: {error.strerror}", file=sys.stderr)
        return False
    return True


def with_hint(run: Run, run_dir: Path) -> Run:
    """The run with the micro-batch that an earlier out-of-memory error led to."""
    try:
        text = (run_dir / HINT).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return run
    fits = int(text) if text.isdecimal() else 0
    if not 0 < fits < run.train.micro_batch or run.train.micro_batch % fits:
        return run
    print(
        f"longspan: using train.micro_batch = {fits} instead of {run.train.micro_batch} after an "
        f"out-of-memory error; remove {run_dir / HINT} to undo this",
        file=sys.stderr,
    )
    return run.model_copy(update={"train": run.train.model_copy(update={"micro_batch": fits})})


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank; of 8-bit moments, their codes and scales."""
    shards: Iterable[Any] = (to_local(x) for x in tensors)
    return sum(x.codes.nbytes + x.scale.nbytes if hasattr(x, "codes") else x.nbytes for x in shards)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
