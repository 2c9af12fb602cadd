"""The DeepSpeed engine: ZeRO 0 to 3, with optimizer state and parameters offloaded on request.

The loss is ours, the sum over all tokens of a step; so are the optimizer (PyTorch's fused AdamW),
its groups and its learning rate. DeepSpeed averages gradients over the ranks, as DDP does, clips
them and calls the optimizer; a hook before that call decides whether the step is skipped.

A rank holds a contiguous range of each flattened parameter: with ZeRO-3 an equal share of each,
with ZeRO-1 and 2 what falls into an equal share of them all. Checkpoints store it as regions, and
no rank ever gathers a full copy.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.attention import KVCaches
from longspan.checkpoint import Region, TensorShard
from longspan.config import Layout, Train
from longspan.engines.agreement import Settings
from longspan.engines.average import EMA
from longspan.engines.deepspeed_internals import Fragment, ZeroPartitions, silence
from longspan.engines.loss_scale import LossScale
from longspan.engines.protocol import InferenceModel, MakeOptimizer, ReadTensor, StepCheck
from longspan.engines.spec import ModelSpec, StepBatch, add_count
from longspan.errors import UserError
from longspan.models import Decoder
from longspan.nn import logits_of
from longspan.parallel.grad_norm import clip_grad_norm
from longspan.parallel.mesh import ParallelMesh, choose_backend, init_lone_process_group
from longspan.parallel.parameters import named_parameters
from longspan.parallel.pipeline import ForwardContext

MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalParameter(NamedTuple):
    """A parameter of which this rank holds a fragment."""

    name: str
    parameter: nn.Parameter
    fragment: Fragment
    regions: list[Region]
    """The fragment as regions of the full tensor."""


class DeepSpeedEngine:
    """Trains the model of `spec`."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: ParallelMesh,
        train: Train,
        device: torch.device,
        make_optimizer: MakeOptimizer,
        forward_context: ForwardContext,
        settings: Settings,
    ) -> None:
        self._deepspeed = _import(device)
        self._mesh, self._device, self._forward_context = mesh, device, forward_context
        self._spec, self._micro_batch = spec, train.micro_batch
        self._max_norm = train.grad_clip or math.inf
        self._state_keys = (*MOMENTS, EMA) if train.ema else MOMENTS
        self._stage: int = settings["zero_optimization"]["stage"]
        self.shapes = spec.shapes
        for key in ("optimizer", "scheduler"):  # ours
            settings.pop(key, None)
        if self._stage == 0:  # where DeepSpeed would clip, but not return the norm
            settings["gradient_clipping"] = 0.0
        _init_process_group(mesh, device)
        self._deepspeed.init_distributed(verbose=False)
        self.model = self._build(train, settings)
        spec.wrap_blocks(self.model, train)
        self.optimizer = make_optimizer(self.model)
        self.optimizer.register_step_pre_hook(self._before_update)
        self._engine = self._initialize(settings)
        self._partitions = ZeroPartitions(self._engine, self._stage, mesh.world.rank)
        self.module: nn.Module = self._engine
        self._scale = LossScale(enabled=train.precision == "fp16")
        if self._scale.enabled:
            self._partitions.disable_grad_scaler()
        self._must_skip: StepCheck | None = None
        self._norm: Tensor | None = None
        if self._stage == 3 and spec.rebuild:
            self.load_weights(partial(spec.initial_weight, train.seed))

    def _build(self, train: Train, settings: Settings) -> nn.Module:
        if self._stage < 3 or not self._spec.rebuild:
            self._spec.initialize(train, self._mesh, self._device)
            return self._spec.model
        with self._deepspeed.zero.Init(config_dict_or_path=settings):  # shards module by module
            return self._spec.rebuild()

    def _initialize(self, settings: Settings) -> Any:
        engine, *_ = self._deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=settings, dist_init_required=False
        )
        return engine

    @property
    def inference_model(self) -> nn.Module | InferenceModel:
        if self._stage == 3 and isinstance(self.model, Decoder):
            return _Zero3Model(self.model, self._deepspeed)
        return self.model

    def backward(self, batch: StepBatch, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        total = torch.zeros((), device=self._device)
        counts: Tensor | None = None
        factor = self._scale.factor
        if self._stage > 0 and self._scale.enabled:  # DeepSpeed scales the loss
            self._partitions.set_loss_scale(factor)
            factor = 1.0
        micro_batches = batch.split(self._micro_batch)
        for index, micro_batch in enumerate(micro_batches, start=1):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches))
            with self._forward_context():
                loss, count = self._spec.loss(self._engine, micro_batch.to(self._device))
                loss = loss * scale
            # `scale` is that of the whole step, not of a micro-batch.
            self._engine.backward(loss * factor, scale_wrt_gas=False)
            total += loss.detach()
            counts = add_count(counts, count)
        return total, counts

    def step(self, must_skip: StepCheck, divisor: Tensor | None = None) -> Tensor:
        self._must_skip, self._norm = must_skip, None
        scale = self._scale.factor * (1.0 if divisor is None else float(divisor))
        if self._stage == 0:
            norm = clip_grad_norm(self.model, self._mesh, self._max_norm, self._device, scale)
            self._check_step(norm)
        elif divisor is not None:
            self._partitions.set_loss_scale(scale)
        self._engine.step()
        if self._stage > 0 and divisor is not None:
            self._partitions.set_loss_scale(self._scale.factor)
        if self._norm is None:  # DeepSpeed itself skips steps with non-finite gradients
            self._check_step(torch.tensor(math.inf, device=self._device))
        assert self._norm is not None
        if self._scale.enabled:
            self._scale.update(overflows=not math.isfinite(self._norm))
        return self._norm

    def _before_update(self, *_: object) -> None:
        """Called by the optimizer, which DeepSpeed steps for one group after another."""
        if self._norm is None:
            norm = self._partitions.grad_norm
            self._check_step(torch.as_tensor(norm, device=self._device))

    def _check_step(self, norm: Tensor) -> None:
        assert self._must_skip is not None
        self._norm = norm.float()
        skip = self._must_skip(self._norm, may_overflow=self._scale.enabled)
        if self._scale.enabled:
            skip = torch.maximum(skip, (~self._norm.isfinite()).float())
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]

    def is_finite(self) -> bool:
        return all(bool(self._values(x).isfinite().all()) for x in self._local_parameters())

    def tensor_shards(self) -> dict[str, TensorShard]:
        shards: dict[str, TensorShard] = {}
        state, is_main = self.optimizer.state, self._mesh.world.is_main
        keys = [None, *(self._state_keys if state else ())]
        for local in self._local_parameters() if self._stage or is_main else ():
            is_trained = local.parameter.requires_grad
            if not is_trained and self._stage < 3 and not is_main:
                continue  # every rank has it
            for key in keys if is_trained else [None]:
                name = f"model/{local.name}" if key is None else f"optimizer/{local.name}.{key}"
                values = self._values(local, key)
                if self._partitions.is_swapped(local.fragment.group):
                    values = values.clone()
                shards |= self._shards(name, local, values)
        if state and is_main:
            step = TensorShard.full(next(iter(state.values()))["step"])
            trained = [n for n, p in named_parameters(self.model) if p.requires_grad]
            shards |= {f"optimizer/{name}.step": step for name in trained}
        return shards

    def _shards(self, name: str, local: LocalParameter, values: Tensor) -> dict[str, TensorShard]:
        """A fragment's values as shards, one per region."""
        sizes = [math.prod(region.shape) for region in local.regions]
        shards = {}
        for i, (part, region) in enumerate(
            zip(torch.split(values, sizes), local.regions, strict=True)
        ):
            shard = TensorShard(part.view(region.shape), self.shapes[local.name], region)
            shards[f"{name}#{i}" if i else name] = shard
        return shards

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for local in self._local_parameters(writes=True):
            self._values(local).copy_(_read(local, local.name, read))
        self._partitions.update_parameters()

    @torch.no_grad()
    def load_optimizer(self, entries: Iterable[tuple[str, str, bool]], read: ReadTensor) -> None:
        saved = {(name, key) for name, key, _ in entries}
        if not saved:
            return
        step = read(f"{min(saved)[0]}.step", Region.full(()))
        for group, flat in enumerate(self._flat()):
            state = self.optimizer.state[flat]
            if not state:
                with self._partitions.swapped_in(group, writes=True):
                    state |= {key: torch.zeros_like(flat) for key in self._state_keys}
            state["step"] = step.to(flat.device, copy=True)
        for local in self._local_parameters(writes=True):
            for key in self._state_keys:
                if (local.name, key) in saved:
                    values = _read(local, f"{local.name}.{key}", read)
                    self._values(local, key).copy_(values)

    def scaler_state(self) -> dict[str, float]:
        return self._scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        self._scale.load(state)

    def _flat(self) -> list[Tensor]:
        """The tensors that the optimizer updates."""
        if self._stage > 0:
            return self._partitions.flat()
        return [p for p in self.model.parameters() if p.requires_grad]

    def _local_parameters(self, *, writes: bool = False) -> Iterator[LocalParameter]:
        """Each with its values in memory until the next is asked for."""
        groups: dict[int | None, list[LocalParameter]] = {}
        for name, parameter in named_parameters(self.model):
            shape = self.shapes[name]
            fragment = self._partitions.fragment(parameter, shape)
            if fragment is not None:
                end = fragment.start + fragment.size
                regions = list(Region.of_flat_range(fragment.start, end, shape))
                local = LocalParameter(name, parameter, fragment, regions)
                groups.setdefault(fragment.group, []).append(local)
        for group, members in groups.items():
            with self._partitions.swapped_in(group, writes=writes):
                yield from members

    def _values(self, local: LocalParameter, key: str | None = None) -> Tensor:
        """This rank's fp32 values of a parameter, or of one of its moments, flattened."""
        fragment = local.fragment
        if self._stage == 0:
            flat: Tensor = local.parameter
        elif fragment.group is None:
            flat = self._partitions.frozen(local.parameter)
        else:
            flat = self._flat()[fragment.group]
        values: Tensor = flat if key is None else self.optimizer.state[flat][key]
        return values.detach().flatten().narrow(0, fragment.offset, fragment.size)


class _Zero3Model:
    """A ZeRO-3 model for inference: modules gather their parameters when called, the head does
    not, because it is not called.
    """

    def __init__(self, model: Decoder, deepspeed: Any) -> None:
        self._model, self._deepspeed = model, deepspeed

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    def new_caches(self, capacity: int | None = None) -> KVCaches:
        return self._model.new_caches(capacity)

    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor:
        last = self._model.hidden(tokens, caches)[:, -1]
        with self._deepspeed.zero.GatheredParameters([self._model.head_weight]):
            return logits_of(last, self._model.head_weight)


def _read(local: LocalParameter, name: str, read: ReadTensor) -> Tensor:
    """The values of a fragment, flattened."""
    return torch.cat([read(name, region).flatten() for region in local.regions])


def _import(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            'engine.name = "deepspeed" needs DeepSpeed: pip install "longspan[deepspeed]"'
        ) from error
    deepspeed.utils.logger.setLevel("WARNING")
    for handler in deepspeed.utils.logger.handlers:  # stdout carries the run's own output
        handler.setStream(sys.stderr)
    # It calls collectives by names that PyTorch deprecates, and warns at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    silence(deepspeed)
    return deepspeed


def _init_process_group(mesh: ParallelMesh, device: torch.device) -> None:
    """DeepSpeed reads the environment, and needs a process group even for one process."""
    world = mesh.world
    for name, value in (
        ("RANK", world.rank),
        ("WORLD_SIZE", world.size),
        ("LOCAL_RANK", world.local_rank),
    ):
        os.environ.setdefault(name, str(value))
    if not dist.is_initialized():
        init_lone_process_group(choose_backend(Layout(), 1, device))
