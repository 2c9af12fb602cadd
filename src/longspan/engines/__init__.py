"""Who runs a step: PyTorch itself, DeepSpeed or Accelerate, behind one small protocol."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from longspan.config import Run
from longspan.engines.native import Native
from longspan.engines.protocol import Engine, Reader
from longspan.parallel.pipeline import Around
from longspan.parallel.placement import Placement

__all__ = ["Engine", "Native", "Reader", "open_engine"]


def open_engine(
    run: Run, placed: Placement, device: torch.device, around: Around = nullcontext
) -> Engine:
    """The run's model and optimizer under the engine that `engine.name` asks for.

    `around`: the context of a forward pass in training.
    """
    if run.engine.name == "deepspeed":
        from longspan.engines.deepspeed import DeepSpeed

        return DeepSpeed(run, placed, device, around)
    if run.engine.name == "accelerate":
        from longspan.engines.accelerate import accelerated

        return accelerated(run, placed, device, around)
    return Native(run, placed, device, around)
