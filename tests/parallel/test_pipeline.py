"""How layers are dealt out to stages, and how long ranks wait for each other."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from longspan.models import new_decoder
from longspan.parallel.pipeline import Pipelined
from longspan.parallel.pipeline_schedule import bubble, simple_order, split_layers, stage_costs
from longspan.parallel.placement import placement
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.harness import Ranks


@pytest.mark.parametrize("vocab", [256, 4096, 65536])
@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (9, 4), (7, 5), (4, 4)])
def test_the_costliest_stage_costs_as_little_as_it_can(
    layers: int, stages: int, vocab: int
) -> None:
    run = load_run(None, [f"model.layers={layers}", f"model.vocab={vocab}"])
    found, costs = split_layers(run, stages)
    assert [layer for part in found for layer in part] == list(range(layers))
    first, block, last = stage_costs(run)

    def costliest(borders: tuple[int, ...]) -> float:
        ends = (0, *borders, layers)
        sums = [block * (b - a) for a, b in pairwise(ends)]
        return max(sums[0] + first, *sums[1:-1], sums[-1] + last)

    assert max(costs) == min(map(costliest, combinations(range(1, layers), stages - 1)))
    assert max(costs) == costliest(tuple(part.start for part in found[1:]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 32)])
def test_bubble_is_the_published_one(schedule: str, ranks: int, micro_batches: int) -> None:
    found = bubble(simple_order(schedule, ranks, micro_batches), [1.0] * ranks)
    assert found == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_ranks_wait_for_the_costliest_stage() -> None:
    orders = simple_order("1f1b", 2, 1000)
    assert bubble(orders, [1.0, 3.0]) == pytest.approx(1 / 3, abs=1e-2)


def waiting(rank: int, world: int, schedule: str, micro_batches: int) -> float:
    overrides = [
        f"layout.pipeline={world}",
        f"layout.schedule={schedule}",
        f"train.global_batch={micro_batches}",
        "model.layers=16",
        "model.hidden=16",
    ]
    run = load_run(None, overrides, world=world)
    device = torch.device("cpu")
    with placement(run.layout, World(rank, world, rank), device) as placed:
        module = placed.place(new_decoder(run), run, device)
        assert isinstance(module, Pipelined)
        return bubble(module._orders(), [1.0] * (2 * world))


def test_two_stages_per_rank_halve_the_bubble(ranks: Ranks) -> None:
    found = ranks.run(waiting, 4, "interleaved", 8)
    assert found == pytest.approx([3 / (2 * 8 + 3)] * 4)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")
def test_zero_bubble_waits_least(ranks: Ranks) -> None:
    found = ranks.run(waiting, 4, "zbv", 16)
    assert max(found) < 3 / (2 * 16 + 3)
