"""What a run trains, as the loop sees it: a model, its data, and what to say about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from longspan.config import Run
from longspan.data import Baseline, DatasetSource, Prefetcher, Source
from longspan.engines import Engine, MakeOptimizer, ModelSpec
from longspan.engines.protocol import ReadTensor
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.tracking import MetricsFile, Reporter
from longspan.training.meter import Meter
from longspan.training.signals import StopRequests

Show = Callable[[str], None]


class Evaluation(Protocol):
    """The validation loss of an engine's model."""

    @property
    def why_empty(self) -> str:
        """Why there is nothing to evaluate on; empty if there is."""
        ...

    @property
    def baseline(self) -> Baseline | None: ...

    def loss(self, requests: StopRequests) -> float | None:
        """Loss per target; None if there are no samples or a stop was requested."""
        ...

    def by_position(self, requests: StopRequests) -> dict[str, float]:
        """The loss by position in the context; empty where samples have none."""
        ...

    def report(
        self, loss: float | None, step: int, reporter: Reporter, metrics: MetricsFile
    ) -> None: ...


class RunTask(Protocol):
    """The decoder of a run file, or a user's own model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def source(self) -> Source | DatasetSource: ...

    @property
    def make_optimizer(self) -> MakeOptimizer | None:
        """None for the optimizer of the run file."""
        ...

    @property
    def resume_key(self) -> dict[str, Any]:
        """What fixes the model's function and the sample order, and so may not change on resume."""
        ...

    def set_learning_rate(self, optimizer: Optimizer, step: int) -> None:
        """Set the learning rate of the step after `step` steps."""
        ...

    def frozen_weights(self) -> ReadTensor | None:
        """Reads the weights that checkpoints do not hold; None if they hold all."""
        ...

    def initial_weights(self) -> ReadTensor | None:
        """Reads the weights that a new run starts from; None if the model has its own."""
        ...

    def open_data(self, mesh: ParallelMesh, device: torch.device) -> Prefetcher: ...

    def evaluation(
        self, engine: Engine, mesh: ParallelMesh, device: torch.device, precision: ForwardContext
    ) -> Evaluation: ...

    def meter(self, device: torch.device, step: int, world: int) -> Meter: ...

    def summary(self, engine: Engine, mesh: ParallelMesh, *, is_new: bool) -> dict[str, str]:
        """Model, data and what follows from the run file, as text."""
        ...

    def sample(
        self,
        engine: Engine,
        mesh: ParallelMesh,
        device: torch.device,
        reporter: Reporter,
        should_stop: Callable[[], bool],
    ) -> str | None:
        """Text that the model generates at the end of a run, if it is one of text."""
        ...


OpenTask = Callable[[Run, ParallelMesh, Show], RunTask]
"""Opens the task of a run, anew in each attempt to train it."""


def task_of_run(run: Run, mesh: ParallelMesh, show: Show = lambda text: None) -> RunTask:
    """The task that a run file names."""
    if run.model.factory:
        from longspan.training.module_task import ModuleTask, call_factory

        return ModuleTask(run, call_factory(run, Path.cwd()))
    from longspan.training.decoder_task import DecoderTask

    return DecoderTask(run, mesh, show)
