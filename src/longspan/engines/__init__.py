"""Engines run a training step: native PyTorch, DeepSpeed or Accelerate, behind one protocol."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from longspan.config import Run
from longspan.engines.native import NativeEngine
from longspan.engines.protocol import Engine, InferenceModel
from longspan.models import new_decoder
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext

__all__ = ["Engine", "InferenceModel", "NativeEngine", "open_engine"]


def open_engine(
    run: Run,
    mesh: ParallelMesh,
    device: torch.device,
    forward_context: ForwardContext = nullcontext,
) -> Engine:
    """The run's model and optimizer under the engine that `engine.name` asks for.

    `forward_context`: makes the context of a forward pass in training.
    """
    model = new_decoder(run)
    if run.engine.name == "native":
        return NativeEngine(model, mesh, run.layout, run.train, device, forward_context)

    from longspan.engines.settings import accelerate_mode, deepspeed_settings

    mode = accelerate_mode(run, mesh.world.size) if run.engine.name == "accelerate" else None
    if mode in ("plain", "fsdp2"):
        from longspan.engines.accelerate import AccelerateEngine

        return AccelerateEngine(model, mesh, run.train, device, forward_context, mode)
    from longspan.engines.accelerate import AccelerateDeepSpeedEngine
    from longspan.engines.deepspeed import DeepSpeedEngine

    kind = DeepSpeedEngine if mode is None else AccelerateDeepSpeedEngine
    settings = deepspeed_settings(run, mesh.world.size)
    return kind(model, mesh, run.train, device, forward_context, settings)
