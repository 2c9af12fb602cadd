"""Hugging Face Accelerate: plain data parallelism (DDP), FSDP2, or DeepSpeed, by its Accelerator.

Accelerate changes modes without a word: on a CPU its FSDP plugin becomes DDP and its DeepSpeed
plugin nothing, and its launcher may start fewer processes than it was asked for. So what it has
made is looked at, and a run that is not what the run file says is refused.

Loss, optimizer, schedule and clipping are ours, as under every engine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan.config import Run
from longspan.engines.deepspeed import DeepSpeed
from longspan.engines.native import Native
from longspan.engines.optimizer import build_optimizer
from longspan.engines.protocol import Engine
from longspan.engines.settings import Settings, mode_of
from longspan.errors import UserError
from longspan.models import build_decoder
from longspan.parallel.activation_checkpointing import rematerialised
from longspan.parallel.pipeline import Around
from longspan.parallel.placement import Placement

TYPES = {"fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
"""What Accelerate calls the modes, beside those of plain data parallelism."""


def accelerated(
    run: Run, placed: Placement, device: torch.device, around: Around = nullcontext
) -> Engine:
    """The engine of the mode that the run file asks Accelerate for."""
    mode = mode_of(run, placed.world.size)
    if mode == "deepspeed":
        return AccelerateDeepSpeed(run, placed, device, around)
    return Accelerate(run, placed, device, around, mode)


class Accelerate(Native):
    """Plain and FSDP2: a step is the native one, on a model that Accelerate has prepared."""

    def __init__(
        self, run: Run, placed: Placement, device: torch.device, around: Around, mode: str
    ) -> None:
        library = _import()
        self._run, self._placed, self._device, self._around = run, placed, device, around
        plugin = None
        if mode == "fsdp2":
            plugin = library.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=placed.zero == 3,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                cpu_ram_efficient_loading=False,
            )
        self._accelerator = _accelerator(library, device, fsdp_plugin=plugin)
        _check(self._accelerator, mode, placed)
        self.model = build_decoder(run, device)
        for index, block in enumerate(self.model.blocks):
            if run.train.compile is True:
                block.compile(fullgraph=True)
            self.model.blocks[index] = rematerialised(block, run.train)
        self.module: nn.Module
        self.module, optimizer = self._accelerator.prepare(
            self.model, build_optimizer(self.model, run.train)
        )
        wrapper = {"fsdp2": FSDPModule, "plain": DistributedDataParallel}[mode]
        wraps = placed.world.size > 1 or mode == "fsdp2"
        if wraps and not isinstance(self.module, wrapper):
            raise UserError(
                f"Accelerate was asked for {wrapper.__name__} over {placed.world.size} processes "
                f"and made a {type(self.module).__name__}: use another engine.mode"
            )
        if mode == "fsdp2":
            register_fsdp_forward_method(self.model, "next_logits")
        self.optimizer = optimizer.optimizer
        self.scaler = placed.scaler(device, enabled=run.train.precision == "fp16")

    def _backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def _writes(self, x: Tensor) -> bool:
        # Accelerate's mesh has one axis: a rank that holds a part is the only one.
        return isinstance(x, DTensor) or self._placed.writes(x)


class AccelerateDeepSpeed(DeepSpeed):
    """DeepSpeed's engine, which Accelerate has made from the same settings."""

    def _initialize(self, settings: Settings) -> Any:
        library = _import()
        plugin = library.DeepSpeedPlugin(hf_ds_config=settings)
        accelerator = _accelerator(library, self._device, deepspeed_plugin=plugin)
        _check(accelerator, "deepspeed", self._placed)
        engine, _ = accelerator.prepare(self.model, self.optimizer)
        return engine


def _import() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise UserError(
            'engine.name = "accelerate" needs Accelerate: pip install "longspan[accelerate]"'
        ) from error
    return accelerate


def _accelerator(library: Any, device: torch.device, **plugins: Any) -> Any:
    # Our own autocast and accumulation, whatever Accelerate's configuration file says. The only
    # buffers are signs of sketched layers, which every rank has.
    return library.Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        gradient_accumulation_steps=1,
        kwargs_handlers=[library.DistributedDataParallelKwargs(broadcast_buffers=False)],
        **plugins,
    )


def _check(accelerator: Any, mode: str, placed: Placement) -> None:
    found, size = accelerator.distributed_type.value, accelerator.num_processes
    expected = ("NO", "MULTI_CPU", "MULTI_GPU") if mode == "plain" else (TYPES[mode],)
    if size != placed.world.size:
        raise UserError(
            f"Accelerate runs {size} processes and there are {placed.world.size}: start them with "
            "longspan train --nproc, or torchrun"
        )
    if found not in expected:
        advice = (
            "its sharded modes need a GPU; layout.zero = 0 is plain data parallelism"
            if accelerator.device.type == "cpu"
            else "its own configuration asks for another one"
        )
        raise UserError(
            f'engine.mode "{mode}" is {" or ".join(expected)} to Accelerate, and it has made '
            f"{found}: {advice}"
        )
