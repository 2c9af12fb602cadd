"""The processes of a run. Imports no torch, so that a run file can be checked before it loads."""

from __future__ import annotations

import os
from dataclasses import dataclass

from longspan.errors import UserError
from longspan.parallel.launchers import adopt_launcher


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and prints to the console."""
        return self.rank == 0


def world_of_environment() -> World:
    """The world that a launcher has set up; one process by default.

    torchrun and `longspan train --nproc` set RANK, WORLD_SIZE and LOCAL_RANK; operators of
    Kubernetes leave out LOCAL_RANK, and start one process per pod. `launchers` has the others.
    """
    adopt_launcher(os.environ)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World()
    numbers = []
    for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", "0")):
        text = os.environ.get(name, default)
        if text is None or not text.isdecimal():
            raise UserError(
                f"the environment sets {name} to {text!r}; expected a number, as torchrun sets "
                "RANK, WORLD_SIZE and LOCAL_RANK together"
            )
        numbers.append(int(text))
    rank, size, local_rank = numbers
    if rank >= size:
        raise UserError(
            f"the environment sets RANK to {rank}; expected less than WORLD_SIZE, {size}"
        )
    return World(rank, size, local_rank)
