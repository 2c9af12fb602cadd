"""The native engine: PyTorch's DDP, FSDP2, DTensor and pipelining, as `parallel` applies them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from longspan.checkpoint import Region, TensorShard
from longspan.config import Layout, Train
from longspan.data import Batch
from longspan.engines.captured import CapturedPass, Inputs
from longspan.engines.decoder_spec import DecoderSpec
from longspan.engines.loss_scale import LossScale
from longspan.engines.module_pipeline import PipelinedModule
from longspan.engines.optimizer import (
    load_optimizer_tensor,
    optimizer_state,
    step_unless,
)
from longspan.engines.protocol import InferenceModel, MakeOptimizer, ReadTensor, StepCheck
from longspan.engines.spec import ModelSpec, StepBatch, add_count
from longspan.parallel.chunks import ChunkedDecoder
from longspan.parallel.dtensor import local_offset, to_local
from longspan.parallel.grad_norm import clip_grad_norm
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import named_parameters, pipeline_copy
from longspan.parallel.pipeline import ForwardContext, PipelinedDecoder


class NativeEngine:
    """Trains the model of `spec`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    _captured: CapturedPass | None = None

    def __init__(
        self,
        spec: ModelSpec,
        mesh: ParallelMesh,
        train: Train,
        device: torch.device,
        make_optimizer: MakeOptimizer,
        forward_context: ForwardContext,
        layout: Layout,
        *,
        captures: bool = False,
    ) -> None:
        """`captures`: whether passes become CUDA graphs."""
        self._prepare(spec, mesh, train, device, forward_context)
        module = spec.parallelize(mesh, layout, train, forward_context)
        self.module = spec.materialize(module, mesh, layout, train, device)
        self.optimizer = make_optimizer(self.model)
        self._parameters = list(named_parameters(self.model))
        if captures:
            trained = [parameter for _, parameter in self._parameters if parameter.requires_grad]
            self._captured = CapturedPass(trained, must=train.cuda_graphs is True)

    def _prepare(
        self,
        spec: ModelSpec,
        mesh: ParallelMesh,
        train: Train,
        device: torch.device,
        forward_context: ForwardContext,
    ) -> None:
        self._spec, self.model, self.shapes = spec, spec.model, spec.shapes
        self._mesh, self._device, self._forward_context = mesh, device, forward_context
        self._micro_batch, self._max_norm = train.micro_batch, train.grad_clip or math.inf
        self.loss_scale = LossScale(enabled=train.precision == "fp16")

    @property
    def _chunked(self) -> ChunkedDecoder | None:
        return self._spec.chunked if isinstance(self._spec, DecoderSpec) else None

    @property
    def inference_model(self) -> nn.Module | InferenceModel:
        if self._captured is not None:
            self._captured.make_room()
        if self._chunked is not None:
            return self._chunked
        is_pipeline = isinstance(self.module, PipelinedDecoder | PipelinedModule)
        return self.module if is_pipeline else self.model

    def backward(self, batch: StepBatch, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        factor = self.loss_scale.factor
        if isinstance(self.module, PipelinedDecoder):
            assert isinstance(self._spec, DecoderSpec)
            assert isinstance(batch, Batch)
            tokens, targets, *others = self._spec.local(batch.to(self._device))
            scaled = self.module.backward(tokens, targets, scale * factor, *others)
            return scaled / factor, None
        micro_batches = batch.split(self._micro_batch)
        if isinstance(self.module, PipelinedModule):
            batches = [micro_batch.to(self._device) for micro_batch in micro_batches]
            scaled, number = self.module.backward(batches, scale * factor)
            return scaled / factor, number
        total = torch.zeros((), device=self._device)
        counts: Tensor | None = None
        for index, micro_batch in enumerate(micro_batches, start=1):
            if self._chunked is not None:
                assert isinstance(self._spec, DecoderSpec)
                assert isinstance(micro_batch, Batch)
                sync = partial(self._chunk_sync, is_last=index == len(micro_batches))
                inputs = self._spec.local(micro_batch)
                options = scale * factor, self._forward_context, sync
                total += self._chunked.backward(self.module, inputs, *options) / factor
                continue
            if self._captured is not None:
                assert isinstance(self._spec, DecoderSpec)
                assert isinstance(micro_batch, Batch)
                inputs = self._spec.local(micro_batch.to(self._device))
                total += self._captured(self._run_pass, inputs, scale * factor) / factor
                continue
            with self._gradient_sync(is_last=index == len(micro_batches)):
                with self._forward_context():
                    loss, count = self._spec.loss(self.module, micro_batch.to(self._device))
                    loss = loss * scale
                self._backward(loss * factor)
            total += loss.detach()
            counts = add_count(counts, count)
        return total, counts

    def _run_pass(self, inputs: Inputs, scale: Tensor) -> Tensor:
        with self._forward_context():
            loss: Tensor = self.module(*inputs) * scale
        self._backward(loss)
        return loss.detach()

    @contextmanager
    def _gradient_sync(self, *, is_last: bool) -> Iterator[None]:
        """Reduce gradients in this micro-batch if it is the last, or with ZeRO-2 and 3 in any."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(is_last or self._mesh.zero > 1)
        accumulates = isinstance(self.module, DistributedDataParallel) and not is_last
        with self.module.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
            yield

    def _chunk_sync(self, is_last_chunk: bool, *, is_last: bool) -> AbstractContextManager[None]:
        return self._gradient_sync(is_last=is_last and is_last_chunk)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _saves(self, x: Tensor) -> bool:
        """Whether this rank is the one, of those that hold the same shard, that saves it."""
        return self._mesh.saves(x)

    def step(self, must_skip: StepCheck, divisor: Tensor | None = None) -> Tensor:
        scale = self.loss_scale
        factor = scale.factor if divisor is None else scale.factor * divisor
        norm = clip_grad_norm(self.model, self._mesh, self._max_norm, self._device, factor)
        skip = must_skip(norm, may_overflow=scale.enabled)
        if scale.enabled:
            overflows = not norm.isfinite()
            skip = torch.maximum(skip, torch.full_like(skip, overflows))
            scale.update(overflows=overflows)
        step_unless(skip, self.optimizer)
        self.optimizer.zero_grad()
        return norm

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(to_local(p)).all()) for p in self.model.parameters())

    def tensor_shards(self) -> dict[str, TensorShard]:
        copy = pipeline_copy(self.model)
        parameters = [
            (name, p)
            for name, p in named_parameters(self.model)
            if p is not copy and self._spec.is_stored(name)
        ]
        tensors = self._state_of(parameters)
        return {name: _shard(x) for name, x in tensors.items() if self._saves(x)}

    def local_tensors(self) -> dict[str, Tensor]:
        """What this rank holds, under the names of `tensor_shards`, whoever saves it.

        Also after a collective has failed: the parameters are those that the optimizer updates, not
        what FSDP has gathered from them.
        """
        tensors = self._state_of(self._parameters)
        return {name: to_local(x) for name, x in tensors.items()}

    def _state_of(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for name, parameter in parameters:
            tensors[f"model/{name}"] = parameter.detach()
            for key, value in optimizer_state(self.optimizer, parameter):
                tensors[f"optimizer/{name}.{key}"] = value
        return tensors

    @torch.no_grad()
    def load_weights(self, read: ReadTensor) -> None:
        for name, parameter in named_parameters(self.model):
            to_local(parameter).copy_(read(name, _region(parameter)))

    def load_optimizer(self, entries: Iterable[tuple[str, str, bool]], read: ReadTensor) -> None:
        by_name: dict[str, list[tuple[str, bool]]] = {}
        for name, key, is_scalar in entries:
            by_name.setdefault(name, []).append((key, is_scalar))
        for name, parameter in named_parameters(self.model):
            for key, is_scalar in by_name.get(name, []):
                region = Region.full(()) if is_scalar else _region(parameter)
                value = read(f"{name}.{key}", region)
                load_optimizer_tensor(self.optimizer, parameter, key, value)

    def scaler_state(self) -> dict[str, float]:
        return self.loss_scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        self.loss_scale.load(state)


def _region(x: Tensor) -> Region:
    """The region of a tensor that lies on this rank."""
    return Region(start=local_offset(x), shape=tuple(to_local(x).shape))


def _shard(x: Tensor) -> TensorShard:
    return TensorShard(to_local(x), tuple(x.shape), _region(x))
