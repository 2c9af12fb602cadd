"""What an engine must know of a model to parallelize and train it: the decoder, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.checkpoint import Region
from longspan.config import Layout, Train
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext


class MicroBatch(Protocol):
    def to(self, device: torch.device) -> Any: ...


class StepBatch(Protocol):
    """All samples that a rank reads in a step, in host memory."""

    def split(self, size: int, /) -> Sequence[MicroBatch]:
        """Micro-batches of `size` samples."""
        ...


class ModelSpec(Protocol):
    """A model, how it is split over ranks, and its loss."""

    @property
    def model(self) -> nn.Module:
        """With the parameter names that it has in one process; perhaps on the meta device."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of each parameter, by name."""
        ...

    @property
    def block_classes(self) -> tuple[str, ...]:
        """The names of the classes that are sharded one by one."""
        ...

    @property
    def may_skip_parameters(self) -> bool:
        """Whether a forward pass may leave parameters out, for which DDP must look then."""
        ...

    @property
    def rebuild(self) -> Callable[[], nn.Module] | None:
        """Builds the model again, in a context that shards it while it is built; None if only
        `model` itself can be trained.
        """
        ...

    def is_stored(self, name: str) -> bool:
        """Whether a checkpoint holds a parameter: not if it is frozen and read from elsewhere."""
        ...

    def parallelize(
        self, mesh: ParallelMesh, layout: Layout, train: Train, forward_context: ForwardContext
    ) -> nn.Module:
        """Split the model over the ranks; returns the module that a training step calls."""
        ...

    def materialize(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        layout: Layout,
        train: Train,
        device: torch.device,
    ) -> nn.Module:
        """Allocate and initialise this rank's part; returns the module, in DDP if it is whole."""
        ...

    def initialize(self, train: Train, mesh: ParallelMesh, device: torch.device) -> None:
        """Allocate and initialise the whole model, for an engine that splits it by itself."""
        ...

    def wrap_blocks(self, model: nn.Module, train: Train) -> None:
        """Wrap blocks for activation checkpointing and compile them."""
        ...

    def initial_weight(self, seed: int, name: str, region: Region) -> Tensor:
        """A region of a weight's initial value, for what `rebuild` has built."""
        ...

    def loss(self, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The summed loss of a micro-batch, and what to divide by; None if the data knows that."""
        ...


def add_count(total: Tensor | None, count: Tensor | None) -> Tensor | None:
    """What the losses of several micro-batches are divided by."""
    return count if total is None else total if count is None else total + count
