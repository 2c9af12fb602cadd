"""The collective that this process is blocked in, from torch's flight recorder."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from longspan.torch_internals import flight_recorder_trace

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
RECORDED = 2000
"""Collectives that the recorder remembers; each takes a few hundred bytes."""


def record_collectives() -> None:
    """Turn the recorder on. Call it before the first process group is created."""
    os.environ.setdefault(BUFFER_SIZE, str(RECORDED))


def pending_collective() -> str | None:
    """The oldest collective that this process has started and that has not completed.

    None if there is none, or if torch has no recorder.
    """
    trace = flight_recorder_trace() if dist.is_initialized() else None
    if trace is None:
        return None
    entries: list[dict[str, Any]] = trace.get("entries", [])
    pending = [entry for entry in entries if not entry.get("retired", True)]
    if not pending:
        return None
    first = min(pending, key=lambda entry: entry["record_id"])
    group = first["process_group"][-1]
    return (
        f"{first['profiling_name']} of {first['input_sizes']}, collective "
        f"{first['collective_seq_id']} of group {group}"
    )
