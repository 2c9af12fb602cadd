"""Recovery in process: a lost rank is replaced, and filled from a healthy peer.

With replicas, every shard of the training state lies on several ranks. When one of them is lost,
the launcher starts a process in its place and announces a new generation (`generation.py`). The
other ranks get an error in the collective that they are in, or in their next one. They leave the
training loop with their state in memory, give up the old process groups, build everything that
refers to them again, as at a start, and agree on the newest step that every shard is held of. Ranks
without it receive it from a replica. If there is none, all go back to the newest checkpoint.

Only collectives raise, and none runs while a step is applied, so a rank's state is always that of a
whole step. What the failed step has computed so far is thrown away.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.checkpoint import latest, step_of
from longspan.engines import NativeEngine
from longspan.errors import PeerLost
from longspan.generation import Generation
from longspan.parallel.mesh import MESH_AXES, ParallelMesh
from longspan.parallel.parameters import persistent_buffers
from longspan.parallel.world import World
from longspan.torch_internals import clear_sharding_cache
from longspan.training.meter import Meter
from longspan.training.out_of_memory import is_out_of_memory
from longspan.training.state import SavedState, TrainState, rng_states, set_rng_states
from longspan.wording import counted

POLL_S = 0.1
VERDICT_S = 5.0
"""How long a rank whose collective has failed waits to hear that another one was lost."""
PATIENCE_S = 1.0
"""How long a rank may take from an announcement to a collective that fails by itself, because a
connection to the lost rank or to one that knows of it is closed."""


@dataclass(frozen=True)
class Image:
    """The training state of a rank after a step, in memory."""

    header: dict[str, Any]
    """Its step, and all that is no tensor, as JSON values."""
    tensors: dict[str, Tensor]
    """This rank's shards by "group/name", as in a checkpoint."""

    @staticmethod
    def of(state: TrainState, meter: Meter) -> Image:
        assert isinstance(state.engine, NativeEngine)
        rng = {f"rng/{name}": x for name, x in rng_states().items()}
        header = {
            "step": state.step,
            "state": state.saved_state(),
            "skips": state.guard.skips(),
            "meter": meter.state(),
        }
        buffers = persistent_buffers(state.engine.model)
        own = {f"buffers/{name}": x for name, x in buffers.items()}
        return Image(header, {**state.engine.local_tensors(), **own, **rng})

    @property
    def step(self) -> int:
        return int(self.header["step"])

    def restore(self, state: TrainState) -> None:
        """Load it into a state of the same mesh coordinates, save for the replica."""
        saved = SavedState.model_validate_json(json.dumps(self.header["state"]))
        engine, tensors = state.engine, self.tensors
        entries = []
        for name in tensors:
            group, _, rest = name.partition("/")
            parameter, _, key = rest.rpartition(".")
            if group == "optimizer":
                entries.append((parameter, key, tensors[name].dim() == 0))
        engine.load_weights(lambda name, _: tensors[f"model/{name}"])
        engine.load_optimizer(entries, lambda name, _: tensors[f"optimizer/{name}"])
        for name, buffer in persistent_buffers(engine.model).items():
            buffer.copy_(tensors[f"buffers/{name}"])
        engine.load_scaler_state(saved.scaler)
        state.guard.load_norm_average(saved.norm_average)
        state.guard.load_skips(*self.header["skips"])
        rng = {name[4:]: x for name, x in tensors.items() if name.startswith("rng/")}
        set_rng_states(rng, Path("the state of a peer"))
        state.step = state.reported = self.step
        state.samples, state.skips = saved.samples, list(saved.skips)

    @staticmethod
    def broadcast(image: Image | None, source: int, group: dist.ProcessGroup) -> Image:
        """The image of rank `source`, on all ranks of a group."""
        is_source = dist.get_rank() == source
        assert image is not None or not is_source
        content = b""
        if is_source and image is not None:
            shapes = [(name, str(x.dtype), list(x.shape)) for name, x in image.tensors.items()]
            content = json.dumps([image.header, shapes]).encode()
        length = torch.tensor(len(content))
        dist.broadcast(length, source, group)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if is_source:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        dist.broadcast(data, source, group)
        header, shapes = json.loads(bytes(data.tolist()))
        tensors = {}
        for name, dtype, shape in shapes:
            if is_source and image is not None:
                x = image.tensors[name].contiguous()
            else:
                x = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            dist.broadcast(x, source, group)
            tensors[name] = x
        return Image(header, tensors)


@dataclass(frozen=True)
class Recovered:
    """What a recovery has done."""

    step: int
    lost: dict[int, int]
    """The ranks that were lost, and for each the rank that has filled its replacement."""
    lost_steps: int
    since: float
    """When the loss was noticed."""
    repeats_report: bool
    """Whether metrics, save and evaluation of `step` are still to be done."""
    has_lost_save: bool
    """Whether a checkpoint that was due is not on the disk."""
    meter: dict[str, Any]

    def __str__(self) -> str:
        filled = "; ".join(
            f"rank {lost} was replaced and filled from rank {source}"
            for lost, source in self.lost.items()
        )
        seconds = time.time() - self.since
        lost = counted(self.lost_steps, "step")
        return f"{filled} at step {self.step}, {lost} lost, in {seconds:.1f} s"

    def event(self) -> dict[str, Any]:
        """The fields of its line in the history."""
        seconds = time.time() - self.since
        filled = [[lost, source] for lost, source in self.lost.items()]
        return {"lost_steps": self.lost_steps, "filled": filled, "seconds": round(seconds, 3)}


class Recovery:
    """This rank's part in recoveries; does nothing if the launcher does not replace lost ranks."""

    def __init__(self, world: World) -> None:
        self._world, self._generation = world, Generation.of_environment()
        self._image: Image | None = None
        self._is_reported = True

    @contextmanager
    def watch(self, state: TrainState, meter: Meter) -> Iterator[None]:
        """Turn an error that comes from the loss of another rank into PeerLost."""
        if self._generation is None or not self._generation.replaces_lost:
            if self._generation is not None:
                self._generation.mark_ready(self._world.rank)
            yield
            return
        done, following = Event(), self._generation.next()
        thread = Thread(target=_close_when_announced, args=(following, done), daemon=True)
        thread.start()
        self._generation.mark_ready(self._world.rank)
        try:
            yield
        except RuntimeError as error:  # of gloo's
            if is_out_of_memory(error) or not _is_announced(following):
                raise
            close_connections()  # ranks that wait for this one learn of it
            if state.is_whole:
                self._image = Image.of(state, meter)
                self._is_reported = state.reported == state.step
            raise PeerLost from None
        finally:
            done.set()
            thread.join()

    def rejoin(self) -> None:
        """Leave the generation that has lost a rank for the next one."""
        if self._generation is None:
            return
        gc.collect()  # DDP and FSDP refer to process groups
        dist.destroy_process_group()
        clear_sharding_cache()
        gc.collect()
        self._generation = self._generation.next()
        os.environ.update(self._generation.environment())

    def fill(self, state: TrainState, folder: Path, every: int, steps: int) -> Recovered | None:
        """Load the newest step that the ranks hold together into `state`; None if there is none.

        `folder`: of the checkpoints, which are due at `every` so many steps, and after `steps`.
        """
        if self._generation is None or self._generation.number == 0:
            return None
        mesh, image, self._image = state.mesh, self._image, None
        held = -1 if image is None else image.step
        newest = latest(folder) if self._world.is_main else None
        saved = 0 if newest is None else step_of(newest) or 0
        all_held, reported, on_disk = _all_gather(mesh, held, int(self._is_reported), saved)
        self._is_reported = True
        assert mesh.device_mesh is not None
        axis = MESH_AXES.index("replicate")
        replicas = mesh.device_mesh.mesh.movedim(axis, -1).flatten(0, -2).tolist()
        step, sources = agree(replicas, all_held)
        if step is None:
            return None
        source = sources[self._world.rank]
        group = mesh.device_mesh.get_group("replicate")
        if any(all_held[rank] != step for rank in dist.get_process_group_ranks(group)):
            image = Image.broadcast(image, source, group)
        assert image is not None
        image.restore(state)
        holders = [rank for rank, held in enumerate(all_held) if held == step]
        due = step if step >= steps else step - step % every if every else 0
        announced = self._generation.announced()
        assert announced is not None
        return Recovered(
            step,
            {rank: sources[rank] for rank in announced["lost"]},
            max(all_held) - step,
            announced["time"],
            not all(reported[rank] for rank in holders),
            due > max(on_disk),
            image.header["meter"],
        )


def agree(
    replicas: Sequence[Sequence[int]], held: Sequence[int]
) -> tuple[int | None, dict[int, int]]:
    """The newest step that every shard is held of, and for each rank the one to take it from.

    `replicas`: for each shard, the ranks that hold it; `held`: the step whose state each rank has,
    -1 for none.
    """
    common = set.intersection(*({held[rank] for rank in ranks} for ranks in replicas)) - {-1}
    if not common:
        return None, {}
    step = max(common)
    sources: dict[int, int] = {}
    for ranks in replicas:
        source = next(rank for rank in ranks if held[rank] == step)
        sources |= dict.fromkeys(ranks, source)
    return step, sources


def _all_gather(mesh: ParallelMesh, *values: int) -> list[list[int]]:
    """For each value, those of all ranks."""
    table = [torch.zeros(len(values), dtype=torch.int64) for _ in range(mesh.world.size)]
    dist.all_gather(table, torch.tensor(values, dtype=torch.int64))
    return [[int(row[i]) for row in table] for i in range(len(values))]


def _is_announced(generation: Generation) -> bool:
    """Whether a generation is announced, at once or soon."""
    deadline = time.monotonic() + VERDICT_S
    while generation.announced() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _close_when_announced(generation: Generation, done: Event) -> None:
    """Close this process's connections some time after the loss of a rank was announced.

    A collective may wait for a rank that has no connection to the lost one.
    """
    while not done.wait(POLL_S):
        if generation.announced() is not None:
            if not done.wait(PATIENCE_S):
                close_connections()
            return


def close_connections() -> None:
    """Shut down this process's TCP connections within this machine, so that collectives fail.

    Gloo offers no way to do so: `abort` of a process group leaves a collective that waits as it is,
    and its connections stay open while DDP, FSDP or a device mesh refer to the group.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # it is not connected, or was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getsockname()[0] == connection.getpeername()[0]:
                    connection.shutdown(socket.SHUT_RDWR)
