"""Summarises torch profiler traces: where a step's time goes, and which operators take it.

Work is what runs on the device: kernels and copies of a GPU; on a CPU its operators, and the
collectives of gloo's threads. Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from longspan.errors import UserError, first_problem
from longspan.files import read_json_object
from longspan.wording import counted

FOLDER, SUMMARY = "profile", "summary.json"
"""The folder in a run's folder, and the file in it with the summary of all ranks."""

TOP = 10
"""How many operators a summary lists."""
MAX_BYTES = 64 << 20
"""The size of a summary file, far above that of 10,000 ranks."""

GRAPH_LAUNCH = re.compile(r"(cuda|hip)GraphLaunch")
KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
COLLECTIVE_KERNEL = re.compile(r"nccl|nvshmem|multimem_|one_shot_|two_shot_", re.IGNORECASE)
COLLECTIVE = re.compile(
    r"(gloo|nccl|mpi|ucc):|_?c10d(_functional(_autograd)?)?::|record_param_comms"
)
BACKEND = re.compile(r"(gloo|nccl|mpi|ucc):")
"""Regions of collectives. A backend's own threads record them around all of a collective; the
operators of c10d may only enqueue one."""
WRAPPER = re.compile(
    r"autograd::engine::|torch::autograd::|torch\.distributed|"
    r"(?!CompiledFunction|Torch-Compiled|## Call|triton)[^:]*$"
)
"""Operators of a CPU that compute only by others that they call: nodes and functions of autograd.
In their own time is Python, which may wait for a collective."""
ALLOCATORS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty")}
"""Operators that only allocate: what they allocate counts for the operator that calls them."""
STEP = "ProfilerStep#"

IDLE, EXPOSED, COPIED, UNEVEN, SLOW_STEP = 0.2, 0.15, 0.1, 1.1, 1.5
"""Above these shares of a step, or ratios between ranks and steps, the summary says what to do."""

Interval = tuple[float, float]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one training step went, in seconds.

    Compute, exposed communication, exposed copies and idle add up to `wall_s`. What is exposed has
    no compute at the same time; copies are counted after communication.
    """

    step: int
    wall_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    peak_bytes: int | None
    """Peak allocated memory of the GPU; None on a CPU, whose allocations are only known in part,
    and with CUDA graphs, whose memory was allocated before."""


@dataclass(frozen=True)
class Operator:
    """An operator, summed over the profiled steps.

    `self_s`: its time without the operators it calls, on the device; `bytes`: allocated less freed
    by itself, and by operators within it that only allocate.
    """

    name: str
    calls: int
    self_s: float
    bytes: int


@dataclass(frozen=True)
class TraceSummary:
    """One trace: its steps, and all operators by name."""

    device: str
    steps: list[StepTimes]
    operators: dict[str, Operator]
    has_graphs: bool
    """Whether CUDA graphs were launched, whose kernels have no operators and allocate nothing."""


@dataclass(frozen=True)
class RankSummary:
    """The profile of one rank; its traces are files beside the summary."""

    rank: int
    device: str
    traces: list[str]
    steps: list[StepTimes]
    by_time: list[Operator]
    by_memory: list[Operator]
    has_graphs: bool = False

    def mean(self, field: str) -> float:
        """The mean over the steps of a field of `StepTimes`."""
        return mean(float(getattr(step, field)) for step in self.steps)


@dataclass(frozen=True)
class Summary:
    """The profile of all ranks; `findings` say in words what stands out."""

    version: int
    device: str
    findings: list[str]
    ranks: list[RankSummary]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(
            [*self.findings, "", *_table(self.ranks), *_operators(_busiest(self.ranks))]
        )


# Intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what at least one of `intervals` covers, as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def difference(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return what `intervals` cover and `others` do not; both are as `union` returns them."""
    found, first = [], 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = others[at][1]
            at += 1
        if start < end:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval], window: Interval) -> float:
    """Return how much of `window` disjoint intervals cover."""
    return sum(max(0.0, min(end, window[1]) - max(start, window[0])) for start, end in intervals)


# One trace


def summarise(events: Iterable[Event], steps: Sequence[int]) -> TraceSummary:
    """Summarise the `traceEvents` of a trace; `steps`: the training steps that it contains.

    What follows the last of them is left out.
    """
    spans, memory, windows = [], [], []
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            spans.append(event)
            if event.get("cat") == "user_annotation" and event["name"].startswith(STEP):
                windows.append(_interval(event))
        elif event.get("name") == "[memory]":
            memory.append(event)
    windows = sorted(windows)[: len(steps)]
    on_gpu = any(event.get("cat") == KERNEL for event in spans)
    graphs = [event for event in spans if GRAPH_LAUNCH.match(event["name"])]
    memory = [event for event in memory if (event["args"].get("Device Type") == 1) == on_gpu]
    compute, communication, copies = _gpu_work(spans) if on_gpu else _cpu_work(spans)
    exposed = difference(communication, compute)
    copied = difference(copies, union([*compute, *communication]))
    times = []
    for step, window in zip(steps, windows, strict=False):
        wall = (window[1] - window[0]) * 1e-6
        computed, communicated, waited, moved = (
            length(work, window) * 1e-6 for work in (compute, communication, exposed, copied)
        )
        idle = max(0.0, wall - computed - waited - moved)  # rounding
        allocated = [e["args"].get("Total Allocated", 0) for e in memory if _is_in(e, [window])]
        has_graphs = any(_is_in(event, [window]) for event in graphs)
        peak = max(allocated, default=None) if on_gpu and not has_graphs else None
        times.append(StepTimes(step, wall, computed, communicated, waited, moved, idle, peak))
    operators = _operators_by_name(spans, memory, windows, on_gpu=on_gpu)
    return TraceSummary("cuda" if on_gpu else "cpu", times, operators, bool(graphs))


def _gpu_work(spans: Iterable[Event]) -> tuple[list[Interval], list[Interval], list[Interval]]:
    compute = list[Interval]()
    communication, copies = list[Interval](), list[Interval]()
    for event in spans:
        if event.get("cat") == KERNEL:
            (communication if _is_collective(event) else compute).append(_interval(event))
        elif event.get("cat") in COPIES:
            copies.append(_interval(event))
    return union(compute), union(communication), union(copies)


def _cpu_work(spans: Iterable[Event]) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """An operator that calls a collective computes before and after it."""
    operators = defaultdict[Any, list[Interval]](list)  # by thread
    collectives = defaultdict[Any, list[Interval]](list)
    for event in spans:
        if _is_cpu_collective(event):
            collectives[event["tid"]].append(_interval(event))
        elif event.get("cat") == "cpu_op" and not WRAPPER.match(event["name"]):
            operators[event["tid"]].append(_interval(event))
    compute = [
        interval
        for thread, intervals in operators.items()
        for interval in difference(union(intervals), union(collectives[thread]))
    ]
    return union(compute), union(i for all_of in collectives.values() for i in all_of), []


def _operators_by_name(
    spans: Sequence[Event], memory: Sequence[Event], windows: Sequence[Interval], *, on_gpu: bool
) -> dict[str, Operator]:
    calls, times, sizes = Counter[str](), defaultdict[str, float](float), Counter[str]()
    names: dict[Any, str] = {}  # of operators by the id that their kernels carry
    threads = defaultdict[Any, list[Event]](list)
    for event in spans:
        if BACKEND.match(event["name"]):
            if not on_gpu and _is_in(event, windows):
                calls[event["name"]] += 1
                times[event["name"]] += event["dur"]
        elif event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
            names[event.get("args", {}).get("External id")] = event["name"]
    for event in memory:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        stack: list[tuple[float, str]] = []  # (end, name) of the operators that are running
        for event in sorted(thread, key=lambda e: (e["ts"], -e.get("dur", 0))):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            is_operator = "dur" in event
            is_counted = _is_in(event, windows)
            if is_operator and is_counted:
                # An operator that dispatches to itself, as on another key, is one call.
                calls[event["name"]] += not (stack and stack[-1][1] == event["name"])
                if not on_gpu:
                    times[event["name"]] += event["dur"]
                    if stack:
                        times[stack[-1][1]] -= event["dur"]
            elif is_counted and stack:
                callers = [name for _, name in stack if name not in ALLOCATORS]
                sizes[(callers or [stack[-1][1]])[-1]] += event["args"].get("Bytes", 0)
            if is_operator:
                stack.append((event["ts"] + event["dur"], event["name"]))
    for event in spans if on_gpu else ():
        if event.get("cat") in (KERNEL, *COPIES) and _is_in(event, windows):
            caller = names.get(event.get("args", {}).get("External id"))
            if caller is None or _is_collective(event):  # the kernel's name says more
                caller = event["name"].replace("(anonymous namespace)::", "").partition("(")[0]
                calls[caller] += 1
            times[caller] += event["dur"]
    found = {*calls, *times, *sizes}
    return {name: Operator(name, calls[name], times[name] * 1e-6, sizes[name]) for name in found}


def _is_collective(event: Event) -> bool:
    """Whether a kernel communicates."""
    return event.get("cat") == KERNEL and bool(COLLECTIVE_KERNEL.search(event["name"]))


def _communicates(operator: str) -> bool:
    return bool(COLLECTIVE.match(operator) or COLLECTIVE_KERNEL.search(operator))


def _is_cpu_collective(event: Event) -> bool:
    return event.get("cat") in ("cpu_op", "user_annotation") and bool(
        COLLECTIVE.match(event["name"])
    )


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _is_in(event: Event, windows: Iterable[Interval]) -> bool:
    return any(start <= event["ts"] < end for start, end in windows)


# Ranks


def summarise_rank(rank: int, traces: Mapping[str, TraceSummary]) -> RankSummary:
    """Join the traces of one rank, by file name."""
    totals: dict[str, Operator] = {}
    for trace in traces.values():
        for name, new in trace.operators.items():
            old = totals.get(name, Operator(name, 0, 0.0, 0))
            totals[name] = Operator(
                name, old.calls + new.calls, old.self_s + new.self_s, old.bytes + new.bytes
            )
    by_time = sorted(totals.values(), key=lambda o: (-o.self_s, o.name))
    by_memory = sorted(totals.values(), key=lambda o: (-o.bytes, o.name))
    return RankSummary(
        rank,
        next(iter(traces.values())).device,
        list(traces),
        [step for trace in traces.values() for step in trace.steps],
        [operator for operator in by_time[:TOP] if operator.self_s > 0],
        [operator for operator in by_memory[:TOP] if operator.bytes > 0],
        any(trace.has_graphs for trace in traces.values()),
    )


def summarise_run(ranks: Sequence[RankSummary], world: int) -> Summary:
    """Join the ranks that have written a profile, of `world` ranks."""
    findings = [*_findings(ranks)]
    if len(ranks) < world:
        findings.append(f"Only {len(ranks)} of {world} ranks have written a profile.")
    return Summary(1, ranks[0].device, findings, list(ranks))


def rank_path(folder: Path, rank: int) -> Path:
    """The file of one rank's summary."""
    return folder / f"rank{rank}.json"


T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T:
    """Read a file of a profile: a `Summary` or a `RankSummary`."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(read_json_object(path, MAX_BYTES))
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from error


def read_summary(run_dir: Path) -> Summary | None:
    """Read the summary of a run's profile; None if it has none."""
    path = run_dir / FOLDER / SUMMARY
    return read(path, Summary) if path.exists() else None


# In words


def _findings(ranks: Sequence[RankSummary]) -> Iterable[str]:
    device = ranks[0].device
    wall, compute, communication, exposed, copied, idle = (
        mean(rank.mean(field) for rank in ranks)
        for field in (
            "wall_s",
            "compute_s",
            "communication_s",
            "exposed_communication_s",
            "exposed_copy_s",
            "idle_s",
        )
    )
    shares = [f"{compute / wall:.1%} compute"]
    shares += [f"{exposed / wall:.1%} exposed communication"] if communication else []
    shares += [f"{copied / wall:.1%} copies"] if copied else []
    steps = counted(len(ranks[0].steps), "step")
    of_ranks = f" on {len(ranks)} ranks" if len(ranks) > 1 else ""
    yield (
        f"A step takes {seconds(wall)} (mean of {steps}{of_ranks}): {', '.join(shares)}, "
        f"{idle / wall:.1%} idle."
    )
    if communication:
        hidden = 1 - exposed / communication
        yield (
            f"Communication takes {seconds(communication)} of a step, waiting for other ranks "
            f"included; {hidden:.0%} of it overlaps with compute."
        )
    if ranks[0].has_graphs:
        yield (
            "CUDA graphs were launched, whose kernels have no operators and allocate nothing: "
            "profile with train.cuda_graphs=false for both."
        )
    slow, fast = _busiest(ranks), min(ranks, key=lambda rank: rank.mean("compute_s"))
    if slow.mean("compute_s") > UNEVEN * fast.mean("compute_s"):
        yield (
            f"Rank {slow.rank} computes longest, {seconds(slow.mean('compute_s'))} of a step; rank "
            f"{fast.rank} computes {seconds(fast.mean('compute_s'))} and waits for it."
        )
    longest = max(slow.steps, key=lambda step: step.wall_s)
    others = [step.wall_s for step in slow.steps if step is not longest]
    if others and longest.wall_s > SLOW_STEP * max(others):
        yield (
            f"Step {longest.step} took {seconds(longest.wall_s)}, the others at most "
            f"{seconds(max(others))}: a checkpoint, an evaluation or other work may fall into it."
        )
    if idle > IDLE * wall:
        what = (
            "the GPU waits for the CPU: try train.compile = true or a larger train.micro_batch"
            if device == "cuda"
            else "no operator runs: that is time of Python, data and files"
        )
        yield f"In {idle / wall:.0%} of a step {what}."
    if exposed > EXPOSED * wall:
        waiting = max(ranks, key=lambda rank: rank.mean("exposed_communication_s"))
        collectives = [o.name for o in waiting.by_time if _communicates(o.name)]
        longest_in = f" (on rank {waiting.rank} longest in {collectives[0]})" if collectives else ""
        yield (
            f"Compute waits for communication in {exposed / wall:.0%} of a step{longest_in}: try a "
            "larger train.micro_batch, in a pipeline more micro-batches (train.global_batch), or "
            "fewer ranks on the axis of the layout that communicates most."
        )
    if copied > COPIED * wall:
        yield (
            f"Compute waits for copies in {copied / wall:.0%} of a step: offloading "
            "(train.offload_activations, layout.offload) and data from the CPU cause them."
        )
    if slow.by_time:
        total = sum(step.wall_s for step in slow.steps)
        most = ", ".join(f"{o.name} {o.self_s / total:.0%}" for o in slow.by_time[:3])
        yield f"Most time goes to {most} of a step."
    if slow.by_memory and not slow.has_graphs:
        most = ", ".join(f"{o.name} {size(o.bytes / len(slow.steps))}" for o in slow.by_memory[:3])
        yield f"Most memory is allocated by {most} per step."


def _busiest(ranks: Sequence[RankSummary]) -> RankSummary:
    return max(ranks, key=lambda rank: rank.mean("compute_s"))


def _table(ranks: Sequence[RankSummary]) -> Iterable[str]:
    yield (
        f"{'rank':>4}{'step':>11}{'compute':>10}{'communication':>15}{'exposed':>10}{'copies':>9}"
        f"{'idle':>8}{'peak memory':>14}"
    )
    for rank in ranks:
        wall = rank.mean("wall_s")
        row = f"{rank.rank:>4}{seconds(wall):>11}"
        for field, width in (
            ("compute_s", 10),
            ("communication_s", 15),
            ("exposed_communication_s", 10),
            ("exposed_copy_s", 9),
            ("idle_s", 8),
        ):
            row += f"{rank.mean(field) / wall:>{width}.1%}"
        peak = max((step.peak_bytes or 0 for step in rank.steps), default=0)
        yield row + (f"{size(peak):>14}" if peak else f"{'':>14}").rstrip()


def _operators(rank: RankSummary) -> Iterable[str]:
    total, steps = sum(step.wall_s for step in rank.steps), len(rank.steps)
    for title, operators in (("time", rank.by_time), ("memory", rank.by_memory)):
        yield ""
        head = f"operators by {title}, rank {rank.rank}, per step"
        yield f"{head:<52}{'calls':>8}{'time':>11}{'share':>8}{'memory':>13}"
        for o in operators:
            name = o.name if len(o.name) <= 50 else f"{o.name[:49]}…"
            yield (
                f"  {name:<50}{o.calls / steps:>8.4g}{seconds(o.self_s / steps):>11}"
                f"{o.self_s / total:>8.1%}{size(o.bytes / steps):>13}"
            )


def seconds(value: float) -> str:
    """Return a time with three digits: 1.24 s, 12.4 ms, 310 µs."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 0.9995:
            return f"{value * scale:.{max(0, 2 - len(str(int(value * scale))) + 1)}f} {unit}"
    return f"{value * 1e6:.0f} µs"


def size(count: float) -> str:
    """Return a size with its unit: 1.50 GiB, 12.0 MiB, −3 KiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
