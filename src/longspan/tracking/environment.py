"""env.json: versions and hardware of a run. No environment variables: they may hold secrets."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import longspan

if TYPE_CHECKING:
    import torch


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the command line and the hardware of this process."""
    import torch  # late: the launcher of several processes needs none

    packages = ("numpy", "pydantic", "rich", "safetensors", "torch")
    found: dict[str, Any] = {
        "longspan": longspan.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {name: metadata.version(name) for name in packages},
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found
