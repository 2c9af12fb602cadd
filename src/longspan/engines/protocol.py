"""What the training loop asks of whoever runs a step. The loop does not know which one it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from longspan.attention import KVCache
from longspan.checkpoint import Box, Part
from longspan.data import Sample
from longspan.models import Decoder

Read = Callable[[str, Box], Tensor]
"""The values of a named tensor in a box, from wherever they come."""


class Judge(Protocol):
    """Given a step's gradient norm: 1.0 where the step must not be taken, else 0.0.

    `overflows`: the norm may be infinite for another reason than a bad step.
    """

    def __call__(self, norm: Tensor, *, overflows: bool) -> Tensor: ...


class Reader(Protocol):
    """A model to evaluate and to sample from."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor: ...

    def new_caches(self) -> list[KVCache]: ...

    def next_logits(self, tokens: Tensor, caches: list[KVCache]) -> Tensor: ...


class Engine(Protocol):
    """A model laid out on the ranks, its optimizer, and one way to run a step of them."""

    model: Decoder
    """The model, with the names that its parameters have in one process."""
    module: nn.Module
    """What a step calls."""
    optimizer: Optimizer
    """Of which the loop sets the learning rate."""

    @property
    def reader(self) -> Reader:
        """What evaluation and sampling call."""
        ...

    def backward(self, samples: list[Sample], scale: Tensor) -> Tensor:
        """Gradients of scale · loss over this rank's samples; returns scale · loss."""
        ...

    def step(self, judge: Judge) -> Tensor:
        """Clip, ask `judge`, and update unless it says no; returns the norm before clipping."""
        ...

    def is_finite(self) -> bool:
        """Whether this rank's weights are."""
        ...

    def parts(self) -> dict[str, Part]:
        """What this rank has to save of weights ("model/…") and moments ("optimizer/….key")."""
        ...

    def load_weights(self, read: Read) -> None:
        """Take the weights from `read`, by their names in one process."""
        ...

    def load_moments(self, found: Iterable[tuple[str, str, bool]], read: Read) -> None:
        """Take what the optimizer keeps from `read`, under "name.key".

        `found`: name, key, and whether it is one number instead of one per weight.
        """
        ...

    def scaler_state(self) -> dict[str, float]:
        """Of the loss scaling; empty where there is none."""
        ...

    def load_scaler_state(self, state: dict[str, float]) -> None: ...
