"""The ladder: what each change of a run saves of a device's memory, and what it costs.

`longspan plan` shows it where a run does not fit; the out-of-memory report of training has the same
settings and the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from longspan.config import Run
from longspan.hardware import Device
from longspan.planning.chunks import chunk_sizes
from longspan.planning.memory import memory_per_rank
from longspan.planning.run_time import predict
from longspan.rules import first_layout_problem

GIB = 2**30
MIN_CHUNKED = 1 << 16
"""Contexts from which on chunks are suggested."""
TILE_TOKENS = 8192
"""Of the tiles that are suggested: enough rows for the matrix products to run at full rate."""
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
    is_more_devices: bool = False

    def needed(self) -> int | None:
        """Bytes that the fullest device must have; None if that is unknown."""
        return None if self.run is None else needed_by(self.run, self.gpus)


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
    together: list[str] | None
    """The first changes that fit together on the same devices; None if none do."""

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
        if self.together is None:
            lines.append("  together on these devices: not enough")
        elif len(self.together) > 1:
            lines.append(f"  together: {' '.join(self.together)}")
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
    return Ladder(needed, limit, rows, _path(run, gpus, limit))


def _path(run: Run, gpus: int, limit: int) -> list[str] | None:
    """Changes that fit together, each the cheapest that is left; None if all are not enough."""
    settings: list[str] = []
    while needed_by(run, gpus) > limit:
        left = [
            x
            for x in rungs(run, gpus)
            if x.run and not x.is_more_devices and needed_by(x.run, gpus) < needed_by(run, gpus)
        ]
        if not left or left[0].run is None:
            return None
        run, setting = left[0].run, left[0].setting
        key = setting.split("=")[0]
        settings = [x for x in settings if not x.startswith(f"{key}=")] + [setting]
    return settings


def needed_by(run: Run, gpus: int) -> int:
    """Bytes that the fullest device must have."""
    return max(memory.on_device for memory in memory_per_rank(run, gpus))


def rungs(run: Run, gpus: int) -> list[Rung]:
    """What the run could still change, cheapest first."""
    is_planned = run.engine.name == "native" and not run.model.factory
    found = []
    for setting, cost, change, factor in _changes(run, gpus):
        changed: Run | None = change(run)
        assert changed is not None
        sections = {name: getattr(changed, name) for name in type(changed).model_fields}
        if first_layout_problem(sections, gpus * factor):
            continue
        found.append(
            Rung(setting, cost, gpus * factor, changed if is_planned else None, factor > 1)
        )
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
    if train.optimizer == "adamw" and is_native:
        change = _set("train", optimizer="adamw8bit")
        yield "train.optimizer=adamw8bit", "8-bit moments", change, 1
    tokens = train.micro_batch * (train.chunk_tokens or run.data.context) // ranks["sequence"]
    if not train.mlp_tile_tokens and tokens > TILE_TOKENS:
        change = _set("train", mlp_tile_tokens=TILE_TOKENS)
        cost = "gate and up of the MLP again, unless recomputed anyway"
        yield f"train.mlp_tile_tokens={TILE_TOKENS}", cost, change, 1
    long = run.data.context >= MIN_CHUNKED and is_native and not run.model.factory
    if long and (sizes := chunk_sizes(run)):
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
    if is_native and not run.model.factory:
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
