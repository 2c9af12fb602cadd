"""Pipeline schedules on paper: which layers each stage holds, and the bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from longspan.config import Layout
from longspan.flops import StageFlops


@dataclass(frozen=True)
class StagePlan:
    """Which pipeline rank holds which stages, and which layers and FLOPs each stage has."""

    schedule: str
    by_rank: list[list[int]]
    layers: list[range]
    flops: list[float]

    @property
    def last(self) -> int:
        """The last stage of the model; the first is stage 0."""
        return len(self.layers) - 1

    def rank_of(self, stage: int) -> int:
        return next(rank for rank, stages in enumerate(self.by_rank) if stage in stages)


def plan_stages(layout: Layout, layers: int, flops: StageFlops, ranks: int) -> StagePlan:
    """Assign layers to stages, and stages to `ranks` pipeline ranks."""
    count = layout.stages_per_rank * ranks
    by_rank = [list(range(rank, count, ranks)) for rank in range(ranks)]
    if layout.schedule == "zbv":  # down the ranks and up again: a V
        by_rank = [[rank, count - 1 - rank] for rank in range(ranks)]
    return StagePlan(layout.schedule, by_rank, *split_layers(layers, flops, count))


def split_layers(layers: int, flops: StageFlops, stages: int) -> tuple[list[range], list[float]]:
    """The layers of each stage, and its FLOPs, such that the most expensive stage costs least."""
    counts = [1] * stages
    if len(set(flops.blocks)) == 1:
        costs = [flops.blocks[0]] * stages
        costs[0] += flops.embedding
        costs[-1] += flops.head
        for _ in range(layers - stages):  # all blocks cost the same, so adding greedily is optimal
            cheapest = min(range(stages), key=costs.__getitem__)
            counts[cheapest] += 1
            costs[cheapest] += flops.blocks[0]
    else:
        counts = _balanced_counts(flops, stages)
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    found = [range(end - n, end) for n, end in zip(counts, ends, strict=True)]
    return found, [_stage_cost(flops, x.start, x.stop) for x in found]


def _stage_cost(flops: StageFlops, start: int, stop: int) -> float:
    """FLOPs of a stage of the blocks [start, stop)."""
    ends = flops.embedding * (start == 0) + flops.head * (stop == len(flops.blocks))
    return sum(flops.blocks[start:stop]) + ends


@lru_cache(maxsize=256)
def _balanced_counts(flops: StageFlops, stages: int) -> list[int]:
    """The number of blocks of each stage, by dynamic programming.

    `best[n]` holds, for the first n blocks in so many stages, the cost of the most expensive stage,
    the sum of squared costs, which decides between equal ones, and the number of blocks of each.
    """
    blocks = len(flops.blocks)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for stop in range(stage + 1, blocks - (stages - 1 - stage) + 1):
            candidates = []
            for start, (most, squares, counts) in best.items():
                if start < stop:
                    cost = _stage_cost(flops, start, stop)
                    here = max(most, cost), squares + cost * cost, [*counts, stop - start]
                    candidates.append(here)
            longer[stop] = min(candidates)
        best = longer
    return best[blocks][2]


class Action(NamedTuple):
    """A forward pass, a full backward pass, or a backward pass for inputs or weights only."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    stage: int
    micro_batch: int


def simple_order(schedule: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The actions of each rank under GPipe and 1F1B."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches) if schedule == "1f1b" else micro_batches
        order = [Action("forward", rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                order.append(Action("forward", rank, ahead + i))
            order.append(Action("backward", rank, i))
        orders.append(order)
    return orders


def bubble(orders: Sequence[Sequence[Action]], costs: Sequence[float]) -> float:
    """The fraction of the ranks' time that is idle, given each rank's actions in order.

    A stage's forward pass takes its cost and its backward pass twice that, half for the inputs and
    half for the weights where a schedule separates them. Communication takes no time.
    """
    ends: dict[Action, float] = {}
    pending = [list(reversed(order)) for order in orders]
    clocks, busy = [0.0] * len(orders), 0.0
    while any(pending):
        done = len(ends)
        for rank, actions in enumerate(pending):
            while actions and all(x in ends for x in _dependencies(actions[-1], len(costs))):
                action = actions.pop()
                start = max(
                    clocks[rank], *(ends[x] for x in _dependencies(action, len(costs))), 0.0
                )
                time = costs[action.stage] * (2 if action.kind == "backward" else 1)
                done_as = action._replace(kind="inputs") if action.kind == "backward" else action
                clocks[rank] = ends[done_as] = start + time
                busy += time
        assert len(ends) > done, "the schedule deadlocks"
    return 1 - busy / (len(orders) * max(clocks))


def _dependencies(action: Action, stages: int) -> list[Action]:
    kind, stage, micro = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage > 0 else []
    if kind == "weights":
        return [Action("inputs", stage, micro)]
    after = [Action("inputs", stage + 1, micro)] if stage + 1 < stages else []
    return [Action("forward", stage, micro), *after]
