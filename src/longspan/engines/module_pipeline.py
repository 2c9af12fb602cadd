"""Pipeline parallelism for a user's own model, whose author says which modules follow each other.

The loss function is the user's, and calls the model: on the rank of the first stage that call gives
the pipeline its input, and on the rank of the last stage it returns the pipeline's output. So the
same function works with and without a pipeline; it may call the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import UserError
from longspan.nn import eval_mode
from longspan.parallel.parameters import persistent_buffers
from longspan.parallel.pipeline import ForwardContext, build_schedule

CheckedLoss = Callable[[Any, Any], tuple[Tensor, Tensor]]
Stages = Sequence[Sequence[str]]
"""The names of the modules of each stage, in the order in which the model runs them."""


class Chain(nn.Module):
    """The modules of one stage, each given what the one before it returns."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], forward_context: ForwardContext
    ) -> None:
        super().__init__()
        self.links = nn.ModuleList(model.get_submodule(name) for name in names)
        self._context = forward_context

    def forward(self, x: Tensor) -> Tensor:
        with self._context():
            for link in self.links:
                x = link(x)
        # As without autocast, so that what is between stages does not depend on the precision.
        return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Called(Exception):
    """The loss function has called the model with `x`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class StandIn:
    """What the loss function gets for the model, of which a rank has only some stages."""

    def __init__(self, call: Callable[..., Any], *, training: bool) -> None:
        self._call, self.training = call, training

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"in a pipeline a loss may use model(x) and model.training, but not model.{name}: pass "
            "what it needs in the batch"
        )


def input_of(loss: CheckedLoss, batch: Any, *, training: bool = True) -> Tensor:
    """What the loss function calls the model with, for a batch."""

    def call(*arguments: Any, **options: Any) -> Any:
        if len(arguments) != 1 or options or not isinstance(arguments[0], Tensor):
            raise UserError("a pipeline needs a loss that calls model(x) with one tensor")
        raise _Called(arguments[0])

    try:
        loss(StandIn(call, training=training), batch)
    except _Called as called:
        return called.x
    raise UserError("a pipeline needs a loss that calls model(x), but it did not call the model")


class PipelinedModule(nn.Module):
    """A model whose stages lie on the ranks of the one-dimensional `mesh`."""

    def __init__(
        self,
        model: nn.Module,
        names: Stages,
        schedule: str,
        mesh: DeviceMesh,
        loss: CheckedLoss,
        forward_context: ForwardContext,
    ) -> None:
        """`model`: what `drop_remote_stages` has left of it."""
        super().__init__()
        self._count, self._ranks, self._mesh = len(names), mesh.size(), mesh
        self._group, self._loss, self._schedule_name = mesh.get_group(), loss, schedule
        self._local = {
            stage: Chain(model, names[stage], forward_context)
            for stage in range(mesh.get_local_rank(), self._count, self._ranks)
        }
        self.stages = nn.ModuleList(self._local.values())
        self._batches: Sequence[Any] = ()
        self._counts: list[Tensor] = []
        self._scale = torch.ones(())

    def build_schedule(
        self, micro_batches: int, shapes: Sequence[Tensor], device: torch.device
    ) -> None:
        """Build the schedule. `shapes`: the input of the first stage, and the output of each, as
        tensors on the meta device.
        """
        self._shapes = shapes
        boundaries = [
            _boundary(shape, has_gradient=index > 0) for index, shape in enumerate(shapes)
        ]
        self._schedule = build_schedule(
            self._schedule_name,
            self._local,
            boundaries,
            micro_batches,
            self._scaled,
            device=device,
            group=self._group,
        )

    def _scaled(self, output: Tensor, which: Tensor) -> Tensor:
        model = StandIn(lambda *_: output, training=True)
        loss, count = self._loss(model, self._batches[int(which)])
        self._counts.append(count)
        return loss * self._scale

    def backward(self, batches: Sequence[Any], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of scale · loss over a step's micro-batches.

        Returns scale · loss and the count on the rank of the last stage, zeros on the others.
        """
        self._batches, self._scale, self._counts = batches, scale, []
        losses: list[Tensor] = []
        first = [torch.cat([input_of(self._loss, batch) for batch in batches])]
        is_last = self._count - 1 in self._local
        self._schedule.step(
            *(first if 0 in self._local else []),
            target=torch.arange(len(batches)) if is_last else None,
            losses=losses,
            return_outputs=False,
        )
        zero = torch.zeros((), dtype=torch.float64, device=scale.device)
        if not is_last:
            return torch.zeros_like(scale), zero
        return torch.stack(losses).detach().sum(), torch.stack(self._counts).sum()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and the count of a batch, on every rank; without gradients."""
        rank, x = self._mesh.get_local_rank(), input_of(self._loss, batch, training=False)
        for index in self._local:
            if index > 0:
                like = self._shapes[index]
                x = torch.empty((len(x), *like.shape[1:]), dtype=like.dtype, device=x.device)
                dist.recv(x, self._global_rank((index - 1) % self._ranks), self._group)
            x = self._local[index](x)
            if index < self._count - 1:
                dist.send(x.contiguous(), self._global_rank((index + 1) % self._ranks), self._group)
        last = (self._count - 1) % self._ranks
        result = torch.zeros(2, dtype=torch.float64, device=x.device)
        if rank == last:
            model = StandIn(lambda *_: x, training=False)
            result = torch.stack([y.double() for y in self._loss(model, batch)])
        dist.broadcast(result, self._global_rank(last), self._group)
        return result[0], result[1]

    def _global_rank(self, pipeline_rank: int) -> int:
        return dist.get_global_rank(self._group, pipeline_rank)


def _boundary(like: Tensor, *, has_gradient: bool) -> Tensor:
    """A tensor between two stages; the first stage's input has no gradient."""
    empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return empty.requires_grad_(has_gradient and like.is_floating_point())


def check_stages(model: nn.Module, stages: Stages, needed: int) -> None:
    """Refuse stages that do not fit the layout, or that do not partition the model's parameters."""
    if len(stages) != needed:
        raise UserError(f"stages= has {len(stages)} stages, but the layout needs {needed}")
    known = {name for name, _ in model.named_modules()}
    names = [name for stage in stages for name in stage]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"stages= names {unknown[0]}, which {type(model).__name__} has not")
    owners: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for name in stage:
            for parameter in model.get_submodule(name).parameters():
                if owners.setdefault(id(parameter), index) != index:
                    raise UserError(
                        f"{name} shares a parameter with another stage: put both into one stage"
                    )
    for name, parameter in model.named_parameters():
        if id(parameter) not in owners:
            raise UserError(f"{name} is in no stage of stages=: add its module to one")
    if buffers := persistent_buffers(model):
        raise UserError(
            f"a pipeline cannot save the buffer {min(buffers)}: make it persistent=False, or set "
            "layout.pipeline = 1"
        )


@torch.no_grad()
def stage_shapes(model: nn.Module, stages: Stages, x: Tensor) -> list[Tensor]:
    """The input of the first stage and the output of each, on the meta device.

    Refuses stages that do not compute what the model does, on the input `x`.
    """
    with eval_mode(model):  # dropout would differ
        expected, found, shapes = model(x), x, [x.to("meta")]
        for stage in stages:
            for name in stage:
                found = model.get_submodule(name)(found)
            if not isinstance(found, Tensor):
                raise UserError(f"a stage must return one tensor, but {stage[-1]} does not")
            shapes.append(found.to("meta"))
    if expected.shape != found.shape or not torch.allclose(expected, found, equal_nan=True):
        raise UserError(
            f"stages= run one after the other do not compute what {type(model).__name__} does: "
            "name its modules in the order of its forward pass, which may do nothing between them"
        )
    return shapes


def drop_remote_stages(model: nn.Module, stages: Stages, mesh: DeviceMesh) -> list[str]:
    """Replace the modules of other ranks' stages by nothing; returns the names of this rank's."""
    local: list[str] = []
    for index, stage in enumerate(stages):
        if index % mesh.size() == mesh.get_local_rank():
            local += stage
            continue
        for name in stage:
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent).register_module(child, nn.Identity())
    return local
