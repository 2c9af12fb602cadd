"""Which layers each pipeline stage holds, and the bubble of each schedule."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from longspan.attention import patterns_of
from longspan.flops import stage_flops
from longspan.models import new_decoder
from longspan.parallel.apply import materialize, parallelize
from longspan.parallel.mesh import open_mesh
from longspan.parallel.pipeline import PipelinedDecoder
from longspan.parallel.pipeline_schedule import bubble, simple_order, split_layers
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.harness import Ranks


@pytest.mark.parametrize("attention", ["{}", '{kind="dense"}, {kind="window", window=9, repeat=3}'])
@pytest.mark.parametrize("vocab", [256, 4096, 65536])
@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (9, 4), (7, 5), (4, 4)])
def test_the_most_expensive_stage_costs_as_little_as_possible(
    layers: int, stages: int, vocab: int, attention: str
) -> None:
    sizes = [f"model.layers={layers}", f"model.vocab={vocab}"]
    run = load_run(None, [*sizes, f"attention.layers=[{attention}]"])
    flops = stage_flops(run.model, patterns_of(run.attention, layers), run.data.context)
    found, costs = split_layers(layers, flops, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    first, blocks, last = flops

    def most_expensive(boundaries: tuple[int, ...]) -> float:
        ends = (0, *boundaries, layers)
        sums = [sum(blocks[a:b]) for a, b in pairwise(ends)]
        return max(sums[0] + first, *sums[1:-1], sums[-1] + last)

    least = min(map(most_expensive, combinations(range(1, layers), stages - 1)))
    assert max(costs) == pytest.approx(least, rel=1e-12)
    assert max(costs) == most_expensive(tuple(stage.start for stage in found[1:]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 32)])
def test_bubble_is_that_of_the_papers(schedule: str, ranks: int, micro_batches: int) -> None:
    found = bubble(simple_order(schedule, ranks, micro_batches), [1.0] * ranks)
    assert found == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_ranks_wait_for_the_most_expensive_stage() -> None:
    orders = simple_order("1f1b", 2, 1000)
    assert bubble(orders, [1.0, 3.0]) == pytest.approx(1 / 3, abs=1e-2)


def bubble_of(rank: int, world: int, schedule: str, micro_batches: int) -> float:
    overrides = [
        f"layout.pipeline={world}",
        f"layout.schedule={schedule}",
        f"train.global_batch={micro_batches}",
        "model.layers=16",
        "model.hidden=16",
    ]
    run = load_run(None, overrides, world=world)
    device = torch.device("cpu")
    with open_mesh(run.layout, World(rank, world, rank), device) as mesh:
        model = new_decoder(run)
        module = parallelize(model, mesh, run.layout, run.train)
        module = materialize(module, model, mesh, run.layout, run.train, device)
        assert isinstance(module, PipelinedDecoder)
        return bubble(module.actions(), [1.0] * (2 * world))


def test_two_stages_per_rank_halve_the_bubble(ranks: Ranks) -> None:
    found = ranks.run(bubble_of, 4, "interleaved", 8)
    assert found == pytest.approx([3 / (2 * 8 + 3)] * 4)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13")
def test_zero_bubble_has_the_smallest_bubble(ranks: Ranks) -> None:
    found = ranks.run(bubble_of, 4, "zbv", 16)
    assert max(found) < 3 / (2 * 16 + 3)
