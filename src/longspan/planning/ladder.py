"""The ladder: what each change of a run saves of a device's memory, and what it costs.

`longspan plan` shows it where a run does not fit; the out-of-memory report of training has the same
settings and the same numbers.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.config import Run
from longspan.hardware import Device
from longspan.planning.chunks import chunk_sizes
from longspan.planning.memory import needed_by
from longspan.planning.run_time import predict
from longspan.planning.savings import (
    Savings,
    is_allowed,
    may_chunk,
    next_tile,
    with_train,
)
from longspan.planning.search import TRAIN_KEYS, Candidate, settings_of, with_memory

GIB = 2**30
GAIN = 1.005
"""Of two predictions, what is less than so much faster is not."""
Change = Callable[[Run], Run]


@dataclass(frozen=True)
class Rung:
    """One change, by itself."""

    setting: str
    cost: str
    gpus: int
    """That the changed run has."""
    run: Run | None
    """The changed run; None if it is not one that can be planned."""

    def needed(self) -> int | None:
        """Bytes that the fullest device must have; None if that is unknown."""
        return None if self.run is None else needed_by(self.run, self.gpus)


@dataclass(frozen=True)
class Combination:
    """Changes that fit together."""

    settings: list[str]
    needed: int
    """Bytes that the fullest device must have."""
    offloaded: int
    """Bytes that each process must have in CPU memory."""
    speed: float
    """Tokens/s of a device as a fraction of those without the changes."""

    def __str__(self) -> str:
        gib = f"{self.needed / GIB:,.1f} GiB"
        if self.offloaded:
            gib += f" and {self.offloaded / GIB:,.1f} in CPU memory"
        return f"the fastest that fits ({gib}, {self.speed - 1:+.0%}): {' '.join(self.settings)}"


@dataclass(frozen=True)
class Ladder:
    """What would make a run fit a device."""

    needed: int
    """Bytes that the fullest device must have."""
    limit: int
    """Bytes that it has."""
    rungs: list[dict[str, Any]]
    """Of each change: the setting, the cost in words, bytes needed and saved, and the predicted
    tokens/s of a device as a fraction of those without it."""
    together: Combination | None
    """The fastest that fits the same devices; None if none does. What rounds otherwise, or waits in
    CPU memory, is changed only where nothing else fits."""

    def __str__(self) -> str:
        lines = [
            f"does not fit: the fullest device must have {self.needed / GIB:,.1f} GiB, and it has "
            f"{self.limit / GIB:,.1f}; each change by itself:",
            f"  {'':<40}{'GiB':>9}{'saves':>9}{'tokens/s':>10}  costs",
        ]
        for rung in self.rungs:
            speed = f"{rung['speed'] - 1:+.0%}"
            fits = ", fits" if rung["needed"] <= self.limit else ""
            lines.append(
                f"  {rung['setting']:<40}{rung['needed'] / GIB:>9,.1f}{rung['saves'] / GIB:>9,.1f}"
                f"{speed:>10}  {rung['cost']}{fits}"
            )
        lines.append(f"  {self.together or 'together on these devices: not enough'}")
        return "\n".join(lines)


def ladder(run: Run, gpus: int, device: Device, limit: int) -> Ladder | None:
    """The ladder of a run that needs more than `limit` bytes of a device; None if it fits."""
    needed = needed_by(run, gpus)
    if needed <= limit:
        return None
    now, rows = predict(run, gpus, device).tokens_per_s, []
    for rung in rungs(run, gpus):
        if rung.run is None:
            continue
        size = needed_by(rung.run, rung.gpus)
        speed = predict(rung.run, rung.gpus, device).tokens_per_s / rung.gpus / (now / gpus)
        rows.append(
            {
                "setting": rung.setting,
                "cost": rung.cost,
                "needed": size,
                "saves": needed - size,
                "speed": speed,
            }
        )
    together = None
    if (found := fastest_that_fits(run, gpus, device, limit)) is not None:
        changes, speed = _changes_between(run, found.run), found.time.tokens_per_s / now
        together = Combination(changes, found.needed, found.offloaded, speed)
    return Ladder(needed, limit, rows, together)


def faster_roundings(run: Run, gpus: int, device: Device) -> list[dict[str, Any]]:
    """What rounds otherwise and is predicted to be faster, each by itself: as rungs of a ladder."""
    needed, now = needed_by(run, gpus), predict(run, gpus, device).tokens_per_s
    options = {"residual_precision": "bf16"}, {"fp8": True}
    found = []
    for update in options if device.peak("fp8") else options[:1]:
        changed = with_train(run, **update)
        if changed.train == run.train or not is_allowed(changed, gpus):
            continue
        speed = predict(changed, gpus, device).tokens_per_s / now
        if speed >= GAIN:
            setting, size = _changes_between(run, changed)[0], needed_by(changed, gpus)
            found.append(
                {"setting": setting, "needed": size, "saves": needed - size, "speed": speed}
            )
    return found


def fastest_that_fits(run: Run, gpus: int, device: Device, limit: int) -> Candidate | None:
    """The run in its layout with what makes it fit, None if nothing does.

    First what computes the same, then what rounds otherwise, then offload to CPU.
    """
    exact = list(_smaller_micro_batches(run))
    rounded = list(_rounded(exact, gpus))
    offloaded = [_set("layout", offload=True)(x) for x in rounded]
    savings = Savings(gpus, others=True)
    offloading = replace(savings, offloads=True)
    for starts, steps in (
        (exact, savings),
        (rounded, savings),
        (rounded, offloading),
        (offloaded, offloading),
    ):
        allowed = [x for x in starts if is_allowed(x, gpus)]
        if (found := _fastest_after(allowed, steps, device, limit)) is not None:
            return found
    return None


def _smaller_micro_batches(run: Run) -> Iterator[Run]:
    yield run
    while run.train.micro_batch > 1:
        run = with_train(run, micro_batch=halved(run.train.micro_batch))
        yield run


def _rounded(runs: list[Run], gpus: int) -> Iterator[Run]:
    """With a residual stream in bf16, with 8-bit moments, and with both."""
    options: list[dict[str, Any]] = [{}]
    options += [{**x, "residual_precision": "bf16"} for x in options]
    if runs[0].train.optimizer == "adamw":
        options += [{**x, "optimizer": "adamw8bit"} for x in options]
    for run, update in itertools.product(runs, options):
        if is_allowed(changed := with_train(run, **update), gpus):
            yield changed


def _fastest_after(
    starts: list[Run], savings: Savings, device: Device, limit: int
) -> Candidate | None:
    """The fastest of what follows `starts` by steps that save memory and take longer."""
    count, seen = itertools.count(), set[tuple[Any, ...]]()
    queue = list[tuple[float, int, bool, Run]]()

    def fits(run: Run) -> bool:
        return needed_by(run, savings.gpus) <= limit

    def put(run: Run, like: Run, *, is_found: bool = False) -> None:
        """`run`, in the order of the time of `like`."""
        time = predict(like, savings.gpus, device)
        heapq.heappush(queue, (time.step_s, next(count), is_found, run))

    for start in starts:
        if savings.least(start, limit)[0] <= limit:
            put(start, savings.of_step(start)[0])
    while queue:
        _, _, is_found, run = heapq.heappop(queue)
        if is_found:
            return with_memory(run, predict(run, savings.gpus, device))
        if (fewest := savings.first_that_fits(run, fits)) is not None:
            put(fewest, fewest, is_found=True)
            continue
        for smaller in savings.after(run):
            key = (*settings_of(smaller), smaller.train.residual_precision, smaller.train.optimizer)
            if key not in seen:
                seen.add(key)
                put(smaller, savings.of_step(smaller)[0])
    return None


def _changes_between(old: Run, new: Run) -> list[str]:
    """As overrides of a command."""
    keys = [("layout", "zero"), ("layout", "offload")]
    keys += [("train", key) for key in ("optimizer", "residual_precision", "fp8", *TRAIN_KEYS)]
    found = []
    for section, key in keys:
        before, after = (getattr(getattr(x, section), key) for x in (old, new))
        if before != after:
            after = new.model.layers if after is None else after  # of recompute_layers: all
            value = after if isinstance(after, str) else json.dumps(after)
            found.append(f"{section}.{key}={value}")
    return found


def rungs(run: Run, gpus: int) -> list[Rung]:
    """What the run could still change, cheapest first."""
    is_planned = run.engine.name == "native" and not run.model.factory
    found = []
    for setting, cost, change, factor in _changes(run, gpus):
        if is_allowed(changed := change(run), gpus * factor):
            planned = changed if is_planned else None
            found.append(Rung(setting, cost, gpus * factor, planned))
    return found


def _changes(run: Run, gpus: int) -> Iterator[tuple[str, str, Change, int]]:
    """The setting, its cost, the change, and by what it multiplies the devices."""
    train, layout, ranks = run.train, run.layout, run.layout.resolve(gpus)
    is_native = run.engine.name == "native"
    checkpointing = "train.activation_checkpointing"
    if train.micro_batch > 1:
        smaller = halved(train.micro_batch)
        change = _set("train", micro_batch=smaller)
        yield f"train.micro_batch={smaller}", "smaller matrix products", change, 1
    is_zero3 = not is_native and layout.zero == 3  # where "selective" is refused
    if train.activation_checkpointing == "none" and not is_zero3:
        change = _set("train", activation_checkpointing="selective")
        yield f"{checkpointing}=selective", "a few percent of the time", change, 1
    if is_native and ranks["shard"] * ranks["sequence"] > 1 and 0 < layout.zero < 3:
        more = layout.zero + 1
        yield f"layout.zero={more}", "more communication", _set("layout", zero=more), 1
    if train.residual_precision == "fp32" and train.precision == "bf16" and is_native:
        change = _set("train", residual_precision="bf16")
        yield "train.residual_precision=bf16", "sums of the residual stream are rounded", change, 1
    if train.optimizer == "adamw" and is_native:
        change = _set("train", optimizer="adamw8bit")
        yield "train.optimizer=adamw8bit", "8-bit moments", change, 1
    if train.optimizer == "adamw8bit" and train.parameter_precision == "fp32":
        change = _set("train", parameter_precision="bf16")
        yield "train.parameter_precision=bf16", "no fp32 master weights", change, 1
    if size := next_tile(run, gpus):
        change = _set("train", mlp_tile_tokens=size)
        cost = "gate and up of the MLP again, unless recomputed anyway"
        if train.mlp_tile_tokens:
            cost = "more and smaller tiles"
        yield f"train.mlp_tile_tokens={size}", cost, change, 1
    is_decoder = is_native and not run.model.factory
    if is_decoder and may_chunk(run) and (sizes := chunk_sizes(run)):
        change = _set("train", chunk_tokens=sizes[0])
        cost = "a forward pass more, about a quarter"
        yield f"train.chunk_tokens={sizes[0]}", cost, change, 1
    if train.activation_checkpointing != "full":
        change = _set("train", activation_checkpointing="full")
        yield f"{checkpointing}=full", "a second forward pass, about a third", change, 1
    if train.recompute_layers is not None:
        change = _set("train", recompute_layers=None)
        yield "without train.recompute_layers", "a second forward pass of all layers", change, 1
    if not train.offload_activations:
        change = _set("train", offload_activations=True)
        cost = "copies to the CPU and back, beside compute"
        yield "train.offload_activations=true", cost, change, 1
    if train.chunk_tokens and not train.offload_chunk_rows:
        change = _set("train", offload_chunk_rows=True)
        yield "train.offload_chunk_rows=true", "copies of earlier keys and values", change, 1
    if train.offload_limit_gib is not None:
        change = _set("train", offload_limit_gib=None)
        yield "without train.offload_limit_gib", "more CPU memory", change, 1
    if not layout.offload and is_native:
        cost = "the optimizer runs on the CPU"
        yield "layout.offload=true", cost, _set("layout", offload=True), 1
    # With twice the ranks that shard, each has half of the samples.
    twice = {**ranks, "shard": 2 * ranks["shard"]}
    size = max(train.global_batch, train.micro_batch * twice["shard"] * twice["replicate"])
    sharded = _set("layout", **twice, zero=max(1, layout.zero))
    change = lambda x: _set("train", global_batch=size)(sharded(x))  # noqa: E731
    yield "twice the ranks of layout.shard", "twice the devices", change, 2
    if is_decoder:
        for axis in ("sequence", "tensor"):
            change = _set("layout", **{**ranks, axis: 2 * ranks[axis]})
            yield f"twice the ranks of layout.{axis}", "twice the devices", change, 2


def _set(section: str, **values: Any) -> Change:
    def change(run: Run) -> Run:
        new = getattr(run, section).model_copy(update=values)
        return run.model_copy(update={section: new})

    return change


def halved(micro_batch: int) -> int:
    """The largest divisor that is at most half, so that it divides the global batch."""
    return next(n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0)
