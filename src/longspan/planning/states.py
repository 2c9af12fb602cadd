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
from longspan.nn import SKLinear
from longspan.parallel.placement import Placement, local, parameter_mesh
from longspan.parallel.world import World

WORD = 4
"""Bytes of a parameter, of its gradient and of each of its two moments."""
FEWEST_IN_8_BITS, PER_SCALE = 4096, 256
"""Of torchao's 8-bit moments: smaller tensors stay in 32 bits, and so many share a scale."""


@dataclass(frozen=True)
class States:
    """Bytes on a rank, in the middle of the backward pass, where they are most."""

    parameters: int
    """This rank's own."""
    gradients: int
    optimizer: int
    gathered: int
    """Parameters of other ranks, and whole gradients on their way to them."""
    copies: int
    """16-bit copies of weights, which autocast keeps where they are not sharded."""
    signs: int
    """Of sketched layers, a bit each; no axis but `tensor` and `pipeline` splits them."""
    offloaded: int = 0
    """Bytes of these that wait in the CPU's memory."""

    @property
    def on_device(self) -> int:
        held = self.parameters + self.gradients + self.optimizer
        return held + self.gathered + self.copies + self.signs - self.offloaded


def states_of(run: Run, world: int) -> list[States]:
    """Of each rank of the pipeline axis, where `world` processes train `run` with PyTorch itself.

    The ranks beside it on other axes have as much. `run.train.precision` is taken as it stands.
    """
    stages = run.layout.resolve(world)["pipeline"]
    return [_states(run, world, stage * world // stages) for stage in range(stages)]


@dataclass
class _Numbers:
    """How many numbers a rank has of parameters, and how many these are when gathered."""

    is_tied: bool
    own: list[int] = field(default_factory=list)
    cast: int = 0
    """Of weights of dense layers, which autocast has a copy of."""
    outside: int = 0
    blocks: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, parameter: Tensor) -> None:
        gathered = _gathered(parameter)
        self.own.append(local(parameter).numel())
        is_weight = parameter.dim() > 1 and name.endswith(".weight")
        if is_weight and (self.is_tied or name != "embedding.weight"):
            self.cast += gathered
        if name.startswith("blocks."):
            block = name.split(".")[1]
            self.blocks[block] = self.blocks.get(block, 0) + gathered
        else:
            self.outside += gathered

    @property
    def whole(self) -> int:
        return self.outside + sum(self.blocks.values())


def _states(run: Run, world: int, rank: int) -> States:
    model, numbers = new_decoder(run), _Numbers(run.model.tied)
    with _stand_in(run, world, rank) as placed:
        placed.arrange(model, run)
        for name, parameter in placed.named_parameters(model):
            numbers.add(name, parameter)
    in_16_bits = run.train.precision in ("bf16", "fp16")
    own, width = sum(numbers.own), 2 if in_16_bits else WORD
    gradients, gathered, copies = own, 0, 0
    if placed.is_sharded:
        largest = max(numbers.blocks.values())
        # Of stage 3 the block at work and the next one, which is fetched ahead of its time.
        at_once = 2 * largest if run.layout.zero == 3 else sum(numbers.blocks.values())
        on_the_way = largest * (width + WORD)  # a block's gradients, and what is sent of them
        gathered = 2 * WORD * numbers.outside + width * at_once + on_the_way
        if _reduces_once(run, placed):
            gradients = numbers.whole
    elif in_16_bits:
        copies = width * numbers.cast
    moments = sum(_moment_bytes(n, run.train.optimizer) for n in numbers.own)
    kept = WORD * own, WORD * gradients, moments
    signs = (x for m in model.modules() if isinstance(m, SKLinear) for x in m.buffers())
    return States(
        *kept,
        gathered=gathered,
        copies=copies,
        signs=sum(x.nbytes for x in signs),
        offloaded=sum(kept) if run.layout.offload else 0,
    )


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


def _reduces_once(run: Run, placed: Placement) -> bool:
    """Whether whole gradients of several micro-batches are added up before ranks share them."""
    at_once = run.train.micro_batch * placed.data_ranks
    several = run.train.global_batch > at_once
    return several and (run.layout.zero <= 1 or placed.ranks["pipeline"] > 1)


def _moment_bytes(count: int, optimizer: str) -> int:
    """Of the two moments of a tensor of `count` numbers."""
    if optimizer == "adamw8bit" and count >= FEWEST_IN_8_BITS and count % PER_SCALE == 0:
        return 2 * (count + WORD * count // PER_SCALE)
    return 2 * WORD * count
