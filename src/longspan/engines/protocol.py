"""What the training loop asks of an engine. The loop does not know which one it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.attention import KVCaches
from longspan.checkpoint import Region, TensorShard
from longspan.engines.spec import StepBatch

MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Builds the optimizer of a model that an engine has parallelized."""
ReadTensor = Callable[[str, Region], Tensor]
"""Reads a region of a named tensor, from wherever it is stored."""


class StepCheck(Protocol):
    """Given a step's gradient norm: 1.0 if the step must be skipped, else 0.0.

    `may_overflow`: the norm may be infinite because of the fp16 loss scale, not of a bad step.
    """

    def __call__(self, norm: Tensor, *, may_overflow: bool) -> Tensor: ...


class InferenceModel(Protocol):
    """A model to evaluate and to sample from."""

    def __call__(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None
    ) -> Tensor: ...

    def new_caches(self, capacity: int | None = None) -> KVCaches: ...

    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor: ...


class Engine(Protocol):
    """A model parallelized over ranks, its optimizer, and a way to run a step of them."""

    model: nn.Module
    """The model, with the parameter names it has in one process."""
    module: nn.Module
    """The module that a step calls."""
    optimizer: Optimizer
    """The loop sets its learning rate."""
    shapes: dict[str, tuple[int, ...]]
    """The full shape of each parameter, by name."""

    @property
    def inference_model(self) -> nn.Module | InferenceModel:
        """What evaluation and sampling call."""
        ...

    def backward(self, batch: StepBatch, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute gradients of scale · loss over this rank's samples.

        Returns scale · loss, and what the loss is to be divided by, if the loss says it.
        """
        ...

    def step(self, must_skip: StepCheck, divisor: Tensor | None = None) -> Tensor:
        """Divide gradients by `divisor`, clip, ask `must_skip`, and update.

        Returns the gradient norm before clipping.
        """
        ...

    def is_finite(self) -> bool:
        """Whether this rank's weights are finite."""
        ...

    def tensor_shards(self) -> dict[str, TensorShard]:
        """What this rank saves: weights ("model/…") and optimizer state ("optimizer/….key")."""
        ...

    def load_weights(self, read: ReadTensor) -> None:
        """Load the weights through `read`, by their names in one process."""
        ...

    def load_optimizer(self, entries: Iterable[tuple[str, str, bool]], read: ReadTensor) -> None:
        """Load the optimizer state through `read`, under "name.key".

        `entries`: name, key, and whether it is a scalar instead of one value per weight.
        """
        ...

    def scaler_state(self) -> dict[str, float]:
        """The state of the fp16 loss scale; empty without one."""
        ...

    def load_scaler_state(self, state: dict[str, float]) -> None: ...
