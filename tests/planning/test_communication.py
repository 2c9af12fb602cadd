"""Planned communication against the collectives that real ranks run in a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from longspan.attention import Dilated, Heads, Shards
from longspan.attention.context_parallel.kv_exchange import remote_rows
from longspan.config import Run
from longspan.models import new_decoder
from longspan.planning.communication import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    communication,
)
from longspan.planning.communication_in_blocks import _estimated_rows
from longspan.planning.fake_world import fake_world
from longspan.planning.recording import CollectiveRecorder, Group, Total, totals_of
from longspan.runfile import load_run
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import CPU, open_state

OPTIONS = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "data.source=recall",
    "data.recall_pairs=4",
    "data.context=64",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "train.global_batch=4",
    "train.precision=fp32",
    "train.device=cpu",
    "train.compile=false",
]
BF16 = "train.precision=bf16"
MEGATRON = "layout.megatron_sequence_parallel=true"
FULL = "train.activation_checkpointing=full"
FOUR = "model.layers=4"
UNTIED = "model.tie_embeddings=false"
CHUNKS = "train.chunk_tokens=32"
NO_BRANCHES = ["attention.segment_lengths=[]", "attention.dilation_rates=[]"]
DENSE = ["attention.kind=dense", *NO_BRANCHES]
BLOCKS = ["attention.kind=block_sparse", "attention.block_size=8", *NO_BRANCHES]


def run_of(world: int, options: list[str]) -> Run:
    return load_run(None, [*OPTIONS, *options], world=world)


def collectives_of(rank: int, world: int, options: list[str]) -> dict[Group, Total]:
    """The collectives of a step."""
    run = run_of(world, options)
    with open_state(run, rank, world) as (state, data):
        # Pipeline stages meet in their first step, and DDP rebuilds its buckets after it.
        for _ in range(2 if state.mesh.is_ddp else state.mesh.ranks["pipeline"] > 1):
            train_step(state, data, run.train, CPU)
        with CollectiveRecorder() as recorder:
            train_step(state, data, run.train, CPU)
    return recorder.totals()


def collectives_in_a_fake_world(rank: int, world: int, options: list[str]) -> dict[Group, Total]:
    """The same without other processes; what is received is undefined, but its size is not."""
    with fake_world(rank, world):
        return collectives_of(rank, world, options)


def assert_planned(rank: int, world: int, options: list[str], found: dict[Group, Total]) -> None:
    run = run_of(world, options)
    axes = run.layout.resolve(world)
    planned = communication(
        run,
        world,
        pipeline_rank=rank * axes["pipeline"] // world,
        sequence_rank=rank // axes["tensor"] % axes["sequence"],
    )
    # The last one comes after the step.
    totals = totals_of(x for x in planned if x.purpose != "whether to stop or save")
    assert totals.keys() == found.keys()
    for key, total in totals.items():
        assert total.calls == found[key].calls, key
        assert total.bytes == pytest.approx(found[key].bytes, rel=0.01), key


QWEN3 = ["model.family=qwen3", "model.head_dim=24"]
BIASES = ["model.attention_bias=true", "model.mlp_bias=true"]
FAKE = [
    (2, ["layout.zero=1", BF16]),
    (2, ["layout.zero=2", "layout.gradient_compression=bf16"]),
    (3, ["layout.zero=3", BF16, UNTIED, "train.global_batch=6"]),
    (4, ["layout.replicate=2", "layout.shard=2", BF16]),
    (2, ["layout.tensor=2", BF16]),
    (2, ["layout.tensor=2", FULL, UNTIED]),
    (2, ["layout.tensor=2", "model.sub_layer_norm=true"]),
    (2, ["layout.tensor=2", MEGATRON, BF16, FULL]),
    (4, ["layout.tensor=2", "layout.shard=2", MEGATRON, BF16]),
    (4, ["layout.tensor=2", "layout.shard=2", MEGATRON, "layout.zero=1", BF16]),
    (4, ["layout.tensor=2", "layout.replicate=2", "layout.shard=1", "model.sub_layer_norm=true"]),
    (2, ["layout.tensor=2", *QWEN3, BF16, FULL]),
    (4, ["layout.tensor=2", "layout.shard=2", *QWEN3, BF16]),
    (2, ["layout.tensor=2", "model.family=qwen2", MEGATRON]),
    (2, ["layout.tensor=2", *BIASES]),
    (4, ["layout.tensor=2", "layout.shard=2", "model.learnable_sinks=true"]),
    (2, ["layout.tensor=2", *BIASES, MEGATRON]),
    (2, ["layout.zero=3", CHUNKS, FULL]),
    pytest.param(2, ["layout.zero=2", CHUNKS], marks=slow("parity")),
    pytest.param(
        2,
        ["layout.tensor=2", "model.sub_layer_norm=true", CHUNKS, BF16, FULL],
        marks=slow("parity"),
    ),
    (2, ["layout.tensor=2", "model.linear=sketched", "model.sketch.rank=3", BF16, FULL]),
    (
        4,
        ["layout.tensor=2", "model.linear=low_rank", "model.sketch.layers=*.attention.[kq]*"],
    ),
]
REAL = [  # where a rank needs what the others send
    (2, ["layout.replicate=2", "layout.shard=1"]),
    (2, ["layout.replicate=2", "layout.shard=1", "layout.gradient_compression=bf16", UNTIED]),
    (2, ["layout.pipeline=2"]),
    (4, ["layout.pipeline=2", "layout.shard=2", BF16]),
    (4, ["layout.pipeline=2", "layout.shard=2", "layout.schedule=interleaved", FOUR, UNTIED]),
    (4, ["layout.pipeline=4", "layout.schedule=gpipe", FOUR, BF16]),
    (4, ["layout.pipeline=2", "layout.replicate=2", "layout.shard=1", "layout.schedule=zbv", FOUR]),
    (4, ["layout.pipeline=2", "layout.tensor=2", MEGATRON]),
    (2, ["layout.sequence=2", BF16]),
    (4, ["layout.sequence=4", "layout.zero=1", FULL]),
    (4, ["layout.sequence=2", "layout.tensor=2"]),
    (4, ["layout.sequence=2", "layout.pipeline=2"]),
    (4, ["layout.sequence=4", *DENSE, "model.kv_heads=1", BF16, "train.micro_batch=2"]),
    (4, ["layout.sequence=4", *DENSE, FULL]),
    (2, ["layout.sequence=2", *BLOCKS, "attention.local_window=16"]),
    (2, ["layout.sequence=2", CHUNKS, FULL]),
]


def ids(value: Any) -> str:
    return "-".join(value).replace("layout.", "") if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("world", "options"), FAKE, ids=ids)
@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_rank_communicates_what_is_planned(world: int, options: list[str]) -> None:
    found = collectives_in_a_fake_world(world - 1, world, options)
    assert_planned(world - 1, world, options, found)


@pytest.mark.parametrize(("world", "options"), REAL, ids=ids)
def test_ranks_communicate_what_is_planned(ranks: Ranks, world: int, options: list[str]) -> None:
    if "layout.schedule=zbv" in options and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13")
    for rank, found in enumerate(ranks.run(collectives_of, world, options)):
        assert_planned(rank, world, options, found)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_torch_counts_as_many_collectives() -> None:
    """CommDebugMode, which does not see inside DDP and ring attention."""
    run = run_of(4, ["layout.replicate=2", "layout.shard=2"])
    with fake_world(0, 4), open_state(run, 0, 4) as (state, data), CommDebugMode() as counted:
        train_step(state, data, run.train, CPU)
    planned = communication(run, 4)
    assert sum(x.calls for x in planned) - 1 == counted.get_total_counts()


def test_gradients_of_replicas_are_reduced_in_the_buckets_of_ddp() -> None:
    run = load_run(None, ["model.preset=125m", "layout.replicate=8", "layout.shard=1"], world=8)
    model = new_decoder(run)
    parameters = [torch.empty_like(p) for p in model.parameters()]
    embedding, *rest = parameters
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [*reversed(rest), embedding], [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    )
    planned = [x for x in communication(run, 8) if x.purpose == "gradients"]
    assert sum(x.calls for x in planned) == len(buckets)
    assert sum(x.step_bytes for x in planned) == sum(p.nbytes for p in parameters)


def test_powersgd_reduces_two_factors_of_each_matrix() -> None:
    """Of rank 1, by hand: n + m elements of an n x m matrix, and norms as they are."""
    run = run_of(
        2, ["layout.replicate=2", "layout.shard=1", "layout.gradient_compression=powersgd"]
    )
    planned = [x for x in communication(run, 2) if "compressed" in x.purpose]
    matrices = 4 * (32 + 32) + 3 * (32 + run.model.ffn)
    elements = 2 * (matrices + 2 * 32) + 32 + run.model.vocab + 32
    assert sum(x.step_bytes for x in planned) == 4 * elements


@pytest.mark.parametrize("options", [[], [*DENSE, "model.kv_heads=1"], [*BLOCKS]], ids=ids)
def test_by_default_the_rank_that_exchanges_most_is_planned(options: list[str]) -> None:
    run = run_of(4, ["layout.sequence=4", *options])

    def exchanged(rank: int | None) -> int:
        planned = communication(run, 4, sequence_rank=rank)
        return sum(x.step_bytes for x in planned if x.axis == "sequence")

    assert exchanged(None) == max(map(exchanged, range(4)))


@pytest.mark.parametrize("rates", [(1, 4, 16), (1, 6, 4), (2, 4)])
def test_the_rows_of_long_contexts_are_estimated_as_they_are_counted(
    rates: tuple[int, ...],
) -> None:
    pattern = Dilated(tuple(384 * 2**i * r for i, r in enumerate(rates)), rates)
    shards, rank = Shards.even(1 << 17, 16), 15
    for group in (1, 4):
        (rows,) = remote_rows(pattern, shards, rank, Heads(group, 1), True)
        found = _estimated_rows(pattern, shards.boundaries[rank], group)
        if all(b % a == 0 for a, b in pairwise(rates)):
            assert found == pytest.approx(len(rows), rel=0.01)
        else:  # an upper bound
            assert len(rows) <= found * 1.01
            assert found <= 1.5 * len(rows)
