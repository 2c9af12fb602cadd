"""The launcher of this process, from its environment; variables of others become torchrun's.

Open MPI, MPICH and its relatives, and Slurm's srun each tell a process its rank by names of their
own. Kubernetes gives the pods of an Indexed Job an index. torchrun, `deepspeed` and `accelerate
launch` set RANK and WORLD_SIZE, and so may anyone. Imports no torch.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from longspan.errors import UserError
from longspan.faults import LAUNCHER_PID
from longspan.loopback import STORE, loopback_only
from longspan.progress import stderr_console
from longspan.wording import counted

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports among which the job's number chooses one: below those that Linux gives to clients."""

ADOPTED = "LONGSPAN_LAUNCHER"
"""Set with the variables that were translated: the launcher's name."""


@dataclass(frozen=True)
class Launcher:
    """Where a launcher writes the rank, the number of processes and the same within a machine."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    job: tuple[str, ...] = ()
    """What identifies the job, as long as it runs."""
    hosts: str = ""
    """The machines of the job, in Slurm's notation."""


LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",  # of a step: a batch script alone is one process
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        "SLURM_STEP_NODELIST",
    ),
    Launcher(
        "MPICH's mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_JOBID", "HYDI_CONTROL_FD"),
    ),
    Launcher("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", "WORLD_SIZE"),
)


SIGNS = {
    "accelerate launch": ("ACCELERATE_MIXED_PRECISION",),  # through torchrun
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "deepspeed": ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"),
}
"""Launchers that set RANK, and what else each sets."""


def adopt_launcher(environment: MutableMapping[str, str]) -> str | None:
    """Set torchrun's variables from those of another launcher; rank 0 says once what was found.

    Returns the launcher's name if its variables were translated. None, and nothing is set, if there
    is no launcher or it has started one process, and where RANK is set: torchrun may itself be
    started by srun or mpirun.
    """
    if "RANK" in environment:
        _say_who_set_rank(environment)
        return None
    if environment.get("ACCELERATE_USE_CPU") == "True" and "MASTER_ADDR" in environment:
        _say(
            "accelerate launch --cpu starts one process, whatever --num_processes says: for more "
            "processes on CPUs give --multi_gpu in place of --cpu"
        )
    for launcher in LAUNCHERS:
        if launcher.rank in environment and launcher.size in environment:
            break
    else:
        return None
    rank, size = (_number(environment, name) for name in (launcher.rank, launcher.size))
    if size == 1:  # as in an interactive shell of srun
        return None
    environment["RANK"], environment["WORLD_SIZE"] = str(rank), str(size)
    environment[ADOPTED] = launcher.name
    local_rank, local_size = launcher.local_rank, launcher.local_size
    environment["LOCAL_RANK"] = environment.get(local_rank, "0") if local_rank else "0"
    if here := re.match(r"\d+", environment.get(local_size, "")):  # Slurm writes 2(x3),1
        environment.setdefault("LOCAL_WORLD_SIZE", here[0])
    if not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        _meet(environment, launcher, size)
    if rank == 0:
        _say(f"{launcher.name} has started {size} processes, which meet {_place(environment)}")
    return launcher.name


def _say_who_set_rank(environment: Mapping[str, str]) -> None:
    """Name the launcher that has set RANK, on rank 0: not ours, nor one that was named before."""
    size = environment.get("WORLD_SIZE", "")
    is_known = LAUNCHER_PID in environment or ADOPTED in environment
    if environment["RANK"] != "0" or is_known or not size.isdecimal():
        return
    signs = (name for name, names in SIGNS.items() if all(map(environment.get, names)))
    processes = counted(int(size), "process")
    meets = f", which meet {_place(environment)}" if int(size) > 1 else ""
    if name := next(signs, ""):
        _say(f"{name} has started {processes}{meets}")
    else:
        _say(f"RANK and WORLD_SIZE are set: this is rank 0 of {processes}{meets}")


def _place(environment: Mapping[str, str]) -> str:
    """Where the processes meet, in words."""
    if STORE in environment:
        return "through a file on this machine"
    return f"at {environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"


@cache
def _say(text: str) -> None:
    """Print a line to stderr, once in this process."""
    stderr_console().print(text, markup=False)


def _meet(environment: MutableMapping[str, str], launcher: Launcher, size: int) -> None:
    """Decide where the processes meet: through a file on one machine, at the first of several."""
    job = "-".join(environment.get(name, "") for name in launcher.job)
    if job and environment.get("LOCAL_WORLD_SIZE") == str(size):
        environment[STORE] = str(_private_folder() / re.sub(r"[^\w.@-]", "_", job))
        loopback_only(environment)
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", "0")
        return
    host = environment.get("MASTER_ADDR") or first_host(environment.get(launcher.hosts, ""))
    if not host:
        raise UserError(
            f"{launcher.name} has started {size} processes, and does not say where they meet: set "
            "MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there"
        )
    environment["MASTER_ADDR"] = host
    number = sum(int(digits) for digits in re.findall(r"\d{1,9}", job))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + number % PORTS))


def _private_folder() -> Path:
    """A folder of this user's: in a file of another's, processes could be led elsewhere."""
    folder = Path(tempfile.gettempdir()) / f"longspan-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder} must be a folder that only you can use: remove it")
    return folder


def first_host(hosts: str) -> str:
    """The first of several machines in Slurm's notation: "gpu[03-05,9],login" is gpu03."""
    found = re.match(r"([\w.-]+)(?:\[(\w+)[^\]]*\]([\w.-]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise UserError(f"the environment sets {name} to {text!r}; expected a number")
    return int(text)
