"""What a rank's model and optimizer take in memory, whatever the samples are.

What can be counted is counted: the run's own model is laid out on the meta device, by the code that
lays it out for training, in a world of processes that are not there (torch's "fake" backend). Added
to the numbers so found is how many bytes each has, and which of them a step holds whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from longspan.config import Run
from longspan.models import new_decoder
from longspan.parallel.placement import Placement, local, parameter_mesh
from longspan.parallel.world import World
from longspan.sketching import SKLinear

WORD = 4
"""Bytes of a parameter, of its gradient and of each of its two moments."""
TABLES = 3
"""Matrices as large as the head at the end of the backward pass: its gradient, which is there since
its forward pass, the lookup's or that of earlier micro-batches, and what comes of the two."""
FEWEST_IN_8_BITS, PER_SCALE = 4096, 256
"""Of torchao's 8-bit moments: smaller tensors stay in 32 bits, and so many share a scale."""


@dataclass(frozen=True)
class States:
    """Bytes on a rank, at the moment of the backward pass at which they are most."""

    parameters: int
    """This rank's own."""
    gradients: int
    optimizer: int
    passing: int
    """Parameters of other ranks while they are needed, and gradients on their way."""
    copies: int
    """16-bit copies of weights, which autocast keeps where they are not sharded."""
    signs: int
    """Of sketched layers, a bit each; no axis but `tensor` and `pipeline` splits them."""
    offloaded: int = 0
    """Bytes of these that wait in the CPU's memory."""

    @property
    def on_device(self) -> int:
        held = self.parameters + self.gradients + self.optimizer
        return held + self.passing + self.copies + self.signs - self.offloaded


def states_of(run: Run, world: int) -> list[States]:
    """Of each rank of the pipeline axis, where `world` processes train `run` with PyTorch itself.

    The ranks beside it on other axes have as much. `run.train.precision` is taken as it stands.
    """
    stages = run.layout.resolve(world)["pipeline"]
    return [_states(run, world, stage * world // stages) for stage in range(stages)]


@dataclass
class _Numbers:
    """How many numbers a rank has of parameters, and how many these are when gathered."""

    own: list[int] = field(default_factory=list)
    cast: int = 0
    """Of the blocks' dense layers, which autocast has a copy of."""
    table: int = 0
    """Of the head, or of the embedding where that is the head."""
    outside: int = 0
    blocks: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, parameter: Tensor) -> None:
        gathered = _gathered(parameter)
        self.own.append(local(parameter).numel())
        if name.startswith("blocks."):
            is_weight = parameter.dim() > 1 and name.endswith(".weight")
            self.cast += gathered if is_weight else 0
            block = name.split(".")[1]
            self.blocks[block] = self.blocks.get(block, 0) + gathered
        else:
            self.outside += gathered
            self.table = max(self.table, gathered)

    @property
    def whole(self) -> int:
        return self.outside + sum(self.blocks.values())


def _states(run: Run, world: int, rank: int) -> States:
    model, numbers = new_decoder(run), _Numbers()
    with _stand_in(run, world, rank) as placed:
        placed.arrange(model, run)
        for name, parameter in placed.named_parameters(model):
            numbers.add(name, parameter)
    moments = sum(_moment_bytes(n, run.train.optimizer) for n in numbers.own)
    own = WORD * sum(numbers.own)
    passing = _passing_sharded if placed.is_sharded else _passing_unsharded
    signs = (x for m in model.modules() if isinstance(m, SKLinear) for x in m.buffers())
    return States(
        parameters=own,
        gradients=WORD * _gradients(run, placed, numbers),
        optimizer=moments,
        passing=passing(run, placed, numbers),
        copies=0 if placed.is_sharded or _width(run) == WORD else _width(run) * numbers.cast,
        signs=sum(x.nbytes for x in signs),
        offloaded=2 * own + moments if run.layout.offload else 0,
    )


def _width(run: Run) -> int:
    """Bytes of a number in the run's precision."""
    return 2 if run.train.precision in ("bf16", "fp16") else WORD


def _has_several(run: Run, placed: Placement) -> bool:
    """Whether a step adds up gradients of several micro-batches."""
    return run.train.global_batch > run.train.micro_batch * placed.data_ranks


def _gradients(run: Run, placed: Placement, numbers: _Numbers) -> int:
    """Numbers of gradients that are added up: a rank's own, or whole ones shared once a step."""
    is_once = run.layout.zero <= 1 or placed.ranks["pipeline"] > 1
    once = placed.is_sharded and is_once and _has_several(run, placed)
    return numbers.whole if once else sum(numbers.own)


def _passing_unsharded(run: Run, placed: Placement, numbers: _Numbers) -> int:
    """Bytes beside the gradients: of the head, where its gradient is added to others; and what
    PowerSGD has left out.
    """
    adds = run.model.tie_embeddings or _has_several(run, placed)
    left_out = sum(numbers.own) if run.layout.gradient_compression == "powersgd" else 0
    return WORD * ((TABLES * numbers.table if adds else 0) + left_out)


def _passing_sharded(run: Run, placed: Placement, numbers: _Numbers) -> int:
    """Bytes that FSDP2 has whole for a time, at the moment at which it is more of them."""
    width, largest = _width(run), max(numbers.blocks.values())
    if placed.drops_blocks and placed.ranks["pipeline"] == 1:
        amid, end = 2 * largest, 0  # the block at work, and the next, fetched ahead of its time
    else:  # a pipeline's stages keep theirs for the next micro-batch
        amid = end = sum(numbers.blocks.values())
    # Amid the backward pass of blocks: the gradients of one, and what is sent of them.
    amid_bytes = width * amid + (width + WORD) * largest + WORD * numbers.outside
    end_bytes = width * end + WORD * TABLES * numbers.table
    kept = WORD * numbers.outside + max(amid_bytes, end_bytes)
    if placed.ranks["replicate"] > 1 and run.layout.zero > 1 and _has_several(run, placed):
        kept += WORD * sum(numbers.own)  # which copies of a sharded model add up at the end
    return kept


@contextmanager
def _stand_in(run: Run, world: int, rank: int) -> Iterator[Placement]:
    """The placement of one rank among others that are not there."""
    mine = World(rank, world, rank)
    if world == 1:
        yield Placement(run.layout, mine, None)
        return
    assert not dist.is_initialized(), "a plan is made outside of a world of processes"
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = parameter_mesh(run.layout.resolve(world), torch.device("cpu"))
        yield Placement(run.layout, mine, mesh)
    finally:
        dist.destroy_process_group()


def _gathered(parameter: Tensor) -> int:
    """Numbers of a parameter once FSDP2 has gathered it: whole, or a rank's part of a split one."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, parts = parameter.device_mesh, 1
    for axis, how in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if axis == "tensor" and not how.is_replicate():
            parts = mesh[axis].size()
    return -(-parameter.numel() // parts)


def _moment_bytes(count: int, optimizer: str) -> int:
    """Of the two moments of a tensor of `count` numbers."""
    if optimizer == "adamw8bit" and count >= FEWEST_IN_8_BITS and count % PER_SCALE == 0:
        return 2 * (count + WORD * count // PER_SCALE)
    return 2 * WORD * count
