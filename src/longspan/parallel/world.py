"""The processes of a run. Imports no torch, so that a run file can be checked before it loads."""

from __future__ import annotations

import os
from dataclasses import dataclass

from longspan.errors import UserError


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
    """The world that torchrun or `longspan train --nproc` set up; one process by default."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if found["RANK"] is None and found["WORLD_SIZE"] is None:
        return World()
    numbers = {}
    for name, text in found.items():
        if text is None or not text.isdecimal():
            raise UserError(
                f"the environment sets {name} to {text!r}; expected a number, as torchrun sets "
                "RANK, WORLD_SIZE and LOCAL_RANK together"
            )
        numbers[name] = int(text)
    return World(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])
