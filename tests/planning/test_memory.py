"""Planned memory against what ranks allocate."""

from __future__ import annotations

import gc

import pytest
import torch

from longspan.benchmarks import memory
from longspan.config import Run
from longspan.device import resolve
from longspan.planning import memory_per_rank
from longspan.runfile import load_run
from longspan.training.out_of_memory import memory_by_class
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import CPU, open_state

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


def allocated_by(rank: int, world: int, options: list[str]) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, Adam moments and signs before the second optimizer step."""
    run = run_of(world, options)
    found: list[dict[str, int]] = []
    eager = torch.compiler.set_stance("force_eager")  # torchao compiles its optimizer for a minute
    with eager, open_state(run, rank, world) as (state, data):
        engine = state.engine
        train_step(state, data, run.train, CPU)

        def measure(*_: object) -> None:
            found.append(memory_by_class(state, CPU))

        engine.optimizer.register_step_pre_hook(measure)
        train_step(state, data, run.train, CPU)
        signs = sum(x.nbytes for x in engine.model.buffers())
    (used,) = found
    # One step counter per parameter that AdamW updates.
    steps = 4 * sum("step" in state for state in engine.optimizer.state.values())
    return used["parameters"], used["gradients"], used["optimizer state"] - steps, signs


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
        pytest.param(
            4, ["layout.tensor=2", "layout.shard=2", "train.optimizer=muon"], marks=slow("parity")
        ),
        pytest.param(
            4, ["layout.tensor=2", "layout.shard=2", "model.lora.rank=6"], marks=slow("parity")
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
def test_ranks_allocate_what_is_planned(ranks: Ranks, world: int, options: list[str]) -> None:
    run = run_of(world, options)
    stages = memory_per_rank(run, world)
    planned = [(s.parameters, s.gradients, s.optimizer, s.signs) for s in stages]
    measured = ranks.run(allocated_by, world, options)
    per_stage = world // len(stages)
    assert measured[::per_stage] == planned  # the first rank of a stage has the largest shard
    for rank, used in enumerate(measured):
        assert all(x <= y for x, y in zip(used, planned[rank // per_stage], strict=True))


def test_thousands_of_ranks_can_be_planned() -> None:
    options = ["model.preset=13b", "layout.tensor=8", "layout.pipeline=4", "layout.sequence=4"]
    run = load_run(None, [*options, "train.global_batch=128", "data.context=65536"], world=4096)
    dense = memory_per_rank(run, 4096)
    assert len(dense) == 4
    one = load_run(None, ["model.preset=13b", "data.context=65536"])
    (unsharded,) = memory_per_rank(one, 1)
    shards = 8 * 32 * 4  # per stage: tensor, shard and sequence
    ratio = shards * sum(s.parameters for s in dense) / unsharded.parameters
    assert 1 <= ratio < 1.04  # the first shard is rounded up: 14 of 1,728 rows, not 13.5


@pytest.mark.parametrize("world", [1, 2])
def test_offloaded_memory_is_not_on_the_device(world: int) -> None:
    resident, offloaded = (
        memory_per_rank(run_of(world, x), world)[0] for x in ([], ["layout.offload=true"])
    )
    assert not {"parameters", "gradients", "optimizer state"} & offloaded.peak.keys()
    gone = offloaded.start, offloaded.save
    assert (resident.parameters, resident.save, *gone) == (
        resident.start,
        resident.parameters + resident.optimizer,
        0,
        0,
    )
    assert offloaded.offloaded == sum((resident.parameters, resident.gradients, resident.optimizer))


def test_offloaded_activations_are_in_cpu_memory_but_for_those_under_way() -> None:
    options = ["model.layers=8", "train.activation_checkpointing=full", "train.micro_batch=2"]
    plain, offloaded = (
        memory_per_rank(run_of(1, [*options, f"train.offload_activations={x}"]), 1)[0]
        for x in ("false", "true")
    )
    inputs = plain.kept["block inputs"]
    assert offloaded.offloaded == inputs
    assert "activations" not in offloaded.peak or offloaded.peak["activations"] < inputs / 8
    more = offloaded.peak["block workspace"] - plain.peak["block workspace"]
    assert more == 4 * inputs // 8  # two that wait and two that are copied


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "options"),
    [(8, []), (8, ["layout.offload=true"]), (1, ["layout.offload=true"])],
    ids=["resident", "offloaded", "one process offloaded"],
)
def test_on_a_gpu_a_step_needs_the_planned_memory(world: int, options: list[str]) -> None:
    """Rank 0 of a fake world; with offload the optimizer runs on the CPU."""
    gc.collect()  # what earlier tests leave would count as freed by this one
    run = load_run(None, [*memory.OPTIONS, "train.global_batch=8", *options], world=world)
    run = resolve(run, torch.device("cuda"))
    peak, between = memory.measure_memory(run, world, steps=20)
    planned = memory_per_rank(run, world)[0]
    assert peak == pytest.approx(planned.allocated - planned.peak["library workspaces"], rel=0.1)
    assert between < planned.on_device


def test_zero_1_accumulates_unsharded_gradients() -> None:
    several, one = (
        memory_per_rank(run_of(2, ["layout.zero=1", f"train.global_batch={n}"]), 2)[0]
        for n in (4, 2)
    )
    assert several.gradients == pytest.approx(2 * one.gradients, rel=0.01)


def test_gradients_reduced_in_bf16_take_half_the_buffer() -> None:
    sizes = ["model.hidden=256", "model.layers=2", "train.global_batch=2", "layout.shard=2"]
    exact, halved = (
        memory_per_rank(run_of(2, [*sizes, f"layout.gradient_compression={method}"]), 2)[0]
        for method in ("none", "bf16")
    )
    block = 4 * 256**2 + 3 * 256 * 768 + 2 * 256  # attention, gated MLP, two norms
    saved = exact.peak["transient buffers"] - halved.peak["transient buffers"]
    assert saved == 2 * block
    assert exact.gradients == halved.gradients
