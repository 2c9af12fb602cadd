"""The collective that this process waits for, from torch's flight recorder."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

BUFFER = "TORCH_FR_BUFFER_SIZE"
KEPT = 2000
"""Collectives that the recorder remembers; one takes a few hundred bytes."""


def record_collectives() -> None:
    """To be called before the first process group is made."""
    os.environ.setdefault(BUFFER, str(KEPT))


def awaited_collective() -> str | None:
    """The oldest collective that this process has begun and that has not ended.

    None where there is none, or where torch has no recorder.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return None
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    open_ones = [entry for entry in entries if not entry.get("retired", True)]
    if not open_ones:
        return None
    first = min(open_ones, key=lambda entry: entry["record_id"])
    group = first["process_group"][-1]
    return (
        f"{first['profiling_name']} of {first['input_sizes']}, the "
        f"{first['collective_seq_id']}-th of group {group}"
    )
