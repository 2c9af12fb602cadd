"""What just fits: the largest context, the largest micro-batch, the fewest devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import Device
from longspan.planning.search import Candidate, candidate_of, search

MAX_CONTEXT, MAX_DEVICES, MAX_MICRO_BATCH = 1 << 30, 1 << 14, 1 << 12
DIGITS = 3
"""A context is found to so many binary digits."""
T = TypeVar("T")


def largest_context(
    load: Callable[[int], Run], start: int, gpus: int, device: Device
) -> Candidate | None:
    """The fastest way to train with the longest context that fits; None if none does.

    `load` gives the run with another context. Tried are multiples of a power of two.
    """

    def best(context: int) -> Candidate | None:
        try:
            found = search(load(context), gpus, device, shown=1)
        except UserError:  # such as more recall pairs than it has tokens
            return None
        return found.best if found.ranked else None

    power = 1 << (start.bit_length() - 1)
    low, fitting = _double(best, power, MAX_CONTEXT)
    if fitting is None:
        while fitting is None and power > 1:
            power //= 2
            low, fitting = power, best(power)
        if fitting is None:
            return None
    step = low // 2
    for _ in range(DIGITS - 1):
        if step and low + step <= MAX_CONTEXT and (found := best(low + step)):
            low, fitting = low + step, found
        step //= 2
    return fitting


def largest_micro_batch(run: Run, gpus: int, device: Device) -> Candidate | None:
    """The run with the largest micro-batch that fits, and the smallest global batch for it."""
    ranks = run.layout.resolve(gpus)
    per_size = ranks["replicate"] * ranks["shard"] * ranks["pipeline"]

    def fits(size: int) -> Candidate | None:
        update = {"micro_batch": size, "global_batch": size * per_size}
        candidate = candidate_of(
            run.model_copy(update={"train": run.train.model_copy(update=update)}), gpus, device
        )
        return candidate if candidate.fits else None

    low, fitting = _double(fits, 1, MAX_MICRO_BATCH)
    step = low // 2
    while fitting is not None and step:
        if found := fits(low + step):
            low, fitting = low + step, found
        step //= 2
    return fitting


def fewest_devices(run: Run, device: Device) -> Candidate | None:
    """The fastest way to train on the fewest devices, of 1, 2, 4 and so on."""
    count = 1
    while count <= MAX_DEVICES:
        if (found := search(run, count, device, shown=1)).ranked:
            return found.best
        count *= 2
    return None


def _double(fits: Callable[[int], T | None], start: int, most: int) -> tuple[int, T | None]:
    """The last of start, 2 · start, … that fits, and what it gives."""
    low, fitting = start, fits(start)
    while fitting is not None and 2 * low <= most:
        found = fits(2 * low)
        if found is None:
            break
        low, fitting = 2 * low, found
    return low, fitting
