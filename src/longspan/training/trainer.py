"""`longspan.Trainer`: trains a model of your own from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from longspan.config import Run
from longspan.data.dataset import Collate
from longspan.engines import MakeOptimizer
from longspan.engines.module_pipeline import Stages
from longspan.engines.module_spec import Loss, Wrap
from longspan.errors import UserError
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.world import world_of_environment
from longspan.runfile import dump_run, load_run, parse_run
from longspan.toml import tomllib
from longspan.training.loop import Result, train
from longspan.training.module_task import OF_TRAINER, ModuleTask, Task
from longspan.training.task import Show


class Trainer:
    """Trains any nn.Module: one process, DDP, ZeRO 1 to 3, hybrid, offload; checkpoints and resume.

        trainer = longspan.Trainer(model, loss, dataset, run={"train": {"steps": 100}}, run_dir="a")
        result = trainer.train()

    `loss(model, batch)` returns (sum, count). `run` is a run file, its tables, or a Run; its
    [layout], [train], [engine], [checkpoint] and [track] hold, and it has no [model], [attention]
    or [data]. Started by torchrun, every process makes the same call. The other arguments are those
    of `Task`. For `longspan train`, `verify` and `drill`, write a function that returns a `Task`
    and name it in a run file: `model.factory = "package.module:function"`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        dataset: Any,
        *,
        run: Run | Mapping[str, Any] | str | Path | None = None,
        run_dir: str | Path,
        validation: Any = None,
        collate: Collate | None = None,
        shuffle: bool = True,
        workers: int = 0,
        wrap: Wrap = None,
        tensor_plan: Mapping[str, str] | None = None,
        stages: Stages | None = None,
        optimizer: MakeOptimizer | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.task = Task(
            model=model,
            loss=loss,
            dataset=dataset,
            validation=validation,
            collate=collate,
            shuffle=shuffle,
            workers=workers,
            wrap=wrap,
            tensor_plan=tensor_plan,
            stages=stages,
            optimizer=optimizer,
            schedule=schedule,
        )
        self.world = world_of_environment()
        self.run, self.run_dir = _run_of(run, self.world.size), Path(run_dir)
        if self.run.train.halve_on_oom:
            raise UserError(
                "train.halve_on_oom = true builds the model again, which a Trainer cannot: use "
                "model.factory in a run file, or set it to false"
            )
        self._is_spent = False

    def train(self, *, resume: bool = False) -> Result:
        """Train to the last step, from the newest checkpoint of `run_dir` if `resume` is true.

        The model is trained in place, and parallelized by it, so a Trainer trains once.
        """
        if self._is_spent:
            raise UserError("this Trainer has trained its model: make a new model and Trainer")
        self._is_spent = True
        return train(
            self.run, self.run_dir, resume=resume, world=self.world, open_task=self._open_task
        )

    def _open_task(self, run: Run, mesh: ParallelMesh, show: Show) -> ModuleTask:
        return ModuleTask(run, self.task)


def _run_of(run: Run | Mapping[str, Any] | str | Path | None, world: int) -> Run:
    if isinstance(run, Run):
        tables = tomllib.loads(dump_run(run))
        if not run.model.factory:
            tables = {name: tables[name] for name in tables.keys() - {"model", "attention", "data"}}
    elif isinstance(run, str | Path):
        return load_run(Path(run), [f"model.factory={OF_TRAINER}"], world=world)
    else:
        tables = dict(run or {})
    model = tables.get("model", {})
    return parse_run({**tables, "model": {**model, "factory": OF_TRAINER}}, "run", world=world)
