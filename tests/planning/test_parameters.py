"""The arithmetic of sharding against what the training code leaves on each rank."""

from __future__ import annotations

import math

import pytest

from longspan.costs import block_shapes, count_parameters
from longspan.models import new_decoder, parameter_shapes
from longspan.planning import memory_per_rank
from longspan.planning.counting import counted_parameters
from longspan.planning.parameters import ModelSplit
from longspan.runfile import load_run

SMALL = [
    "model.hidden=64",
    "model.layers=5",
    "model.heads=4",
    "model.vocab=68",
    "data.context=64",
    "train.global_batch=16",
    "train.precision=bf16",
    "train.compile=false",
]
MLP_LOW_RANK = ["model.linear=low_rank", "model.sketch.layers=blocks.*.mlp.*"]
BY_BLOCK = ['model.sketch.ranks={"blocks.1.*"=3,"blocks.2.mlp.*"=0}', "model.sketch.terms=2"]
QWEN3 = ["model.family=qwen3", "model.head_dim=24", "model.kv_heads=2"]
SINKS = "model.learnable_sinks=true"
BIASES = ["model.attention_bias=true", "model.mlp_bias=true"]


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (1, ["model.linear=sketched"]),
        (2, ["layout.replicate=2", "layout.shard=1"]),
        (3, ["model.vocab=65", "model.ffn=130", "train.global_batch=12"]),  # uneven rows
        (7, ["train.global_batch=14", "model.linear=sketched", "model.sketch.keep=0.3"]),
        (128, ["train.global_batch=128"]),  # more ranks than rows
        (4, ["layout.replicate=2", "layout.shard=2", "layout.zero=2"]),
        (6, ["layout.tensor=2", "layout.shard=3", "train.global_batch=12"]),
        (4, ["layout.tensor=2", "layout.replicate=2", "model.sub_layer_norm=true"]),
        (4, ["layout.tensor=2", "layout.sequence=2", "layout.megatron_sequence_parallel=true"]),
        (8, ["layout.tensor=4", "model.linear=sketched", *BY_BLOCK]),
        (6, ["layout.tensor=2", "model.sub_layer_norm=true", *MLP_LOW_RANK, "layout.sequence=3"]),
        (8, ["layout.pipeline=2", "layout.tensor=2", "model.tie_embeddings=false"]),
        (4, ["layout.pipeline=2", "layout.schedule=zbv", "model.linear=low_rank"]),
        (2, ["layout.pipeline=2", "layout.schedule=interleaved", "model.linear=sketched"]),
        (4, ["layout.tensor=2", *QWEN3]),
        (4, ["layout.tensor=2", "model.family=qwen2", "model.linear=sketched"]),
        (4, ["layout.tensor=2", *BIASES]),
        (2, ["layout.tensor=2", *BIASES, *MLP_LOW_RANK]),
        (6, ["layout.tensor=2", "layout.shard=3", "train.global_batch=12", SINKS]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
def test_ranks_hold_what_the_arithmetic_says(gpus: int, options: list[str]) -> None:
    if "layout.sequence=3" in options:
        options = [*options, "data.context=66"]
    run = load_run(None, [*SMALL, *options], world=gpus)
    split = ModelSplit(run, gpus)
    for rank in {0, 1 % gpus, gpus // 2, gpus - 1}:
        counted = counted_parameters(run, gpus, rank)
        assert sorted(split.parameters(rank)) == sorted(counted.parameters)
        assert split.sign_bytes(split.degrees.coordinates(rank)[0]) == counted.signs


@pytest.mark.parametrize("family", [[], QWEN3, ["model.family=qwen2"], BIASES, [SINKS]], ids=str)
def test_shapes_are_those_of_the_model(family: list[str]) -> None:
    sketched = ["model.linear=sketched", "model.sub_layer_norm=true", *BY_BLOCK]
    run = load_run(None, [*SMALL, *sketched, *family])
    shapes = parameter_shapes(new_decoder(run))
    assert count_parameters(run.model) == sum(map(math.prod, shapes.values()))
    for block in range(5):
        prefix = f"blocks.{block}."
        found = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        assert block_shapes(run.model, block) == found


def test_a_plan_builds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is arithmetic, so that a search can try hundreds of layouts."""
    monkeypatch.setattr("torch.nn.Module.__init__", lambda _: pytest.fail("a module was built"))
    options = ["layout.pipeline=2", "layout.tensor=2", "train.micro_batch=1"]
    assert len(memory_per_rank(load_run(None, [*SMALL, *options], world=16), 16)) == 2
