"""Engines run a training step: native PyTorch, DeepSpeed or Accelerate, behind one protocol."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from longspan.config import Run
from longspan.engines.decoder_spec import DecoderSpec
from longspan.engines.native import NativeEngine
from longspan.engines.optimizer import build_optimizer
from longspan.engines.protocol import Engine, InferenceModel, MakeOptimizer
from longspan.engines.settings import accelerate_mode, accelerate_settings, deepspeed_settings
from longspan.engines.spec import ModelSpec
from longspan.models import new_decoder
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.rules import takes_graphs

__all__ = [
    "DecoderSpec",
    "Engine",
    "InferenceModel",
    "MakeOptimizer",
    "ModelSpec",
    "NativeEngine",
    "open_engine",
]


def open_engine(
    run: Run,
    mesh: ParallelMesh,
    device: torch.device,
    forward_context: ForwardContext = nullcontext,
    spec: ModelSpec | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> Engine:
    """A model and its optimizer under the engine that `engine.name` asks for.

    By default those of the run file. `forward_context`: makes the context of a forward pass in
    training.
    """
    spec = spec or DecoderSpec(new_decoder(run))
    make_optimizer = make_optimizer or partial(build_optimizer, train=run.train)
    common = (spec, mesh, run.train, device, make_optimizer, forward_context)
    if run.engine.name == "native":
        captures = device.type == "cuda" and takes_graphs(run, mesh.world.size)
        return NativeEngine(*common, run.layout, captures=captures)
    mode = accelerate_mode(run.engine.mode, mesh.ranks["shard"])
    if run.engine.name == "accelerate":
        accelerate_settings(run, mesh.ranks)  # refuses what contradicts the run file
    if run.engine.name == "accelerate" and mode != "deepspeed":
        from longspan.engines.accelerate import AccelerateEngine

        return AccelerateEngine(*common, run.layout, mode)
    from longspan.engines.accelerate import AccelerateDeepSpeedEngine
    from longspan.engines.deepspeed import DeepSpeedEngine

    settings = deepspeed_settings(run, mesh.ranks)
    kind = DeepSpeedEngine if run.engine.name == "deepspeed" else AccelerateDeepSpeedEngine
    return kind(*common, settings)
