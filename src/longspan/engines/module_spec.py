"""A user's own module as engines train it: replicated, sharded, and split by a plan of the user's.

The module comes with its initial weights, of which those of rank 0 count. What is sharded,
checkpointed and compiled one by one are its blocks, which a wrap policy finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longspan.checkpoint import Region
from longspan.config import Layout, Train
from longspan.data.dataset import NestedBatch
from longspan.engines.module_pipeline import (
    PipelinedModule,
    Stages,
    check_stages,
    drop_remote_stages,
    input_of,
    stage_shapes,
)
from longspan.errors import UserError
from longspan.models import parameter_shapes
from longspan.parallel.activation_checkpointing import checkpointed
from longspan.parallel.apply import apply_ddp, fully_shard_blocks, wrap_modules
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import persistent_buffers
from longspan.parallel.pipeline import ForwardContext

Wrap = type[nn.Module] | Sequence[type[nn.Module]] | Sequence[str] | int | None
"""Which modules are blocks: those of a class or several, those whose names match a list of globs,
or the smallest ones with at least so many parameters."""
Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float]]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward pass."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "sequence": SequenceParallel,
}
"""How a tensor-parallel plan may split a module."""


class ModuleSpec:
    """`loss(model, batch)` returns the summed loss of a batch and what to divide it by."""

    rebuild = None
    may_skip_parameters = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        wrap: Wrap = None,
        tensor_plan: Mapping[str, str] | None = None,
        stages: Stages | None = None,
        example: Callable[[], Any] | None = None,
    ) -> None:
        """`example` gives a micro-batch, by which the stages of a pipeline are tried."""
        _check_module(model)
        self.model, self.shapes = model, parameter_shapes(model)
        self.blocks = find_blocks(model, wrap)
        classes = {type(model.get_submodule(name)).__name__ for name in self.blocks}
        self.block_classes = tuple(sorted(classes))  # now, as FSDP gives modules other classes
        self._loss, self._tensor_plan = loss, tensor_plan or {}
        self._stages, self._example = stages, example
        _check_plan(model, self._tensor_plan)

    def is_stored(self, name: str) -> bool:
        return True

    def parallelize(
        self, mesh: ParallelMesh, layout: Layout, train: Train, forward_context: ForwardContext
    ) -> nn.Module:
        self._broadcast(mesh)
        device = torch.device(train.device)
        if mesh.is_fsdp and (scalar := next((n for n, s in self.shapes.items() if not s), None)):
            raise UserError(
                f"{scalar} is a scalar, which FSDP cannot shard: give it shape (1,), or set "
                "layout.zero = 0"
            )
        if mesh.ranks["pipeline"] > 1:
            return self._pipelined(mesh, layout, train, forward_context)
        if not mesh.is_fsdp:  # FSDP brings one block after the other to the device
            self.model.to(device)
        if mesh.ranks["tensor"] > 1:
            self._apply_tensor_parallel(mesh)
        self.wrap_blocks(self.model, train)
        if mesh.is_fsdp:
            blocks = [self.model.get_submodule(name) for name in self.blocks]
            fully_shard_blocks(self.model, blocks, mesh, layout)
        return self.model

    def _pipelined(
        self, mesh: ParallelMesh, layout: Layout, train: Train, forward_context: ForwardContext
    ) -> PipelinedModule:
        ranks, device = mesh["pipeline"], torch.device(train.device)
        if not self._stages:
            raise UserError(
                f"layout.pipeline = {ranks.size()} needs to know the stages of the model: give "
                'stages=[["embedding", "layers.0"], ["layers.1", "head"]], or set layout.pipeline '
                "= 1"
            )
        check_stages(self.model, self._stages, ranks.size() * layout.stages_per_rank)
        assert self._example is not None
        shapes = stage_shapes(self.model, self._stages, input_of(self.loss, self._example()))
        local = drop_remote_stages(self.model, self._stages, ranks)
        is_local = tuple(f"{name}." for name in local)
        self.blocks = [name for name in self.blocks if f"{name}.".startswith(is_local)]
        self.wrap_blocks(self.model, train)
        if not mesh.is_fsdp:
            self.model.to(device)
        module = PipelinedModule(
            self.model, self._stages, layout.schedule, ranks, self.loss, forward_context
        )
        if mesh.is_fsdp:
            blocks = [self.model.get_submodule(name) for name in self.blocks]
            for stage in module.stages:
                inside = set(stage.modules())
                fully_shard_blocks(stage, [b for b in blocks if b in inside], mesh, layout)
        micro_batches = train.global_batch // (train.micro_batch * mesh.data_ranks)
        module.build_schedule(micro_batches, shapes, device)
        return module

    def materialize(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        layout: Layout,
        train: Train,
        device: torch.device,
    ) -> nn.Module:
        if not mesh.is_ddp:
            return module
        looks = self.may_skip_parameters
        return apply_ddp(module, mesh, layout, device, find_unused_parameters=looks)

    def initialize(self, train: Train, mesh: ParallelMesh, device: torch.device) -> None:
        self._broadcast(mesh)
        self.model.to(device)

    def wrap_blocks(self, model: nn.Module, train: Train) -> None:
        mode, compiles = train.activation_checkpointing, train.compile is True
        if mode != "none" and not self.blocks:
            raise UserError(
                f'train.activation_checkpointing = "{mode}" needs to know the blocks of the model: '
                "give wrap=, such as the class of its blocks"
            )
        # The compiler updates buffers once by itself.
        wrap = partial(checkpointed, mode=mode, is_random=True, keeps_buffers=not compiles)
        wrap_modules(model, self.blocks, lambda _, block: wrap(block), compiles=compiles)
        if compiles and not self.blocks:
            model.compile()

    def initial_weight(self, seed: int, name: str, region: Region) -> Tensor:
        raise AssertionError("a module comes with its weights")

    def loss(self, module: Any, batch: NestedBatch) -> tuple[Tensor, Tensor]:
        if isinstance(module, PipelinedModule):
            return module.evaluate(batch)
        # Dropout depends on the samples: other ranks draw other numbers, and every layout with the
        # same micro-batches the same ones.
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()] if has_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(batch.seed)
            return _checked_loss(self._loss(module, batch.content))

    def _broadcast(self, mesh: ParallelMesh) -> None:
        """Give all ranks the weights and buffers of rank 0, whatever seed each was built with."""
        if mesh.world.size == 1:
            return
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def _apply_tensor_parallel(self, mesh: ParallelMesh) -> None:
        if not self._tensor_plan:
            raise UserError(
                f"layout.tensor = {mesh.ranks['tensor']} needs a plan that says how to split the "
                'modules: give tensor_plan={"layers.*.up": "column", "layers.*.down": "row"}, or '
                "set layout.tensor = 1"
            )
        plan = {name: STYLES[style]() for name, style in self._tensor_plan.items()}
        parallelize_module(self.model, mesh["tensor"], plan)


def find_blocks(model: nn.Module, wrap: Wrap) -> list[str]:
    """The names of the blocks of `model`, none of which is inside another.

    A module with a parameter that is used outside of it too, such as a tied embedding, is none:
    the parameter would be sharded twice.
    """
    if wrap is None:
        return []
    if isinstance(wrap, int) and not isinstance(wrap, bool):
        if wrap < 1:
            raise UserError(f"wrap= must be at least 1 parameter, got {wrap}")
        found = list(_by_size(model, wrap))
    else:
        matches = {item: set(_matching(model, item)) for item in _items(wrap)}
        if empty := [item for item, names in matches.items() if not names]:
            raise _no_block(model, empty[0])
        matched = set().union(*matches.values())
        found = [name for name, _ in model.named_modules() if name in matched]
    found = [name for name in found if name and not _shares_parameters(model, name)]
    outermost: list[str] = []
    for name in found:  # a module comes before those inside it
        if not any(name.startswith(f"{other}.") for other in outermost):
            outermost.append(name)
    if not outermost:
        raise _no_block(model, wrap)
    return outermost


def _matching(model: nn.Module, item: type[nn.Module] | str) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, item) if isinstance(item, type) else fnmatchcase(name, item):
            yield name


def _no_block(model: nn.Module, wrap: Wrap) -> UserError:
    return UserError(
        f"wrap={_described(wrap)} finds no block in {type(model).__name__}; its modules are "
        + ", ".join(f"{name} ({type(m).__name__})" for name, m in model.named_children())
    )


def _by_size(model: nn.Module, least: int) -> Iterator[str]:
    """The modules with at least `least` parameters that contain no other such module.

    Lists of modules are none, as they have no forward pass; and attention is whole, as it uses the
    weights of its output projection without calling it.
    """
    attention = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    )
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if not isinstance(module, CONTAINERS) and not name.startswith(attention)
    }
    large = [name for name, size in sizes.items() if name and size >= least]
    for name in large:
        if not any(other.startswith(f"{name}.") for other in large):
            yield name


def _shares_parameters(model: nn.Module, name: str) -> bool:
    inside = {id(p) for p in model.get_submodule(name).parameters()}
    others = (
        p
        for full_name, p in model.named_parameters(remove_duplicate=False)
        if not full_name.startswith(f"{name}.")
    )
    return any(id(p) in inside for p in others)


def _items(wrap: Any) -> list[Any]:
    items = [wrap] if isinstance(wrap, str | type) or not isinstance(wrap, Iterable) else list(wrap)
    for item in items:
        if not isinstance(item, str) and not (
            isinstance(item, type) and issubclass(item, nn.Module)
        ):
            raise UserError(
                "wrap= must be a module class or several, a list of globs over module names, or a "
                f"number of parameters; got {_kind(item)}"
            )
    return items


def _described(wrap: Wrap) -> str:
    items = [wrap] if isinstance(wrap, int) else _items(wrap)
    return ", ".join(item.__name__ if isinstance(item, type) else repr(item) for item in items)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    name = type(model).__name__
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise UserError(f"{name} has no parameters to train: none requires a gradient")
    if any(p.is_meta for p in parameters):
        raise UserError(f"{name} is on the meta device: build it with its weights, on the CPU")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise UserError(f"{name} has lazy modules: run it once on a batch, so that they get shapes")
    if low := next((n for n, p in model.named_parameters() if p.dtype != torch.float32), None):
        raise UserError(
            f"{low} of {name} is {model.get_parameter(low).dtype}, but parameters are trained in "
            "float32: call .float() on the model, and set train.precision for mixed precision"
        )
    if empty := next((n for n, p in model.named_parameters() if not p.numel()), None):
        raise UserError(f"{empty} of {name} has no elements: remove it")
    if odd := next((n for n, x in persistent_buffers(model).items() if x.is_complex()), None):
        raise UserError(
            f"the buffer {odd} of {name} is complex, which a checkpoint cannot hold: register it "
            "with persistent=False, or as torch.view_as_real of it"
        )


def _check_plan(model: nn.Module, plan: Mapping[str, str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for name, style in plan.items():
        if style not in STYLES:
            raise UserError(f'tensor_plan["{name}"] must be {", ".join(STYLES)}, got {style!r}')
        if not any(fnmatchcase(other, name) for other in names):
            raise UserError(f'tensor_plan["{name}"] matches no module of {type(model).__name__}')


def _checked_loss(found: object) -> tuple[Tensor, Tensor]:
    """The sum and the count that a loss function has returned, which is the user's."""
    expected = "the loss function must return (sum, count): the summed loss and what to divide by"
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(f"{expected}; got {_kind(found)}")
    loss, count = found
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UserError(f"{expected}; the sum is {_kind(loss)}, not a tensor of one number")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(
            "the loss does not depend on a parameter that requires a gradient: compute it from "
            "what the model returns, without .detach() or .item()"
        )
    if not isinstance(count, Real | Tensor) or (isinstance(count, Tensor) and count.numel() != 1):
        raise UserError(f"{expected}; the count is {_kind(count)}, not a number")
    # On a GPU it stays there, as reading it would wait; the step is skipped then.
    if not (isinstance(count, Tensor) and count.is_cuda) and not float(count) >= 0:
        raise UserError(f"{expected}; the count is {float(count):g}, not at least 0")
    count = torch.as_tensor(count, dtype=torch.float64, device=loss.device).detach().reshape(())
    return loss.reshape(()), count


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
