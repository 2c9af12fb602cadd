"""Ranks pinned to cores: each runs on its own, as many as every other.

Only for measurements: a run that has the machine to itself is placed well by the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

CORES = "LONGSPAN_CORES"
"""Set in the environment of ranks that are pinned: cores per rank, and all cores ("2:0,1,4,5")."""
CAN_PIN = hasattr(os, "sched_setaffinity")


def available_cores(cpus: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One CPU of each physical core that this process may use.

    Two hyperthreads of a core share it: with them two ranks would be slower than one rank alone.
    """
    if not CAN_PIN:
        return list(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings.strip(), cpu)
    return list(cores.values())


def pinned_environment(cores: Sequence[int], per_rank: int) -> dict[str, str]:
    """The variables by which the ranks of a run pin themselves and their threads."""
    return {
        CORES: f"{per_rank}:{','.join(map(str, cores))}",
        "OMP_NUM_THREADS": str(per_rank),
        "MKL_NUM_THREADS": str(per_rank),
    }


def cores_of_rank(environment: Mapping[str, str]) -> set[int]:
    """The cores of this rank; several ranks share cores if there are too few."""
    number, _, listed = environment[CORES].partition(":")
    cores, per_rank = [int(core) for core in listed.split(",")], int(number)
    first = int(environment["LOCAL_RANK"]) * per_rank
    return {cores[(first + n) % len(cores)] for n in range(per_rank)}


def pin_rank() -> None:
    """Pin this process, if it is to be: before torch starts threads, which inherit it."""
    if CORES in os.environ and "LOCAL_RANK" in os.environ and CAN_PIN:
        os.sched_setaffinity(0, cores_of_rank(os.environ))
