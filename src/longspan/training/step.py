"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from longspan.config import Train
from longspan.data import Prefetcher
from longspan.device import autocast
from longspan.engines.optimizer import set_learning_rate
from longspan.faults import fault_point, injects_nan
from longspan.parallel.activation_offload import activation_offload
from longspan.parallel.collectives import all_reduce_loss
from longspan.parallel.norms_by_layer import NormsByLayer
from longspan.parallel.pipeline import ForwardContext
from longspan.training.schedule import learning_rate
from longspan.training.state import TrainState


def forward_context_of(train: Train) -> ForwardContext:
    """Returns what makes the context of a forward pass in training.

    That is its precision, and where activations are kept.
    """
    limit = math.inf if train.offload_limit_gib is None else train.offload_limit_gib * 2**30
    offload = activation_offload(enabled=train.offload_activations, limit=limit)

    @contextmanager
    def context() -> Iterator[None]:
        with autocast(train), offload():
            yield

    return context


def train_step(
    state: TrainState,
    data: Prefetcher,
    train: Train,
    device: torch.device,
    norms: NormsByLayer | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one optimizer step; returns its loss per token and its gradient norm before clipping.

    The loss is the sum over all tokens of the step divided by their number, so it depends neither
    on gradient accumulation nor on the data-parallel size. `norms` measures the gradients by layer.
    """
    mesh, engine = state.mesh, state.engine
    fault_point("data")
    ahead = state.next_samples(2 * train.global_batch)
    indices, following = ahead[: train.global_batch], ahead[train.global_batch :]
    batch, targets = data.read(indices, following)
    if state.set_learning_rate:
        state.set_learning_rate(engine.optimizer, state.step)
    else:
        set_learning_rate(engine.optimizer, learning_rate(train, state.step))
    fault_point("backward")
    # What the loss is divided by; where only the loss function knows it, gradients are divided
    # again below, by what the number of samples has left to divide by.
    expected = train.global_batch if targets is None else max(1, targets)
    # DDP and FSDP average gradients over ranks, and they should be summed.
    scale = math.nan if injects_nan(state.step + 1) else mesh.gradient_ranks / expected
    # Filled on the device: a copy from the host would wait for the step before.
    loss, count = engine.backward(batch, torch.full((), scale, device=device))
    loss /= mesh.gradient_ranks
    all_reduce_loss(mesh, loss)
    divisor = None
    if count is not None:
        count = all_reduce_loss(mesh, count)
        # Nothing to count is no loss; but a loss that counts nothing is none to step on.
        is_sound = (count > 0) | ((count == 0) & (loss == 0))
        divisor = count.clamp(min=1e-30).where(is_sound, math.nan).float() / expected
        loss /= divisor
    fault_point("gradient norm")
    if norms is not None:
        norms.measure_gradients(engine.model)

    def must_skip(norm: Tensor, *, may_overflow: bool) -> Tensor:
        state.is_whole = False  # from here on there is no collective
        return state.guard.must_skip(loss, norm, may_overflow=may_overflow)

    grad_norm = engine.step(must_skip, divisor)
    state.step += 1
    state.samples = indices[-1] + 1
    state.is_whole = True
    return loss, grad_norm
