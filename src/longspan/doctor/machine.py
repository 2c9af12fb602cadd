"""Limits of a machine: shared memory, open files, processes, locked memory. Imports no torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from longspan.doctor.finding import Finding, Status
from longspan.wording import size_text

SHM = Path("/dev/shm")
SHM_PER_RANK = 64 << 20
"""What NCCL's buffers and the queues of a DataLoader's workers may take, at least."""
FILES, FILES_PER_RANK = 512, 16
"""Open files of a process without ranks, and sockets per other rank over all groups and threads."""
PROCESSES = 4096
"""Processes and threads of the user, of which a rank with its libraries has some hundred."""


def check_shared_memory(ranks: int, *, on_gpu: bool, shm: Path = SHM) -> Iterator[Finding]:
    """Whether `ranks` processes of this machine have shared memory. `shm`: where it is mounted.

    NCCL does not start without it; gloo does, and then only a DataLoader of yours may need it.
    """
    if not shm.is_dir():
        yield Finding("shared memory", "ok", f"there is no {shm}")
        return
    found = os.statvfs(shm)
    free, needed = found.f_bavail * found.f_frsize, SHM_PER_RANK * ranks
    seen = f"{size_text(free)} free in {shm}"
    if free >= needed:
        yield Finding("shared memory", "ok", seen)
        return
    status: Status = "error" if ranks > 1 and on_gpu else "warning"
    yield Finding(
        "shared memory",
        status,
        f"{seen}, {size_text(needed)} expected for {ranks} processes",
        "docker run --shm-size=8g (or --ipc=host); on Kubernetes an emptyDir of medium Memory at "
        f"/dev/shm; otherwise remove what fills {shm}",
    )


def check_limits(world: int, infiniband: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """Whether the limits of `ulimit` suffice for `world` ranks."""
    needed = FILES + FILES_PER_RANK * world
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_limit(soft)} open files (hard limit {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < needed:
        is_hard = hard != resource.RLIM_INFINITY and hard < needed
        how = (
            f"raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE= of systemd, "
            f"docker run --ulimit nofile={needed}"
            if is_hard
            else f"ulimit -n {needed} before the start"
        )
        text = f"{seen}; {world} ranks need about {needed:,}"
        yield Finding("open files", "error", text, how)
    else:
        yield Finding("open files", "ok", seen)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < PROCESSES:
        yield Finding(
            "processes",
            "warning",
            f"{soft:,} processes and threads of this user",
            f"ulimit -u {PROCESSES} or more: threads of PyTorch, NCCL and the data count too",
        )
    else:
        yield Finding("processes", "ok", f"{_limit(soft)} processes and threads of this user")
    if not infiniband.is_dir() or not any(infiniband.iterdir()):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = ", ".join(sorted(path.name for path in infiniband.iterdir()))
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            "locked memory",
            "error",
            f"{size_text(soft)}, and there is InfiniBand ({adapters})",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: PropagateResourceLimits): "
            "NCCL registers its buffers with the adapter",
        )
    else:
        yield Finding("locked memory", "ok", f"unlimited; InfiniBand {adapters}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
