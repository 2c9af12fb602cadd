"""Which layout to train with: all that a number of devices allows, ranked by predicted tokens/s.

Searched are the ranks of every axis and the ZeRO stage, activation checkpointing and the
micro-batch; where memory is short, also the MLP in tiles, chunks and offloaded activations; and, if
nothing fits without it, `layout.offload`. What a run must hold to is not restated here: `rules`
refuses candidates, `memory_per_rank` says what they need, `run_time.py` how long they take.

A prediction without collectives is fast, and a lower bound of the time. Candidates are taken in its
order, and what saves memory is tried only where it is needed, so that few of tens of thousands have
their communication and memory computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.config import AXES, Run
from longspan.hardware import Device
from longspan.planning.memory import memory_per_rank
from longspan.planning.rates import RunRates, rates_of
from longspan.planning.run_time import (
    RunTime,
    compute_time,
    predict,
    with_precision,
)
from longspan.planning.savings import (
    CHECKPOINTING,
    SAVING_KEYS,
    Savings,
    layout_problem,
    modes_of,
    savings_text,
    uses_zero,
    with_train,
)
from longspan.wording import counted

GIB = 2**30
CLOSE = 1.005
"""Layouts whose predicted times differ by less count as equally fast. On eight CPU processes DDP
was 10% faster than ZeRO-1, which was predicted to be 0.3% faster."""
ALLOWANCE = 1.5 * GIB
"""Of a GPU's memory, for its context, libraries and what the plan does not see."""
SHOWN = 10
"""Layouts in the table."""
MICRO_BATCH = "micro_batch"
TRAIN_KEYS = (MICRO_BATCH, *SAVING_KEYS)
"""What is searched besides the layout."""
FEW = 3
"""Layouts of which all that saves memory is searched: those that are fastest without, if they
recompute; or, where nothing fits without, those that are found first."""
MOST_TRIED = 1000
"""Candidates with tiles, chunks and offload: a few seconds."""
REFUSED = 50
"""Candidates that do not fit, of which is told how fast they would be."""
MAX_MICRO_BATCHES = 8
"""Sizes of micro-batches that are tried."""


@dataclass(frozen=True)
class Candidate:
    """A run with one of the layouts."""

    run: Run
    time: RunTime
    needed: int
    """Bytes on the fullest device."""
    offloaded: int
    """Bytes in CPU memory of the process that has most there."""

    @property
    def fits(self) -> bool:
        return self.needed <= usable_memory(self.time.device)

    @property
    def text(self) -> str:
        text = f"{layout_text(self.run, self.time.gpus)}, {_train_text(self.run)}"
        in_cpu = f", {self.offloaded / GIB:,.1f} GiB in CPU memory per device"
        return f"{text}{in_cpu if self.offloaded else ''}"

    def beside(self, other: Candidate) -> str:
        """Its text without what is the same in another."""
        train = _train_text(self.run)
        layout = layout_text(self.run, self.time.gpus)
        return layout if train == _train_text(other.run) else f"{layout}, {train}"

    def as_dict(self) -> dict[str, Any]:
        run, keys = self.run, (*AXES, "zero", "offload")
        return {
            "layout": {key: getattr(run.layout, key) for key in keys},
            "train": {key: getattr(run.train, key) for key in (*TRAIN_KEYS, "global_batch")},
            "context": run.data.context,
            "savings": savings_text(run.train),
            "memory_bytes": self.needed,
            "offloaded_bytes": self.offloaded,
            **self.time.as_dict(),
        }


@dataclass
class Search:
    """What a search has found."""

    gpus: int
    device: Device
    cpu_memory: int | None = None
    """Bytes for what a process offloads; None if they are not known."""
    tried: int = 0
    """Candidates whose time and memory were predicted."""
    ranked: list[Candidate] = field(default_factory=list)
    """Those that fit, the fastest of each layout, the fastest first; but see CLOSE."""
    too_large: list[Candidate] = field(default_factory=list)
    """Some that would be a little faster, but do not fit."""
    smallest: list[Candidate] = field(default_factory=list)
    """Where nothing fits: what needs least memory, without offload and with it."""
    refusal: str = ""
    """Where the rules allow no layout: why not that of the run."""

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    def has_room_for(self, run: Run) -> bool:
        memory = memory_per_rank(run, self.gpus)
        in_cpu = max(x.offloaded for x in memory)
        if self.cpu_memory is not None and in_cpu > self.cpu_memory:
            return False
        return max(x.on_device for x in memory) <= usable_memory(self.device)

    def why(self) -> list[str]:
        """Why the first and not the others, in words."""
        if not self.ranked:
            return [self._nothing_fits()]
        best, lines = self.best, list[str]()
        if self.too_large:
            other = min(self.too_large, key=lambda x: x.needed)
            lines.append(
                f"faster, but too large: {other.beside(best)}: "
                f"{best.time.step_s / other.time.step_s - 1:.1%} more tokens/s, needs "
                f"{other.needed / GIB:,.1f} of {self.device.memory / GIB:,.0f} GiB"
            )
        for other in self.ranked[1:3]:
            slower = other.time.step_s / best.time.step_s - 1
            if slower < 0:
                lines.append(f"{other.beside(best)}: {-slower:.1%} faster, but less simple")
                continue
            lines.append(
                f"{other.beside(best)}: {slower:.1%} slower{_because(other.time, best.time)}"
            )
        return lines

    def _nothing_fits(self) -> str:
        if not self.smallest:
            why = f": {self.refusal}" if self.refusal else ""
            return f"no layout of {counted(self.gpus, 'device')} fits the rules of this run{why}"
        least = min(self.smallest, key=lambda x: x.needed)
        cpu = (
            ""
            if self.cpu_memory is None
            else f" and {self.cpu_memory / GIB:,.1f} GiB of CPU memory"
        )
        return (
            f"nothing fits in {self.device.memory / GIB:,.0f} GiB{cpu} on "
            f"{counted(self.gpus, 'device')}: the least is {least.needed / GIB:,.1f} GiB, with "
            f"{least.text}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "device": self.device.name,
            "tried": self.tried,
            "ranked": [x.as_dict() for x in self.ranked],
            "too_large": [x.as_dict() for x in self.too_large],
            "smallest": [x.as_dict() for x in self.smallest],
            "why": self.why(),
        }

    def __str__(self) -> str:
        if not self.ranked:
            return self._nothing_fits()
        lines = [
            f"{counted(self.gpus, 'device')}, {self.device.title}, the fastest way to train with "
            "each layout that fits:",
            f"  {'tokens/s':>12}{'MFU':>7}{'GiB':>8}  layout",
        ]
        for x in self.ranked:
            lines.append(
                f"  {x.time.tokens_per_s:>12,.0f}{x.time.mfu:>7.1%}{x.needed / GIB:>8.1f}  {x.text}"
            )
        return "\n".join([*lines, *(f"  {line}" for line in self.why())])


def usable_memory(device: Device) -> float:
    """Bytes of a device that a run may use."""
    return device.memory - (0 if device.name == "cpu" else ALLOWANCE)


def candidate_of(run: Run, gpus: int, device: Device, rates: RunRates | None = None) -> Candidate:
    """The time and memory of a run as it is."""
    run = with_precision(run, device)
    return with_memory(run, predict(run, gpus, device, rates))


def with_memory(run: Run, time: RunTime) -> Candidate:
    memory = memory_per_rank(run, time.gpus)
    needed, offloaded = (max(getattr(x, key) for x in memory) for key in ("on_device", "offloaded"))
    return Candidate(run, time, needed, offloaded)


def search(
    run: Run,
    gpus: int,
    device: Device,
    *,
    fixed: Collection[str] = (),
    rates: RunRates | None = None,
    shown: int = SHOWN,
    cpu_memory: int | None = None,
) -> Search:
    """Rank the ways to train `run` on `gpus` devices; keys of [train] in `fixed` are kept.

    `cpu_memory`: bytes that a process has for what it offloads, if they are known.
    """
    rates, found = rates or rates_of(device), Search(gpus, device, cpu_memory)
    run = with_precision(run, device)
    if run.train.has_auto_chunks:
        run = run.model_copy(update={"train": run.train.with_chunks(0)})
    first = list(first_candidates(run, gpus, fixed=fixed))
    savings = Savings(gpus, fixed)
    _search(first, savings, rates, shown, found)
    if found.ranked:
        if found.best.run.train.activation_checkpointing != "none":
            _refine(first, savings, rates, shown, found)
        return found
    shown, savings = min(shown, FEW), replace(savings, others=True)
    _search(first, savings, rates, shown, found)
    if not found.ranked and device.name != "cpu":
        savings = replace(savings, offloads=True)
        _search(first, savings, rates, shown, found)
        if not found.ranked:
            first = list(first_candidates(run, gpus, fixed=fixed, offload=True))
            _search(first, savings, rates, shown, found)
    if gpus and not found.tried and (problem := layout_problem(run, gpus)) is not None:
        found.refusal = f"{problem.path} {problem.message}"
    return found


def _refine(
    first: Sequence[Run], savings: Savings, rates: RunRates, shown: int, found: Search
) -> None:
    """Search the fastest layouts again, which lack memory, with tiles and chunks."""
    layouts = {_ranks(x) for x in found.ranked[:FEW]}
    again = Search(found.gpus, found.device, found.cpu_memory)
    refined = [x for x in first if tuple(x.layout.resolve(found.gpus).values()) in layouts]
    _search(refined, replace(savings, others=True), rates, shown, again)
    best = {_ranks(x): x for x in found.ranked}
    for x in again.ranked:
        best[_ranks(x)] = min(x, best[_ranks(x)], key=lambda y: y.time.step_s)
    found.ranked = sorted(best.values(), key=lambda x: x.time.step_s)
    found.tried += again.tried
    _put_simplest_first(found)
    too_large = [*again.too_large, *found.too_large]
    found.too_large = [x for x in too_large if x.time.step_s < found.best.time.step_s][:SHOWN]


def _search(
    first: Sequence[Run], savings: Savings, rates: RunRates, shown: int, found: Search
) -> None:
    """Take candidates from the fastest to the slowest until `shown` layouts fit.

    What follows a candidate that does not fit saves memory and takes at least as long, but for a
    few. If what needs least of those that follow does not fit, none is taken to; if MOST_TRIED
    have been, it stands for the rest. A candidate is all that `Savings.of_step` says, with the time
    of the first, until it is known to fit: then it is the first that does.
    """
    gpus, count = found.gpus, itertools.count()
    queue = list[tuple[float, int, bool, Run, RunTime]]()
    hopeless, refused = list[tuple[Run, RunTime]](), list[tuple[Run, RunTime]]()
    smallest = list[tuple[int, Run]]()

    def put(candidate: Run, time: RunTime | None = None) -> None:
        known = time or compute_time(savings.of_step(candidate)[0], gpus, found.device, rates)
        heapq.heappush(queue, (known.step_s, next(count), time is not None, candidate, known))

    for candidate in first:
        put(candidate)
    untried = set(map(id, first))
    layouts, seen, tried = set[tuple[int, ...]](), set[tuple[Any, ...]](), 0
    while queue and len(found.ranked) < shown:
        _, _, is_whole, candidate, time = heapq.heappop(queue)
        ranks = tuple(candidate.layout.resolve(gpus).values())
        if ranks in layouts:  # a faster way with it fits
            continue
        if is_whole:
            layouts.add(ranks)
            found.ranked.append(with_memory(candidate, time))
            continue
        found.tried += 1
        tried += 1
        if savings.others and tried > MOST_TRIED:
            break
        if id(candidate) in untried:
            least, last = savings.least(candidate, usable_memory(found.device))
            smallest.append((least, last))
            if least > usable_memory(found.device):
                hopeless.append((candidate, time))
                continue
        if (enough := savings.first_that_fits(candidate, found.has_room_for)) is not None:
            put(enough, predict(enough, gpus, found.device, rates))
            continue
        refused.append((candidate, time))
        for smaller in savings.after(candidate):
            key = (ranks, *settings_of(smaller))
            if key not in seen:
                seen.add(key)
                put(smaller)
    if not found.ranked:
        fitting = [x for _, x in smallest if found.has_room_for(x)]
        candidates = [candidate_of(x, gpus, found.device, rates) for x in fitting]
        fastest = dict[tuple[int, ...], Candidate]()
        for each in sorted(candidates, key=lambda x: x.time.step_s):
            fastest.setdefault(_ranks(each), each)
        found.ranked = list(fastest.values())[:shown]
    if found.ranked:
        _put_simplest_first(found)
        limit = found.best.time.step_s
        # The last ones are closest to what fits.
        faster = [x for x, time in [*hopeless, *refused] if time.step_s < limit]
        larger = (candidate_of(x, gpus, found.device, rates) for x in reversed(faster[-REFUSED:]))
        found.too_large = [x for x in larger if x.time.step_s < limit][:SHOWN]
    elif smallest and savings.others:
        _, least_run = min(smallest, key=lambda x: x[0])
        found.smallest.append(candidate_of(least_run, gpus, found.device, rates))


def settings_of(run: Run) -> tuple[Any, ...]:
    """What is searched besides the ranks of axes."""
    return run.layout.zero, *(getattr(run.train, key) for key in TRAIN_KEYS)


def _ranks(candidate: Candidate) -> tuple[int, ...]:
    return tuple(candidate.run.layout.resolve(candidate.time.gpus).values())


def _put_simplest_first(found: Search) -> None:
    """Of layouts that are predicted to be equally fast, take the one that splits least."""
    limit = CLOSE * found.ranked[0].time.step_s
    close = [x for x in found.ranked if x.time.step_s <= limit]
    simplest = min(close, key=lambda x: found.gpus // x.run.layout.resolve(found.gpus)["replicate"])
    found.ranked.remove(simplest)
    found.ranked.insert(0, simplest)


def first_candidates(
    run: Run, gpus: int, *, fixed: Collection[str] = (), offload: bool = False
) -> Iterator[Run]:
    """The layouts of `gpus` devices that the rules allow, with the same global batch: for each size
    of micro-batch the fastest, which shards and recomputes least.
    """  # fmt: skip
    modes: list[dict[str, Any]] = [{}]
    if CHECKPOINTING not in fixed:
        modes = list(modes_of(run.train, run.model.layers))
        if not run.train.offload_activations:  # with which more recomputation may be faster
            modes = modes[:1]
    for ranks in factorizations(gpus, len(AXES)):
        axes = dict(zip(AXES, ranks, strict=True))
        per_rank, rest = divmod(run.train.global_batch, axes["replicate"] * axes["shard"])
        if rest:
            continue
        layout = run.layout.model_copy(update={**axes, "offload": offload})
        if uses_zero(layout, gpus):
            layout = layout.model_copy(update={"zero": 1})
        for size in [run.train.micro_batch] if MICRO_BATCH in fixed else _micro_batches(per_rank):
            for mode in modes:
                placed = run.model_copy(update={"layout": layout})
                candidate = with_train(placed, **{MICRO_BATCH: size}, **mode)
                if layout_problem(candidate, gpus) is None:
                    yield candidate


def factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All tuples of so many positive integers whose product is `number`, large ones first."""
    if factors == 1:
        yield (number,)
        return
    for first in reversed(divisors(number)):
        for rest in factorizations(number // first, factors - 1):
            yield first, *rest


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _micro_batches(per_rank: int) -> list[int]:
    """Sizes that divide a rank's share of the global batch: all, or of many the powers of two."""
    sizes = divisors(per_rank)
    if len(sizes) > MAX_MICRO_BATCHES:
        sizes = [n for n in sizes if n & (n - 1) == 0][:MAX_MICRO_BATCHES]
    return sizes


def layout_text(run: Run, gpus: int) -> str:
    """A layout in words, axes of one rank left out."""
    ranks = run.layout.resolve(gpus)
    axes = " × ".join(f"{axis} {n}" for axis, n in ranks.items() if n > 1) or "one process"
    zero = f", ZeRO stage {run.layout.zero}" if uses_zero(run.layout, gpus) else ""
    return f"{axes}{zero}{', offloaded to CPU' if run.layout.offload else ''}"


def _train_text(run: Run) -> str:
    return f"micro-batch {run.train.micro_batch}, {savings_text(run.train)}"


def _because(slower: RunTime, faster: RunTime) -> str:
    """What most of the difference between two steps is."""
    more = {name: seconds - faster.parts.get(name, 0.0) for name, seconds in slower.parts.items()}
    name = max(more, key=lambda key: more[key])
    return f" ({name})" if more[name] > 0 else ""
