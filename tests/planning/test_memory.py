"""Memory of model and optimizer: the plan against what ranks hold."""

from __future__ import annotations

import pytest
import torch

from longspan.config import Run
from longspan.data import open_source
from longspan.engines import Native
from longspan.parallel.placement import placement
from longspan.parallel.world import World
from longspan.planning import states_of
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.loop import train_step
from longspan.training.memory import usage
from longspan.training.state import State
from tests.harness import Ranks

OPTIONS = [
    "model.hidden=64",
    "model.layers=4",
    "model.heads=4",
    "model.vocab=68",
    "data.source=recall",
    "data.context=8",
    "data.recall_pairs=1",
    "attention.segment_lengths=[8]",
    "attention.dilation_rates=[1]",
    "train.global_batch=8",
    "train.precision=fp32",
    "train.device=cpu",
    "train.compile=false",
]


def run_of(world: int, options: list[str]) -> Run:
    return load_run(None, [*OPTIONS, *options], world=world)


def held_by(rank: int, world: int, options: list[str]) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, moments and signs, as the second optimizer step begins."""
    run, device = run_of(world, options), torch.device("cpu")
    source = open_source(run.data, run.model)
    found: list[dict[str, int]] = []
    with placement(run.layout, World(rank, world, rank), device) as placed:
        engine = Native(run, placed, device)
        state = State(engine, placed, Guard(0.0, device))
        train_step(state, placed, run, source, device)
        clip = placed.clip_gradients

        def measure(*args: object) -> torch.Tensor:
            norm = clip(*args)  # type: ignore[arg-type]
            found.append(usage(state, device))
            return norm

        placed.clip_gradients = measure  # type: ignore[method-assign]
        train_step(state, placed, run, source, device)
        signs = sum(x.nbytes for x in engine.model.buffers())
    (held,) = found
    steps = 4 * len(engine.optimizer.state)  # each parameter has its count of steps
    return held["parameters"], held["gradients"], held["optimizer state"] - steps, signs


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, []),
        (1, ["train.optimizer=adamw8bit"]),
        (2, ["layout.replicate=2", "layout.shard=1", "model.linear=sketched"]),
        (2, ["layout.zero=3", "model.linear=sketched", "model.sketch.keep=0.3"]),
        (4, ["layout.zero=2"]),
        (2, ["layout.tensor=2", "model.linear=sketched"]),
        (4, ["layout.tensor=2", "layout.shard=2"]),
        (4, ["layout.pipeline=2", "layout.tensor=2", "model.tie_embeddings=false"]),
        (2, ["layout.pipeline=2", "layout.schedule=zbv", "model.linear=low_rank"]),
        (2, ["layout.sequence=2"]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
def test_a_rank_holds_what_is_planned(ranks: Ranks, world: int, options: list[str]) -> None:
    run = run_of(world, options)
    stages = states_of(run, world)
    planned = [(s.parameters, s.gradients, s.optimizer, s.signs) for s in stages]
    measured = ranks.run(held_by, world, options)
    others = world // len(stages)
    assert measured[::others] == planned  # the first of each stage, which has the largest share
    for rank, held in enumerate(measured):
        assert all(x <= y for x, y in zip(held, planned[rank // others], strict=True))


def test_a_world_of_thousands_is_planned_at_once() -> None:
    options = ["model.preset=13b", "layout.tensor=8", "layout.pipeline=4", "layout.sequence=4"]
    run = load_run(None, [*options, "train.global_batch=128", "data.context=65536"], world=4096)
    dense = states_of(run, 4096)
    assert len(dense) == 4
    alone = load_run(None, ["model.preset=13b", "data.context=65536"])
    (whole,) = states_of(alone, 1)
    parts = 8 * 32 * 4  # of each stage: by tensor, shard and sequence
    ratio = parts * sum(s.parameters for s in dense) / whole.parameters
    assert 1 <= ratio < 1.04  # the first rank's share is rounded up: 14 of 1,728 rows, not 13.5


def test_offloaded_states_are_not_on_the_device() -> None:
    here, away = (states_of(run_of(2, x), 2)[0] for x in ([], ["layout.offload=true"]))
    assert away.on_device == here.on_device - away.offloaded == here.passing
    assert away.offloaded == here.parameters + here.gradients + here.optimizer


def test_stage_1_adds_up_whole_gradients() -> None:
    several, one = (
        states_of(run_of(2, ["layout.zero=1", f"train.global_batch={n}"]), 2)[0] for n in (4, 2)
    )
    assert several.gradients == pytest.approx(2 * one.gradients, rel=0.01)
