"""How layers are dealt out to the stages of a pipeline, and how long ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from longspan.attention import pattern_of
from longspan.config import Layout, Run


def stages_of(layout: Layout, ranks: int) -> list[list[int]]:
    """The stages of each of `ranks` ranks, stage 0 being the first of the model."""
    last = layout.stages_per_rank * ranks - 1
    if layout.schedule == "zbv":  # down the ranks and up again
        return [[rank, last - rank] for rank in range(ranks)]
    return [list(range(rank, last + 1, ranks)) for rank in range(ranks)]


def stage_costs(run: Run) -> tuple[float, float, float]:
    """FLOPs per token, forward, of the embedding, of one block and of the head.

    An embedding is looked up: its row, not its matrix, is what it costs. Where blocks differ, as
    `model.sketch.ranks` can make them, it is the mean of theirs.
    """
    model, context = run.model, run.data.context
    block = model.linear_costs()[1].forward / model.layers
    attention = pattern_of(run.attention).flops(
        context, model.heads, model.head_dim, is_causal=True
    )
    return 2.0 * model.hidden, block + attention / context, 2.0 * model.hidden * model.vocab


def split_layers(run: Run, stages: int) -> tuple[list[range], list[float]]:
    """The layers of each stage, and its cost, so that the costliest stage costs least."""
    first, block, last = stage_costs(run)
    counts = [1] * stages
    costs = [block] * stages
    costs[0] += first
    costs[-1] += last
    for _ in range(run.model.layers - stages):  # all blocks cost the same, so one at a time is best
        cheapest = min(range(stages), key=costs.__getitem__)
        counts[cheapest] += 1
        costs[cheapest] += block
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - n, end) for n, end in zip(counts, ends, strict=True)], costs


class Action(NamedTuple):
    """What a rank does next: a forward pass, both gradients, or that of inputs or weights alone."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    stage: int
    micro_batch: int


def simple_order(schedule: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The actions of each rank under "gpipe" and "1f1b"."""
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
    """The share of the ranks' time that is spent waiting, given each rank's order of actions.

    A stage's forward pass takes its cost, its backward pass twice that, half of it for the inputs
    and half for the weights where a schedule takes them apart. Sending takes no time.
    """
    ends: dict[Action, float] = {}
    waiting = [list(reversed(order)) for order in orders]
    clocks, busy = [0.0] * len(orders), 0.0
    while any(waiting):
        done = len(ends)
        for rank, actions in enumerate(waiting):
            while actions and all(need in ends for need in _needs(actions[-1], len(costs))):
                action = actions.pop()
                start = max(clocks[rank], *(ends[x] for x in _needs(action, len(costs))), 0.0)
                time = costs[action.stage] * (2 if action.kind == "backward" else 1)
                kept = action._replace(kind="inputs") if action.kind == "backward" else action
                clocks[rank] = ends[kept] = start + time
                busy += time
        assert len(ends) > done, "the order of a schedule waits for itself"
    return 1 - busy / (len(orders) * max(clocks))


def _needs(action: Action, stages: int) -> list[Action]:
    kind, stage, micro = action
    if kind == "forward":
        return [Action("forward", stage - 1, micro)] if stage > 0 else []
    if kind == "weights":
        return [Action("inputs", stage, micro)]
    after = [Action("inputs", stage + 1, micro)] if stage + 1 < stages else []
    return [Action("forward", stage, micro), *after]
