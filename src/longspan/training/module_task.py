"""A user's own model as a task: any nn.Module, any dataset, any loss."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from longspan.config import Run, Train
from longspan.data import Baseline, DatasetLoader, DatasetSource, Failure
from longspan.data.dataset import Collate, NestedBatch
from longspan.derived import batch_values, schedule_text
from longspan.engines import Engine, MakeOptimizer
from longspan.engines.module_pipeline import Stages
from longspan.engines.module_spec import Loss, ModuleSpec, Wrap
from longspan.engines.optimizer import optimizer_state, set_learning_rate
from longspan.engines.protocol import ReadTensor
from longspan.errors import UserError
from longspan.faults import fault_point
from longspan.nn import eval_mode
from longspan.parallel.collectives import all_reduce_any, all_reduce_loss
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.tracking import MetricsFile, Reporter
from longspan.training.meter import Meter
from longspan.training.schedule import learning_rate
from longspan.training.signals import StopRequests
from longspan.training.state import DATA
from longspan.wording import counted

OF_TRAINER = "__main__:trainer"
"""The `model.factory` of a run whose model came from a Trainer."""
OF_OUR_OPTIMIZER = ("lr", "lr_scaling", "optimizer", "weight_decay", "beta1", "beta2", "eps")
OF_OUR_SCHEDULE = ("schedule", "warmup_steps", "decay_steps", "min_lr_ratio")
"""Keys of [train] that a user's optimizer or schedule replaces."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Task:
    """A model of your own, its loss and its data, to be trained by a run file."""

    model: nn.Module
    """With its initial weights, in float32, on the CPU."""
    loss: Loss
    """loss(model, batch) returns the summed loss of a batch and the number to divide by: samples,
    pixels, tokens. So accumulation and data parallelism never change the loss of a step."""
    dataset: Any
    """Map-style (__getitem__ and __len__), or an iterable with __len__, or a torch DataLoader, of
    which dataset, collate_fn, num_workers and shuffle are taken."""
    validation: Any = None
    """The same, for evaluation; `train.eval_samples` of it, from the first on."""
    collate: Collate | None = None
    """Makes a batch of a list of samples; by default torch's default_collate."""
    shuffle: bool = True
    """Whether each epoch of a map-style dataset has its own order."""
    workers: int = 0
    """Processes that read the dataset a step ahead; 0 reads it in the process that trains."""
    wrap: Wrap = None
    """Which modules are sharded, checkpointed and compiled one by one: a class or several, a list
    of globs over module names, or the least number of parameters; by default the whole model."""
    tensor_plan: Mapping[str, str] | None = None
    """For `layout.tensor`: "column", "row" or "sequence" by a glob over module names."""
    stages: Stages | None = None
    """For `layout.pipeline`: the names of the modules of each stage, in the order of the forward
    pass, which does nothing between them; the loss calls model(x) once, with one tensor."""
    optimizer: MakeOptimizer | None = None
    """Builds an optimizer of the parallelized model; by default AdamW by [train]."""
    schedule: Callable[[int], float] | None = None
    """The factor of the optimizer's learning rate after so many steps; by default by [train]."""


class ModuleTask:
    def __init__(self, run: Run, task: Task) -> None:
        self._run, self._task = run, _with_loader(task, run.train)
        self.source = DatasetSource(
            self._task.dataset, collate=self._task.collate, shuffle=self._task.shuffle
        )
        self.spec = ModuleSpec(
            task.model, task.loss, task.wrap, task.tensor_plan, task.stages, self._example
        )
        if not task.model.training:  # else parts that are in eval mode stay so
            task.model.train()
        self._model_name = type(task.model).__name__  # now, as FSDP gives it another class
        self.make_optimizer = self._build_optimizer if task.optimizer else None
        if task.optimizer and run.engine.name != "native":
            raise UserError(
                f'engine.name = "{run.engine.name}" has its own way to step an optimizer: remove '
                'optimizer=, or set engine.name = "native"'
            )
        _check_schedule(task, run.train)
        if (workers := self._task.workers) < 0:
            raise UserError(f"workers must be at least 0, got {workers}")
        if workers and not self.source.is_map:
            raise UserError(
                f"workers={workers} needs a map-style dataset, but {self.source.name} is an "
                "iterable: give it __getitem__, or workers=0"
            )
        self.resume_key = {
            "train.seed": run.train.seed,
            "optimizer": "that of [train]",
            DATA: f"{self.source.describe()}; SHA-256 {self.source.fingerprint}",
        }

    def _example(self) -> NestedBatch:
        train = self._run.train
        batch = self.source.batch(train.seed, range(train.micro_batch))
        if isinstance(batch, Failure):
            raise UserError(batch.text)
        return batch

    def set_learning_rate(self, optimizer: Optimizer, step: int) -> None:
        train, schedule = self._run.train, self._task.schedule
        if schedule is None and self._task.optimizer is None:
            set_learning_rate(optimizer, learning_rate(train, step))
            return
        factor = learning_rate(train, step) / train.peak_lr
        if schedule:
            factor = _factor(schedule, step)
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])

    def _build_optimizer(self, model: nn.Module) -> Optimizer:
        """The user's optimizer, if the loop can step it and a checkpoint can hold it."""
        make: Any = self._task.optimizer
        is_class = isinstance(make, type) and issubclass(make, Optimizer)
        optimizer = make(model) if callable(make) and not is_class else make
        if not isinstance(optimizer, Optimizer) or optimizer is make:
            raise UserError(
                "optimizer= must be a function of the model that returns a torch optimizer, such "
                f"as lambda model: SGD(model.parameters(), lr=0.1); got {_kind(optimizer)}"
            )
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise UserError(f"{name} needs several losses in a step: use another optimizer")
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = dict(model.named_parameters())
        if stepped - {id(p) for p in parameters.values()}:
            raise UserError(
                f"{name} has parameters that are not the model's: build it from the parameters of "
                "the model that optimizer= is called with, which sharding replaces"
            )
        left = [n for n, p in parameters.items() if p.requires_grad and id(p) not in stepped]
        if left:
            raise UserError(
                f"{name} leaves out {counted(len(left), 'parameter')} to train, such as "
                f"{left[0]}: give it all, or call requires_grad_(False) on those"
            )
        self.resume_key["optimizer"] = name

        def check_state(*_: object) -> None:  # now, not when the first checkpoint is due
            hook.remove()
            for parameter in parameters.values():
                list(optimizer_state(optimizer, parameter))

        hook = optimizer.register_step_post_hook(check_state)
        return optimizer

    def frozen_weights(self) -> ReadTensor | None:
        return None

    def initial_weights(self) -> ReadTensor | None:
        return None

    def open_data(self, mesh: ParallelMesh, device: torch.device) -> DatasetLoader:
        train, workers = self._run.train, self._task.workers
        return DatasetLoader(
            self.source,
            train.seed,
            mesh.local_samples,
            device,
            micro_batch=train.micro_batch,
            workers=workers,
        )

    def evaluation(
        self, engine: Engine, mesh: ParallelMesh, device: torch.device, precision: ForwardContext
    ) -> ModuleEvaluation:
        validation = self._task.validation
        source = None
        if validation is not None:
            collate = self._task.collate
            if isinstance(validation, DataLoader):
                collate = collate or validation.collate_fn
                validation = validation.dataset
            source = DatasetSource(validation, collate=collate, shuffle=False)
        return ModuleEvaluation(engine, self.spec, source, self._run.train, mesh, device, precision)

    def meter(self, device: torch.device, step: int, world: int) -> Meter:
        train = self._run.train
        return Meter(
            context=None,
            global_batch=train.global_batch,
            steps=train.steps,
            flops=0.0,
            peak_flops=None,
            device=device,
            step=step,
        )

    def summary(self, engine: Engine, mesh: ParallelMesh, *, is_new: bool) -> dict[str, str]:
        model = self._task.model
        count = sum(torch.Size(shape).numel() for shape in self.spec.shapes.values())
        rows = {
            "model": f"{self._model_name}, {count:,} parameters",
            "data": self.source.describe(),
            **batch_values(self._run, mesh.ranks),
        }
        if self._task.optimizer or self._task.schedule:
            peak = "that of optimizer=" if self._task.optimizer else f"{self._run.train.peak_lr:g}"
            by_step = "times schedule=" if self._task.schedule else schedule_text(self._run.train)
            rows["learning rate"] = f"{peak}, {by_step}"
        if self.spec.blocks:
            rows["blocks"] = f"{len(self.spec.blocks)} {', '.join(self.spec.block_classes)}"
        if self._task.optimizer:
            rows["optimizer"] = type(engine.optimizer).__name__
        norms = sorted({type(m).__name__ for m in model.modules() if isinstance(m, BATCH_NORMS)})
        if norms and (self._run.train.micro_batch < self._run.train.global_batch):
            rows["warning"] = (
                f"{', '.join(norms)} normalises over each micro-batch of each rank, so the layout "
                "changes what is computed: GroupNorm or LayerNorm do not"
            )
        return rows

    def sample(self, *_: object, **__: object) -> str | None:
        return None


class ModuleEvaluation:
    """The validation loss of a user's own model. Data-parallel ranks share the samples."""

    baseline: Baseline | None = None

    def __init__(
        self,
        engine: Engine,
        spec: ModuleSpec,
        source: DatasetSource | None,
        train: Train,
        mesh: ParallelMesh,
        device: torch.device,
        context: ForwardContext,
    ) -> None:
        self._engine, self._spec, self._source, self._train = engine, spec, source, train
        self._mesh, self._device, self._context = mesh, device, context

    @property
    def why_empty(self) -> str:
        return "" if self._source else "the task has no validation samples"

    @cached_property
    def _batches(self) -> list[list[int]]:
        """This rank's samples of each forward pass. All ranks run as many, as FSDP needs it; a rank
        that has no samples left repeats its first one, which does not count.
        """  # fmt: skip
        assert self._source is not None
        count = min(self._train.eval_samples, self._source.length)
        ranks, size = self._mesh.data_ranks, self._train.micro_batch
        padded = [*range(count), *[-1] * (-count % (ranks * size))]
        local = self._mesh.local_samples(padded)
        return [list(local[start : start + size]) for start in range(0, len(local), size)]

    @torch.no_grad()
    def loss(self, requests: StopRequests) -> float | None:
        if self._source is None:
            return None
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        model = self._engine.inference_model
        assert isinstance(model, nn.Module)
        with eval_mode(model), self._context():
            for indices in self._batches:
                fault_point("evaluation")
                if any(all_reduce_any(self._mesh, requests.stop)):
                    return None
                real = [index for index in indices if index >= 0]
                batch = self._source.batch(self._train.seed, real or [0])
                if isinstance(batch, Failure):
                    raise UserError(batch.text)
                loss, count = self._spec.loss(model, batch.to(self._device))
                if real:
                    total += torch.stack([loss.double(), count])
        loss_sum, count = all_reduce_loss(self._mesh, total, pipeline=False).tolist()
        if not count > 0:
            raise UserError(
                f"the counts of the loss function add up to {count:g} over the validation samples: "
                "give it samples to count, or remove validation="
            )
        return float(loss_sum / count)

    def by_position(self, requests: StopRequests) -> dict[str, float]:
        return {}

    def report(
        self, loss: float | None, step: int, reporter: Reporter, metrics: MetricsFile
    ) -> None:
        if loss is None:
            return
        metrics.write({"step": step, "validation_loss": loss})
        reporter.print(f"step {step}  validation loss {loss:.4f}")


def _check_schedule(task: Task, train: Train) -> None:
    """Check what says how parameters are updated: [train], or the user's optimizer and schedule."""
    if task.schedule is not None and not _takes_a_step(task.schedule):
        raise UserError(
            "schedule= must be a function of the step that returns a factor of the learning rate, "
            f"such as lambda step: 0.99**step; got {task.schedule!r}"
        )
    replaced = []
    if task.optimizer is not None:
        replaced += [("optimizer=", name) for name in OF_OUR_OPTIMIZER]
    if task.schedule is not None:
        replaced += [("schedule=", name) for name in OF_OUR_SCHEDULE]
    defaults = Train(steps=train.steps)
    for argument, name in replaced:
        if (value := getattr(train, name)) != getattr(defaults, name):
            raise UserError(f"train.{name} = {value} has no effect with {argument}: remove it")


def _takes_a_step(schedule: object) -> bool:
    """Whether `schedule` can be called with a step, as far as its signature tells."""
    if not callable(schedule):
        return False
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # of built-in functions that have none
        pass
    return True


def _factor(schedule: Callable[[int], float], step: int) -> float:
    found: object = schedule(step)
    try:
        factor = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise UserError(
            f"schedule({step}) must return a factor of the learning rate, at least 0; got {found!r}"
        )
    return factor


def _kind(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


def call_factory(run: Run, folder: Path) -> Task:
    """Call `model.factory` with the run; modules are found as in a program started in `folder`."""
    if run.model.factory == OF_TRAINER:
        raise UserError(
            "this run was started by longspan.Trainer in a program, which alone has its model: "
            "resume it there, by Trainer.train(resume=True)"
        )
    module_name, _, name = run.model.factory.partition(":")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f'model.factory = "{run.model.factory}": there is no module {error.name} in {folder} '
            "or where Python looks for modules (PYTHONPATH)"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UserError(
            f'model.factory = "{run.model.factory}": {module.__name__} has no function {name}'
        )
    try:
        inspect.signature(factory).bind(run)
    except TypeError as error:
        raise UserError(
            f'model.factory = "{run.model.factory}" is called with the run alone: {error}'
        ) from error
    torch.manual_seed(run.train.seed)
    task = factory(run)
    if not isinstance(task, Task):
        raise UserError(
            f'model.factory = "{run.model.factory}" must return a longspan.Task, got '
            f"{type(task).__name__}"
        )
    return task


def _with_loader(task: Task, train: Train) -> Task:
    """The task with what its DataLoader says, if its dataset is one."""
    loader = task.dataset
    if not isinstance(loader, DataLoader):
        return task
    if loader.batch_size is None:
        raise UserError(
            "the DataLoader has a batch_sampler or no batch size, but the run makes the batches "
            f"itself: remove batch_sampler=, and give batch_size={train.micro_batch}"
        )
    if loader.worker_init_fn is not None:
        raise UserError(
            "the DataLoader has a worker_init_fn, which the run's workers do not call: remove it, "
            "and set up the dataset where it first reads a sample"
        )
    if loader.batch_size != train.micro_batch:
        raise UserError(
            f"the DataLoader has batch_size {loader.batch_size}, but train.micro_batch is "
            f"{train.micro_batch}: set train.micro_batch={loader.batch_size}"
        )
    is_iterable = isinstance(loader.dataset, IterableDataset)  # which has a sampler of torch's
    if not is_iterable and type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise UserError(
            f"the DataLoader has a {type(loader.sampler).__name__}, but the run orders samples "
            "itself, so that it can resume on any number of ranks: remove sampler="
        )
    return Task(
        **{
            **{key: getattr(task, key) for key in task.__dataclass_fields__},
            "dataset": loader.dataset,
            "collate": task.collate or loader.collate_fn,
            "workers": task.workers or loader.num_workers,
            "shuffle": isinstance(loader.sampler, RandomSampler),
        }
    )
