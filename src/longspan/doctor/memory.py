"""Whether a machine has the memory for the model and the optimizer of its ranks, on CPUs.

A GPU that is too small reports it; without this check a step on CPUs would take the memory of the
whole machine, until Linux kills one of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from longspan.config import Run
from longspan.doctor.finding import Finding
from longspan.planning import memory_per_rank
from longspan.wording import counted, size_text

MEMINFO, LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def check_memory(run: Run, world: int, here: int) -> Iterator[Finding]:
    """Compare what `here` of `world` processes need with what is available.

    `run.train` is resolved.
    """
    is_planned = not run.model.factory and run.engine.name == "native"
    free = available_memory()
    if run.train.device != "cpu" or not is_planned or free is None:
        return
    each = max(memory.on_device + memory.offloaded for memory in memory_per_rank(run, world))
    seen = f"{size_text(free)} available, {size_text(here * each)} needed by the tensors "
    seen += f"of {counted(here, 'process')}"
    if here * each <= free:
        yield Finding("memory", "ok", seen)
        return
    yield Finding(
        "memory",
        "error",
        seen,
        "train on GPUs, shard over more machines (layout.shard) or choose a smaller model; "
        "`longspan plan` lists what needs how much",
    )


def available_memory(meminfo: Path = MEMINFO, limit: Path = LIMIT) -> int | None:
    """Bytes that processes can still allocate: of the machine, or of this container if less."""
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return None
    if not found:
        return None
    free = 1024 * int(found[1])
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(free, int(text)) if text.isdecimal() else free
