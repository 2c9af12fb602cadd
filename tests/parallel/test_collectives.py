"""The number of collectives in a step: counted, not assumed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from longspan.runfile import load_run
from longspan.training.step import train_step
from tests.collectives import Collectives
from tests.harness import Ranks
from tests.steps import CPU, open_state

LAYERS = 3
SMALL = [
    "model.hidden=32",
    f"model.layers={LAYERS}",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.precision=fp32",
    "train.device=cpu",
    "train.compile=false",
    "train.grad_clip=0",
]


def collectives_of_a_step(rank: int, world: int, overrides: list[str]) -> dict[str, int]:
    run = load_run(None, [*SMALL, *overrides], world=world)
    with open_state(run, rank, world) as (state, data):
        train_step(state, data, run.train, CPU)  # the first one also initialises
        with Collectives() as mode, torch.profiler.profile() as profile:
            train_step(state, data, run.train, CPU)
    gloo = Counter(e.name for e in profile.events() if e.name.startswith("gloo:"))
    dispatched = {name: count for name, count in mode.counts.items() if count}
    return {**dispatched, **gloo}


def test_ddp(ranks: Ranks) -> None:
    overrides = ["layout.replicate=2", "layout.shard=1", "train.global_batch=4"]
    counts = ranks.run(collectives_of_a_step, 2, overrides)[0]
    bucket = 1  # all gradients, after the last of two micro-batches (gradient accumulation)
    assert counts["gloo:all_reduce"] == bucket + PER_STEP


BLOCKS_AND_ROOT = LAYERS + 1
PER_STEP = 2
"""All-reduces of every step: the loss and the gradient norm."""


@pytest.mark.parametrize(
    ("overrides", "micro_batches", "gathers", "scatters"),
    [
        # ZeRO-3 all-gathers a block for its forward and again for its backward pass.
        (["layout.zero=3"], 1, 2 * LAYERS + 1, BLOCKS_AND_ROOT),
        (["layout.zero=2"], 1, BLOCKS_AND_ROOT, BLOCKS_AND_ROOT),
        (["layout.zero=3"], 2, 2 * (2 * LAYERS + 1), 2 * BLOCKS_AND_ROOT),
        (["layout.zero=2"], 2, 2 * BLOCKS_AND_ROOT, 2 * BLOCKS_AND_ROOT),
        # ZeRO-1 reduce-scatters gradients once a step.
        (["layout.zero=1"], 2, None, BLOCKS_AND_ROOT),
    ],
)
def test_zero_stages(
    ranks: Ranks, overrides: list[str], micro_batches: int, gathers: int | None, scatters: int
) -> None:
    batch = f"train.global_batch={2 * micro_batches}"
    counts = ranks.run(collectives_of_a_step, 2, [*overrides, batch])[0]
    if gathers is not None:
        assert counts["_allgather_base"] == gathers
    assert counts["_reduce_scatter_base"] == scatters
    assert counts["allreduce"] == PER_STEP


def reduced_bytes(rank: int, world: int, overrides: list[str]) -> tuple[int, int]:
    """Bytes of gradients that a step reduce-scatters and all-reduces."""
    run = load_run(None, [*SMALL, *overrides], world=world)
    with open_state(run, rank, world) as (state, data), Collectives() as mode:
        train_step(state, data, run.train, CPU)
    return mode.bytes["_reduce_scatter_base"], mode.bytes["allreduce"]


HYBRID = ["layout.replicate=2", "layout.shard=2", "train.global_batch=4"]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ["layout.zero=1", "train.global_batch=4"]),
        (4, HYBRID),
    ],
)
def test_bf16_halves_the_bytes_of_sharded_gradients(
    ranks: Ranks, world: int, overrides: list[str]
) -> None:
    exact, all_reduced = ranks.run(reduced_bytes, world, overrides)[0]
    options = [*overrides, "layout.gradient_compression=bf16"]
    halved, all_halved = ranks.run(reduced_bytes, world, options)[0]
    assert exact > 0
    assert halved == exact // 2
    if overrides is HYBRID:  # what was reduce-scattered, and two float32 numbers per step
        other = all_reduced - exact
        assert other < 100
        assert all_halved - other == exact // 2


def test_tensor_parallel(ranks: Ranks) -> None:
    counts = ranks.run(collectives_of_a_step, 2, ["layout.tensor=2"])[0]
    per_block = 2 + 2  # outputs in the forward pass, gradients of inputs in the backward pass
    loss = 3  # maximum and sum of the softmax, gradient of the head's input
    embedding, norm = 1, 1
    assert {name: n for name, n in counts.items() if not name.startswith("gloo:")} == {
        "all_reduce": LAYERS * per_block + embedding,  # by DTensor
        "allreduce": loss + norm,
    }


def test_tensor_parallel_sketched_layers(ranks: Ranks) -> None:
    sketched = ["model.linear=sketched", "model.sketch.terms=2", "model.sketch.rank=3"]
    counts = ranks.run(collectives_of_a_step, 2, ["layout.tensor=2", *sketched])[0]
    per_block = 2 * 7 + 2 * 2  # seven layers and two norms, forward and backward
    final_norm = 2
    loss, norm = 3, 1
    assert {name: n for name, n in counts.items() if not name.startswith("gloo:")} == {
        "all_reduce": LAYERS * per_block + final_norm,
        "reduce_scatter_tensor": 1,  # the embedding, which is split by rows
        "all_gather_into_tensor": 2,  # its gradient; the head's input
        "allreduce": loss + norm,
    }


DENSE = [
    "attention.kind=dense",
    "attention.segment_lengths=[]",
    "attention.dilation_rates=[]",
    "model.kv_heads=1",
]
STRATEGIES = {  # all-to-alls per block: keys and values, then their gradients
    "sparse_kv": (
        2,
        ["attention.segment_lengths=[64]", "attention.dilation_rates=[2]"],
        2,
    ),
    "ring": (2, DENSE, 3),  # keys and values again in the backward pass
    "ulysses": (4, [*DENSE, "model.heads=4", "model.kv_heads=4"], 8),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_sequence_parallel(ranks: Ranks, strategy: str, mode: str) -> None:
    """Activation checkpointing repeats no communication."""
    world, overrides, per_block = STRATEGIES[strategy]
    options = [f"layout.sequence={world}", f"train.activation_checkpointing={mode}", *overrides]
    counts = ranks.run(collectives_of_a_step, world, options)[0]
    found = sum(n for name, n in counts.items() if name.startswith("gloo:all_to_all"))
    assert found == per_block * LAYERS
