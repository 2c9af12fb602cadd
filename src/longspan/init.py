"""`longspan init`: write a run file for this machine, with a comment for every key.

The comments are the descriptions of the keys in `config`.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from longspan.config import SECTIONS, Run
from longspan.costs import count_parameters
from longspan.data.opening import open_source
from longspan.errors import UserError
from longspan.files import write_new
from longspan.runfile import parse_run

KEYS: dict[str, tuple[str, ...]] = {
    "model": ("preset", "vocab"),
    "attention": ("kind", "segment_lengths", "dilation_rates"),
    "data": ("source", "context"),
    "layout": ("replicate", "shard", "sequence", "tensor", "pipeline", "zero"),
    "train": (
        "steps",
        "micro_batch",
        "global_batch",
        "lr",
        "schedule",
        "warmup_steps",
        "grad_clip",
        "device",
        "precision",
        "compile",
        "activation_checkpointing",
        "seed",
        "eval_every",
    ),
    "engine": ("name",),
    "checkpoint": ("every", "keep"),
    "track": ("log_every", "prompt"),
}
"""The keys that people change; all others keep their defaults."""

FOLLOWING = ("segment_lengths", "dilation_rates")
"""Keys that follow the context: they are written as comments."""

LEARNING_RATES = {"tiny": 2.5e-3, "125m": 6e-4, "350m": 3e-4, "1.3b": 2e-4, "7b": 1.2e-4}
LEARNING_RATES |= {"13b": 1e-4, "65b": 8e-5, "70b": 8e-5, "175b": 6e-5}
LEARNING_RATES |= {"llama2-7b": 1.2e-4, "llama3-8b": 1.2e-4, "llama3-70b": 8e-5}
LEARNING_RATES |= {"llama3.1-8b": 1.2e-4, "llama3.2-1b": 2e-4, "mistral-7b": 1.2e-4}
LEARNING_RATES |= {
    "qwen2.5-7b": 1.2e-4,
    "qwen3-0.6b": 2.5e-4,
    "qwen3-8b": 1.2e-4,
    "qwen3-32b": 1e-4,
}
"""From 125m on those of GPT-3 (Brown et al. 2020, table 2.1), of the nearest size."""

STATE_BYTES = 16
"""Bytes per parameter of fp32 weights, gradients and two Adam moments."""
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a run file needs to know of a machine."""

    device: str = "cpu"
    precision: str = "fp32"
    compiled: bool = False
    devices: int = 1
    memory: int = 0
    """Bytes of all devices together."""

    def __str__(self) -> str:
        what = "CPU" if self.device == "cpu" else "CUDA GPU"
        return f"{self.devices} {what}s" if self.devices > 1 else f"one {what}"


def this_machine(*, has_gpu: bool) -> Machine:
    """Describe this machine; torch is imported only if it has a GPU."""
    if not has_gpu:
        return Machine(memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    import torch

    from longspan.device import resolve

    train, count = resolve(Run(), torch.device("cuda")).train, torch.cuda.device_count()
    memory = sum(torch.cuda.get_device_properties(i).total_memory for i in range(count))
    return Machine("cuda", train.precision, train.compile is True, count, memory)


def starter_run(preset: str | None, data: Path | None, machine: Machine) -> Run:
    """Return a run of a model preset for a machine, on the built-in data or a folder of shards."""
    preset = preset or ("tiny" if machine.device == "cpu" else "125m")
    is_tiny = preset == "tiny"
    sequences = 2 if is_tiny else 8
    tables: dict[str, dict[str, Any]] = {
        # Of a folder, the vocabulary is that of its tokenizer; the built-in text is bytes.
        "model": {"preset": preset, **({} if data else {"vocab": 256})},
        "data": {
            "source": str(data) if data else "builtin",
            "context": 4096 if is_tiny else 8192,
        },
        "train": {
            "steps": 400 if is_tiny else 2000,
            "micro_batch": 1,
            "global_batch": -(-sequences // machine.devices) * machine.devices,
            "lr": LEARNING_RATES[preset],
            "warmup_steps": 20 if is_tiny else 100,
            "device": machine.device,
            "precision": machine.precision,
            "compile": machine.compiled,
            "activation_checkpointing": "none" if preset in ("tiny", "125m", "350m") else "full",
            "eval_every": 100,
        },
        "checkpoint": {"every": 100},
    }
    run = parse_run(tables, world=machine.devices)
    if data is not None:
        open_source(run.data, run.model)  # refuses damaged shards, and fewer tokens than a sample
    return run


def render(run: Run, machine: Machine) -> str:
    """Return the run file of a run whose other keys have their defaults, with comments."""
    lines = [
        f"# A run of the preset {run.model.preset} for {machine}, written by `longspan init`.",
        "# Keys that are not here have defaults: `longspan config show` prints every value.",
    ]
    values = run.model_dump(mode="json")
    for section, keys in KEYS.items():
        lines += ["", f"[{section}]"]
        for key in keys:
            text = " ".join((SECTIONS[section].model_fields[key].description or "").split())
            lines += textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")
            line = _line(key, values[section][key])
            lines.append(f"# {line}" if key in FOLLOWING else line)
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    if isinstance(value, list):  # tomli_w would write a line per element
        return f"{key} = {value}"
    return tomli_w.dumps({key: value}).strip()


def write(text: str, out: Path) -> None:
    """Write a new file, and refuse to replace one."""
    if out.suffix != ".toml":
        raise UserError(f"the run file must end in .toml, got {out}")
    write_new(text, out)


def next_steps(run: Run, out: Path, machine: Machine) -> str:
    """Return what was written, and what to do with it."""
    count = count_parameters(run.model)
    nproc = f" --nproc {machine.devices}" if machine.devices > 1 else ""
    gpus = f" --gpus {machine.devices}" if machine.devices > 1 else ""
    commands = {
        f"longspan plan {out}{gpus}": "predict its memory",
        f"longspan train {out}{nproc}": "train it",
    }
    width = max(map(len, commands))
    lines = [
        f"wrote {out}: {run.model.preset}, {count:,} parameters, context {run.data.context:,}, "
        f"{run.train.device}, {run.train.precision}"
    ]
    if (needed := STATE_BYTES * count) > machine.memory:
        lines.append(
            f"it needs at least {needed / GIB:,.0f} GiB for weights, gradients and optimizer "
            f"state, but this machine has {machine.memory / GIB:,.0f} GiB: use more GPUs, or a "
            "smaller --preset"
        )
    return "\n".join([*lines, "next:", *(f"  {c:<{width}}   # {w}" for c, w in commands.items())])
