"""The Accelerate engine: plain data parallelism (DDP), FSDP2 or DeepSpeed, by its Accelerator.

Accelerate changes modes silently: on a CPU its FSDP plugin becomes DDP and its DeepSpeed plugin has
no effect, and its launcher may start fewer processes than asked for. So the result is inspected,
and a run that is not what the run file says is refused.

Loss, optimizer, schedule and clipping are ours, as under every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan.config import Layout, Train
from longspan.engines.agreement import Settings
from longspan.engines.deepspeed import DeepSpeedEngine
from longspan.engines.native import NativeEngine
from longspan.engines.protocol import MakeOptimizer
from longspan.engines.spec import ModelSpec
from longspan.errors import UserError
from longspan.models import Decoder
from longspan.parallel.apply import compress_gradients
from longspan.parallel.choices import reduce_dtype
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import named_parameters
from longspan.parallel.pipeline import ForwardContext

DISTRIBUTED_TYPES = {
    "plain": ("NO", "MULTI_CPU", "MULTI_GPU"),
    "fsdp2": ("FSDP",),
    "deepspeed": ("DEEPSPEED",),
}
"""Accelerate's names for the modes."""


class AccelerateEngine(NativeEngine):
    """Modes "plain" and "fsdp2": the native step, on a model that Accelerate has prepared."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: ParallelMesh,
        train: Train,
        device: torch.device,
        make_optimizer: MakeOptimizer,
        forward_context: ForwardContext,
        layout: Layout,
        mode: str,
    ) -> None:
        library = _import()
        self._prepare(spec, mesh, train, device, forward_context)
        plugin = fsdp_plugin(library, layout, spec.block_classes) if mode == "fsdp2" else None
        self._accelerator = _accelerator(
            library,
            device,
            fsdp_plugin=plugin,
            find_unused_parameters=spec.may_skip_parameters,
        )
        _check(self._accelerator, mode, mesh.world.size)
        spec.initialize(train, mesh, device)
        model = spec.model
        spec.wrap_blocks(model, train)
        self.module, optimizer = self._accelerator.prepare(model, make_optimizer(model))
        wrapper = {"fsdp2": FSDPModule, "plain": DistributedDataParallel}[mode]
        is_wrapped = mesh.world.size > 1 or mode == "fsdp2"
        if is_wrapped and not isinstance(self.module, wrapper):
            raise UserError(
                f"expected {wrapper.__name__} over {mesh.world.size} processes from Accelerate, "
                f"got {type(self.module).__name__}: use another engine.mode"
            )
        if isinstance(self.module, DistributedDataParallel):
            compress_gradients(self.module, layout)
        if mode == "fsdp2" and isinstance(model, Decoder):
            register_fsdp_forward_method(model, "next_logits")
        self.optimizer = optimizer.optimizer
        self._parameters = list(named_parameters(model))

    def _backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def _saves(self, x: Tensor) -> bool:
        # Accelerate's mesh has one axis: each shard lies on one rank only.
        return isinstance(x, DTensor) or super()._saves(x)


class AccelerateDeepSpeedEngine(DeepSpeedEngine):
    """Mode "deepspeed": DeepSpeed's engine, made by Accelerate from the same settings."""

    def _initialize(self, settings: Settings) -> Any:
        library = _import()
        plugin = library.DeepSpeedPlugin(hf_ds_config=settings)
        accelerator = _accelerator(library, self._device, deepspeed_plugin=plugin)
        _check(accelerator, "deepspeed", self._mesh.world.size)
        engine, _ = accelerator.prepare(self.model, self.optimizer)
        return engine


def fsdp_plugin(library: Any, layout: Layout, block_classes: Sequence[str]) -> Any:
    """Accelerate's FSDP2 as the layout asks for it; it would take what is missing from variables
    that `accelerate launch` sets, such as its own activation checkpointing on top of ours."""
    return library.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.zero == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(block_classes),
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
        activation_checkpointing_offload=False,
        mixed_precision_policy=MixedPrecisionPolicy(
            reduce_dtype=reduce_dtype(layout), cast_forward_inputs=False
        ),
    )


def _import() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise UserError(
            'engine.name = "accelerate" needs Accelerate: pip install "longspan[accelerate]"'
        ) from error
    return accelerate


def _accelerator(
    library: Any, device: torch.device, *, find_unused_parameters: bool = False, **plugins: Any
) -> Any:
    # Autocast, gradient accumulation and compilation are ours; its configuration agrees with them.
    # The only buffers are the signs of sketched layers, which every rank has.
    return library.Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        gradient_accumulation_steps=1,
        dynamo_backend="no",
        kwargs_handlers=[
            library.DistributedDataParallelKwargs(
                broadcast_buffers=False, find_unused_parameters=find_unused_parameters
            )
        ],
        **plugins,
    )


def _check(accelerator: Any, mode: str, world: int) -> None:
    """Refuse an Accelerator that runs other processes or another mode than asked for."""
    found, size = accelerator.distributed_type.value, accelerator.num_processes
    expected = DISTRIBUTED_TYPES[mode]
    if size != world:
        raise UserError(
            f"expected {world} processes, but Accelerate runs {size}: start them with longspan "
            "train --nproc or torchrun"
        )
    if found not in expected:
        advice = (
            "its sharded modes need a GPU; layout.zero = 0 is plain data parallelism"
            if accelerator.device.type == "cpu"
            else "its own configuration asks for another one"
        )
        raise UserError(
            f'engine.mode = "{mode}" needs {" or ".join(expected)} from Accelerate, but it set up '
            f"{found}: {advice}"
        )
