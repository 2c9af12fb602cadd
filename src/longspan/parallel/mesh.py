"""The mesh of a run's processes: how many ranks each axis has, and where this rank stands in it."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from longspan.checks import backend_problem
from longspan.config import Layout
from longspan.errors import UserError
from longspan.loopback import STORE, loopback_only
from longspan.parallel.flight_recorder import record_collectives
from longspan.parallel.world import World

MESH_AXES = ("pipeline", "replicate", "shard", "tensor")
"""From the ranks that communicate least to those that communicate most, which are neighbours."""
T = TypeVar("T")
_meshes = itertools.count()


class ParallelMesh:
    """The mesh as one rank sees it.

    One process has no process group, except with `layout.offload`: FSDP2 needs one.
    """

    def __init__(
        self,
        layout: Layout,
        world: World,
        device_mesh: DeviceMesh | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`sequence_group`: the ranks that split this rank's sequences. They shard parameters too,
        so the `shard` axis of `device_mesh` includes them.
        """
        self.world, self.zero, self.offload = world, layout.zero, layout.offload
        self.ranks = layout.resolve(world.size)
        self.device_mesh, self.sequence_group = device_mesh, sequence_group

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The one-dimensional submesh of an axis."""
        assert self.device_mesh is not None
        return self.device_mesh[axis]

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples (the data-parallel size)."""
        return self.ranks["replicate"] * self.ranks["shard"]

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which DDP and FSDP average gradients."""
        return self.data_ranks * self.ranks["sequence"]

    @property
    def is_ddp(self) -> bool:
        """Whether every rank holds the whole model, so that DDP replicates it."""
        return 1 < self.world.size == self.ranks["replicate"]

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards parameters, or with `layout.offload` brings them from the CPU."""
        return (self.gradient_ranks > 1 or self.offload) and not self.is_ddp

    @property
    def reshards_after_forward(self) -> bool:
        """Whether FSDP2 frees a block's gathered parameters after its forward pass (ZeRO-3)."""
        can_reshard = self.offload or self.ranks["shard"] * self.ranks["sequence"] > 1
        return self.zero == 3 and can_reshard

    def local_samples(self, samples: Sequence[T]) -> Sequence[T]:
        """This rank's share of samples, whose number is a multiple of the data-parallel size."""
        if self.device_mesh is None:
            return samples
        share, rest = divmod(len(samples), self.data_ranks)
        assert rest == 0, f"{len(samples)} samples cannot be split over {self.data_ranks} ranks"
        replica = self.device_mesh.get_local_rank("replicate")
        shard = self.device_mesh.get_local_rank("shard") // self.ranks["sequence"]
        first = (replica * self.ranks["shard"] + shard) * share
        return samples[first : first + share]

    def saves(self, x: Tensor) -> bool:
        """Whether this rank is the one, of those that hold the same shard of `x`, that saves it."""
        if self.device_mesh is None:
            return True
        sharded = set()
        if isinstance(x, DTensor):
            axes = zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)
            sharded = {axis for axis, placement in axes if not placement.is_replicate()}
        replicated = set(MESH_AXES) - sharded - {"pipeline"}
        return not any(self.device_mesh.get_local_rank(axis) for axis in replicated)


def init_parameter_mesh(ranks: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """The mesh that parameters are sharded over; its `shard` axis includes the sequence ranks."""
    sizes = {**ranks, "shard": ranks["shard"] * ranks["sequence"]}
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    return init_device_mesh(device.type, shape, mesh_dim_names=MESH_AXES)


def device_type_of(group: dist.ProcessGroup | None = None) -> str:
    """The devices of a group's ranks: "cuda" if NCCL connects them, else "cpu"."""
    return "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"


def choose_backend(layout: Layout, world: int, device: torch.device) -> str:
    """The backend of a process group of `world` ranks with devices such as `device`."""
    wanted = layout.backend
    if problem := backend_problem(wanted, device.type, layout.resolve(world)):
        raise UserError(f"layout.backend = {problem}")
    if wanted in ("gloo", "mpi"):
        backend: str = wanted
    else:  # ranks agree on values in CPU memory, which NCCL cannot send
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    built = {
        "nccl": dist.is_nccl_available,
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
    }
    for name, is_available in built.items():
        if name in backend and not is_available():
            change = (
                'use "auto", or build PyTorch from source with MPI installed'
                if name == "mpi"
                else "install another build of PyTorch"
            )
            raise UserError(
                f'layout.backend = "{wanted}" needs {name.upper()}, but PyTorch '
                f"{torch.__version__} was built without it: {change}"
            )
    return backend


def init_lone_process_group(backend: str) -> None:
    """Initialise the process group of a single process, which no other can reach."""
    loopback_only(os.environ)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _backends_of_group() -> list[str]:
    return sorted(set(re.findall(r"\w+:(\w+)", dist.get_backend_config())))


def _check_same_on_all(layout: Layout, world: World) -> None:
    """Refuse a layout that other ranks did not find as well: their devices must differ.

    The reason names the micro-batch and the activation checkpointing that were taken with it.
    """
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (layout.model_dump(), layout.why_auto))
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        raise UserError(
            f'layout = "auto" gave rank 0 {found[0]} and rank {other} {found[other]}, since their '
            "devices differ: set the axes of [layout]"
        )


@contextmanager
def open_mesh(
    layout: Layout, world: World, device: torch.device, timeout_s: float = 600.0
) -> Iterator[ParallelMesh]:
    """Join the other processes for as long as this context is entered.

    A collective times out a minute after `timeout_s`, when the watchdog has had its say.
    """
    if world.size == 1 and not layout.offload:
        yield ParallelMesh(layout, world)
        return
    backend = choose_backend(layout, world.size, device)
    was_initialized = dist.is_initialized()
    if was_initialized and layout.backend not in ("auto", *_backends_of_group()):
        raise UserError(
            f'layout.backend = "{layout.backend}" needs a process group of that backend, but this '
            f'process has one of {", ".join(_backends_of_group())}: set "auto"'
        )
    if not was_initialized:
        record_collectives()
        timeout = timedelta(seconds=timeout_s + 60)
        if world.size == 1:
            init_lone_process_group(backend)
        elif backend == "mpi":  # which numbers the ranks by itself
            dist.init_process_group(backend, timeout=timeout)
            found = World(dist.get_rank(), dist.get_world_size(), world.local_rank)
            if found != world:
                raise UserError(
                    f"the environment says rank {world.rank} of {world.size}, but MPI says "
                    f"{found.rank} of {found.size}: start the processes with mpirun alone"
                )
        elif file := os.environ.get(STORE):
            # Torch's TCP store would listen on all interfaces, for anyone; this is a file of ours.
            store = dist.FileStore(file, world.size)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
            )
        else:
            if missing := {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
                raise UserError(
                    f"{world.size} processes need to know where they meet, but "
                    f"{' and '.join(sorted(missing))} is not set: set MASTER_ADDR to the host of "
                    "rank 0, and MASTER_PORT to a free port there"
                )
            # Each time under another prefix: the store of torchrun outlives a run, and would give
            # the next one in this process the addresses of the last.
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            prefix = f"longspan-{next(_meshes)}"
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(prefix, store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
    ranks = layout.resolve(world.size)
    if layout.why_auto:
        _check_same_on_all(layout, world)
    device_mesh = init_parameter_mesh(ranks, device)
    sequence_group = None
    if ranks["sequence"] > 1:
        inner = ranks["sequence"], ranks["tensor"]
        sequence_mesh = init_device_mesh(
            device.type,
            (world.size // math.prod(inner), *inner),
            mesh_dim_names=("outer", "sequence", "tensor"),
        )
        sequence_group = sequence_mesh.get_group("sequence")
    yield ParallelMesh(layout, world, device_mesh, sequence_group)
    if not was_initialized:
        dist.barrier()  # a rank that leaves first would break the others' collectives
        dist.destroy_process_group()
