"""PyTorch itself: DDP, FSDP2, DTensor and pipelines as `parallel` lays them out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from longspan.checkpoint import Box, Part
from longspan.config import Run
from longspan.data import Sample, batch_of
from longspan.engines.optimizer import build_optimizer, load_moment, moments, take_step
from longspan.engines.protocol import Judge, Read, Reader
from longspan.models import new_decoder
from longspan.parallel.pipeline import Around, Pipelined
from longspan.parallel.placement import Placement, local, offset_of


class Native:
    """`around`: the context of a forward pass in training."""

    def __init__(
        self, run: Run, placed: Placement, device: torch.device, around: Around = nullcontext
    ) -> None:
        self._run, self._placed, self._device, self._around = run, placed, device, around
        self.model = new_decoder(run)
        self.module: nn.Module = placed.place(self.model, run, device, around)
        self.optimizer = build_optimizer(self.model, run.train)
        self.scaler = placed.scaler(device, enabled=run.train.precision == "fp16")

    @property
    def reader(self) -> Reader:
        return self.module if isinstance(self.module, Pipelined) else self.model

    def backward(self, samples: list[Sample], scale: Tensor) -> Tensor:
        placed, device = self._placed, self._device
        if isinstance(self.module, Pipelined):
            batch = batch_of(samples, device)
            own = placed.own_tokens(batch.tokens), placed.own_tokens(batch.targets)
            scaled = self.scaler.scale(scale)
            return self.module.backward(*own, scaled) / (scaled / scale)
        total, size = torch.zeros((), device=device), self._run.train.micro_batch
        for start in range(0, len(samples), size):
            batch = batch_of(samples[start : start + size], device)
            own = placed.own_tokens(batch.tokens), placed.own_tokens(batch.targets)
            total += self._micro_batch(*own, scale, is_last=start + size >= len(samples))
        return total

    def _micro_batch(
        self, tokens: Tensor, targets: Tensor, scale: Tensor, *, is_last: bool
    ) -> Tensor:
        with self._placed.micro_batch(self.module, is_last=is_last):
            with self._around():
                loss: Tensor = self.module(tokens, targets) * scale
            self._backward(self.scaler.scale(loss))
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _writes(self, x: Tensor) -> bool:
        """Whether it is this rank, of those that hold the same part of a tensor, that saves it."""
        return self._placed.writes(x)

    def step(self, judge: Judge) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        norm = self._placed.clip_gradients(self.model, self._run.train.grad_clip or math.inf)
        scales = self.scaler.is_enabled()
        is_bad = judge(norm, overflows=scales)
        if scales:  # which finds out about gradients that are no numbers itself
            if not is_bad:
                self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            take_step(self.optimizer, is_bad)
        self.optimizer.zero_grad()
        return norm

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(local(p)).all()) for p in self.model.parameters())

    def parts(self) -> dict[str, Part]:
        named = list(self._placed.named_parameters(self.model))
        own: dict[str, Any] = {
            f"model/{name}": parameter.detach()
            for name, parameter in named
            if not self._placed.is_copy(name, parameter, self.model)
        }
        for name, parameter in named:
            if f"model/{name}" in own:
                for key, value in moments(self.optimizer, parameter):
                    own[f"optimizer/{name}.{key}"] = value
        return {name: _part(x) for name, x in own.items() if self._writes(x)}

    @torch.no_grad()
    def load_weights(self, read: Read) -> None:
        for name, parameter in self._placed.named_parameters(self.model):
            local(parameter).copy_(read(name, _box(parameter)))

    def load_moments(self, found: Iterable[tuple[str, str, bool]], read: Read) -> None:
        of_parameter: dict[str, list[tuple[str, bool]]] = {}
        for name, key, is_one in found:
            of_parameter.setdefault(name, []).append((key, is_one))
        for name, parameter in self._placed.named_parameters(self.model):
            for key, is_one in of_parameter.get(name, []):
                box = Box.whole(()) if is_one else _box(parameter)
                load_moment(self.optimizer, parameter, key, read(f"{name}.{key}", box))

    def scaler_state(self) -> dict[str, float]:
        state: dict[str, float] = self.scaler.state_dict()
        return state

    def load_scaler_state(self, state: dict[str, float]) -> None:
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def _box(x: Tensor) -> Box:
    """What of a tensor lies on this rank."""
    return Box(start=offset_of(x), shape=tuple(local(x).shape))


def _part(x: Tensor) -> Part:
    return Part(local(x), tuple(x.shape), _box(x))
