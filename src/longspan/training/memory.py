"""Out of memory: what filled it, what would make room and at what cost, and a smaller second try.

The classes are counted from the tensors that are there; what is left of the peak is the
activations', with the kernels' own needs. How much of those a change would free is estimated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.config import Run
from longspan.device import peak_memory
from longspan.files import replace_text
from longspan.parallel.placement import local
from longspan.training.state import State

HINT = "micro_batch"
"""A file of the run's folder: the micro-batch that fits, once memory has run out."""

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Change(NamedTuple):
    """A setting, the bytes per rank it would free, and what it costs."""

    setting: str
    frees: float
    cost: str


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the CPU where torch could not allocate."""
    is_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain(error: BaseException, state: State, run: Run, device: torch.device) -> str:
    """For people: which class of tensors has how much, and the changes that would help."""
    held = usage(state, device)
    total = sum(held.values())
    said = str(error).splitlines() or [type(error).__name__]
    lines = [f"out of memory in step {state.step + 1}: {said[0]}"]
    lines += [
        f"  {name:<28}{_size(size):>12}{size / max(1, total):>6.0%}" for name, size in held.items()
    ]
    wanted = wanted_bytes(error)
    lines.append("what would free memory, the cheapest first:")
    for change in changes(held, run, state.placed.world.size):
        fits = "" if wanted is None else ", enough" if change.frees >= wanted else ", not enough"
        lines.append(
            f"  {change.setting:<36}about {_size(change.frees)}{fits}; costs {change.cost}"
        )
    return "\n".join(lines)


def usage(state: State, device: torch.device) -> dict[str, int]:
    """Bytes on this rank by class of tensors; the last is what the others leave of the peak."""
    engine = state.engine
    groups = engine.optimizer.param_groups  # which may hold flattened copies of its own
    parameters = {*engine.model.parameters(), *(p for group in groups for p in group["params"])}
    gradients = (p.grad for p in parameters if p.grad is not None)
    of_optimizer = (x for kept in engine.optimizer.state.values() for x in kept.values())
    held = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer state": _bytes(of_optimizer),
    }
    peak = peak_memory(device)
    return {**held, "activations and the rest": max(0, peak - sum(held.values()))}


def changes(held: dict[str, int], run: Run, world: int) -> list[Change]:
    """What the run file could still change, the cheapest first."""
    train, layout = run.train, run.layout
    is_native = run.engine.name == "native"
    is_sharded = layout.resolve(world)["shard"] > 1
    rest = held["activations and the rest"]
    weights = sum(held.values()) - rest
    kept = {remat: kept_values(run, remat) for remat in ("none", "selective", "full")}
    now = kept[train.activation_checkpointing]
    found = []
    if train.micro_batch > 1:
        smaller = halved(train.micro_batch)
        frees = rest * (1 - smaller / train.micro_batch)
        found.append(Change(f"train.micro_batch={smaller}", frees, "smaller products"))
    if train.activation_checkpointing == "none":
        frees = rest * (1 - kept["selective"] / now)
        found.append(
            Change("train.activation_checkpointing=selective", frees, "a few percent of the time")
        )
    if train.optimizer == "adamw" and is_native:
        found.append(
            Change("train.optimizer=adamw8bit", held["optimizer state"] * 0.75, "8-bit moments")
        )
    if train.activation_checkpointing != "full":
        frees = rest * (1 - kept["full"] / now)
        found.append(
            Change(
                "train.activation_checkpointing=full", frees, "a second forward pass, about a third"
            )
        )
    if not train.offload_activations:
        found.append(
            Change("train.offload_activations=true", rest * 0.8, "copies to the CPU and back")
        )
    found.append(Change("twice the ranks of layout.shard", weights / 2, "twice the devices"))
    if not layout.offload and is_native and is_sharded:
        found.append(Change("layout.offload=true", weights, "the optimizer runs on the CPU"))
    return found


def kept_values(run: Run, remat: str) -> int:
    """Numbers that one block keeps per token for the backward pass, in round terms."""
    hidden, wide = run.model.hidden, run.model.ffn
    return {
        "none": 10 * hidden + 4 * wide,
        "selective": 6 * hidden + 2 * wide,
        "full": hidden,
    }[remat]


def wanted_bytes(error: BaseException) -> float | None:
    """What the allocator was asked for, from its own words."""
    found = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if found is None or found[2] not in (*UNITS, "bytes"):
        return None
    return float(found[1].rstrip(".")) * UNITS.get(found[2], 1)


def halved(micro_batch: int) -> int:
    """The largest divisor that is at most half: the global batch stays a multiple of it."""
    return next(n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0)


def leave_hint(run: Run, run_dir: Path) -> bool:
    """Note a smaller micro-batch for the next start; False where there is none or none is asked."""
    if not run.train.halve_on_oom or run.train.micro_batch == 1:
        return False
    replace_text(run_dir / HINT, f"{halved(run.train.micro_batch)}\n")
    return True


def with_hint(run: Run, run_dir: Path) -> Run:
    """The run with the micro-batch that an earlier start has found to fit."""
    try:
        text = (run_dir / HINT).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return run
    fits = int(text) if text.isdecimal() else 0
    if not 0 < fits < run.train.micro_batch or run.train.micro_batch % fits:
        return run
    print(
        f"longspan: train.micro_batch is {fits} and not {run.train.micro_batch}: memory ran out; "
        f"remove {run_dir / HINT} to go back",
        file=sys.stderr,
    )
    return run.model_copy(update={"train": run.train.model_copy(update={"micro_batch": fits})})


def _bytes(tensors: Iterable[Tensor]) -> int:
    """On this rank; of moments in eight bits, their codes and scales."""
    own: Iterable[Any] = (local(x) for x in tensors)
    return sum(x.codes.nbytes + x.scale.nbytes if hasattr(x, "codes") else x.nbytes for x in own)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
