"""Every layout compared with one process: losses, gradient norms, weights, validation loss.

Most layouts are compared in-process over a few steps; a dozen train whole runs, with checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import load
from longspan.config import Run
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import Steps, assert_same_steps, run_steps

STEPS = 3
COMPARED = 2
"""Steps that are compared without a run folder."""
BATCH = 8
OPTIONS = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.source=recall",
    "data.recall_pairs=8",
    "data.context=64",
    f"train.steps={STEPS}",
    "train.warmup_steps=2",
    "train.lr=0.01",
    "train.eps=1e-6",  # with 1e-8 Adam turns the rounding of a gradient near zero into a full step
    "train.grad_clip=0.5",
    f"train.global_batch={BATCH}",
    "train.eval_samples=2",
    "track.log_every=1",
    "track.prompt=",
]


def run_of(world: int, *overrides: str) -> Run:
    return load_run(None, [*OPTIONS, *overrides], world=world)


def steps_of(rank: int, world: int, overrides: list[str]) -> Steps:
    return run_steps(rank, world, run_of(world, *overrides), COMPARED)


@cache
def single_process_steps(*settings: str) -> Steps:
    """The same steps in one process, with the settings that a layout must not change."""
    return run_steps(0, 1, run_of(1, *settings), COMPARED)


def ids(x: Any) -> str:
    return "-".join(x) if isinstance(x, list) else str(x)


MEGATRON = "layout.megatron_sequence_parallel=true"
LAYOUTS = [
    (2, ["layout.replicate=2", "layout.shard=1"]),
    (4, ["layout.replicate=4", "layout.shard=1"]),
    (2, ["layout.zero=1"]),
    (2, ["layout.zero=2"]),
    (2, ["layout.zero=3"]),
    (4, ["layout.zero=3"]),
    (4, ["layout.replicate=2", "layout.shard=2"]),
    (2, ["layout.tensor=2"]),
    (4, ["layout.tensor=4"]),
    (4, ["layout.tensor=2", "layout.shard=2"]),
    (2, ["layout.tensor=2", MEGATRON]),
    (4, ["layout.tensor=2", MEGATRON, "layout.shard=2"]),
    *[
        (depth, [f"layout.pipeline={depth}", f"layout.schedule={schedule}"])
        for depth in (2, 4)
        for schedule in ("gpipe", "1f1b", "interleaved", "zbv")
    ],
    (4, ["layout.pipeline=2", "layout.shard=2", "layout.zero=2"]),
    (4, ["layout.pipeline=2", "layout.shard=2", "layout.schedule=interleaved"]),
    (4, ["layout.pipeline=2", "layout.shard=2", "layout.zero=2", "layout.schedule=zbv"]),
    (4, ["layout.pipeline=2", "layout.tensor=2", MEGATRON]),
    (2, ["layout.sequence=2"]),
    (4, ["layout.sequence=4", "layout.zero=1"]),
    (8, ["layout.sequence=8"]),
    (4, ["layout.sequence=2", "layout.replicate=2"]),
    (4, ["layout.sequence=2", "layout.tensor=2", MEGATRON]),
]
LONGER = [
    (4, ["layout.zero=1"]),
    (4, ["layout.zero=2"]),
    (4, ["layout.tensor=2", "layout.replicate=2"]),
    (8, ["layout.tensor=2", "layout.replicate=2", "layout.shard=2"]),
    (4, ["layout.tensor=4", MEGATRON]),
    (4, ["layout.pipeline=2", "layout.replicate=2"]),
    (4, ["layout.pipeline=2", "layout.replicate=2", "layout.schedule=zbv"]),
    (4, ["layout.sequence=2", "layout.pipeline=2", "layout.schedule=interleaved"]),
    (
        16,
        ["layout.pipeline=2", "layout.sequence=2", "layout.tensor=2", "layout.shard=2", MEGATRON],
    ),
]


UNTIED = [
    (4, ["layout.replicate=4", "layout.shard=1"]),
    (2, ["layout.zero=2"]),
    (2, ["layout.tensor=2"]),
    (4, ["layout.tensor=4", MEGATRON]),
    (2, ["layout.pipeline=2", "layout.schedule=gpipe"]),
    (4, ["layout.pipeline=4", "layout.schedule=interleaved"]),
    (4, ["layout.pipeline=2", "layout.shard=2", "layout.zero=2", "layout.schedule=zbv"]),
    (4, ["layout.pipeline=2", "layout.tensor=2", MEGATRON]),
    (4, ["layout.sequence=4", "layout.zero=1"]),
]
"""With an untied head: each axis and schedule, beside the whole runs below, which are untied."""


@pytest.mark.parametrize(
    ("world", "layout", "tied"),
    [
        *[(*case, "true") for case in LAYOUTS],
        *[(*case, "false") for case in UNTIED],
        *[pytest.param(*case, "true", marks=slow("parity")) for case in LONGER],
    ],
    ids=ids,
)
def test_a_layout_takes_the_same_steps(
    ranks: Ranks, world: int, layout: list[str], tied: str
) -> None:
    if "layout.schedule=zbv" in layout and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13")
    given = load_run(None, layout, world=None).layout
    axes = given.resolve(world)
    layers = max(2, axes["pipeline"] * given.stages_per_rank)
    model = (f"model.tie_embeddings={tied}", f"model.layers={layers}")
    accumulation = max(2, axes["pipeline"])
    micro_batch = BATCH // (accumulation * axes["replicate"] * axes["shard"])
    options = [*layout, *model, f"train.micro_batch={micro_batch}"]
    assert_same_steps(ranks.run(steps_of, world, options), single_process_steps(*model))


PATTERNS = {
    "dense": ["attention.kind=dense"],
    "dense with one key head": ["attention.kind=dense", "model.kv_heads=1"],
    "block sparse": [
        "attention.kind=block_sparse",
        "attention.block_size=8",
        "attention.local_window=16",
        "attention.density=0.2",
    ],
    "window": [
        "attention.kind=window",
        "attention.window=20",
        "attention.sinks=3",
    ],
    "3 window and 1 dilated": [
        "model.layers=4",
        "model.learnable_sinks=true",
        'attention.layers=[{kind="window",repeat=3},{kind="dilated",dilation_rates=[1,4]}]',
        "attention.segment_lengths=[16,64]",
        "attention.window=20",
        "attention.sinks=3",
    ],
    "dilated block sparse": [
        "attention.kind=dilated_block_sparse",
        "attention.segment_lengths=[16,64]",
        "attention.dilation_rates=[1,4]",
        "attention.block_size=4",
        "attention.local_window=8",
    ],
}
NO_BRANCHES = ["attention.segment_lengths=[]", "attention.dilation_rates=[]"]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *[(kind, ["layout.sequence=4"]) for kind in PATTERNS],
        ("dense", ["layout.tensor=4"]),
        pytest.param("block sparse", ["layout.tensor=4"], marks=slow("parity")),
        pytest.param("dilated block sparse", ["layout.tensor=4"], marks=slow("parity")),
        ("dense with one key head", ["layout.sequence=2", "layout.pipeline=2"]),
        ("3 window and 1 dilated", ["layout.tensor=2", "layout.pipeline=2"]),
        ("dense", ["layout.sequence=2", "layout.tensor=2", MEGATRON]),
    ],
    ids=ids,
)
def test_other_patterns_take_the_same_steps(ranks: Ranks, kind: str, layout: list[str]) -> None:
    pattern = (*NO_BRANCHES, *PATTERNS[kind])
    options = [*layout, *pattern, "train.micro_batch=4"]
    assert_same_steps(ranks.run(steps_of, 4, options), single_process_steps(*pattern))


LINEARS = {
    "sketched": ["model.linear=sketched", "model.sketch.terms=2", "model.sketch.rank=2"],
    "low rank": ["model.linear=low_rank", "model.sketch.keep=0.4"],
    "sketched mlp": ["model.linear=sketched", "model.sketch.layers=*.mlp.*"],
    "some sketched": [
        "model.linear=sketched",
        'model.sketch.ranks={"*.key"=0, "*.gate"=0, "*.down"=0, "*"=3}',
    ],
    "sub-layer norms": ["model.sub_layer_norm=true"],
    "sketched with sub-layer norms": ["model.linear=sketched", "model.sub_layer_norm=true"],
}


LONGER_LINEARS = [
    ("sketched", 4, ["layout.tensor=2", "layout.pipeline=2"]),
    ("sketched", 4, ["layout.tensor=2", "layout.replicate=2"]),
    ("sketched", 4, ["layout.tensor=4"]),
    ("sub-layer norms", 2, ["layout.tensor=2"]),
]


@pytest.mark.parametrize(
    ("linear", "world", "layout"),
    [
        ("sketched", 2, ["layout.replicate=2", "layout.shard=1"]),
        ("sketched", 2, ["layout.zero=3"]),
        ("sketched", 2, ["layout.tensor=2"]),
        ("sketched", 2, ["layout.pipeline=2"]),
        ("sketched", 4, ["layout.tensor=2", "layout.shard=2"]),
        ("sketched", 4, ["layout.replicate=2", "layout.shard=2"]),
        ("sketched", 4, ["layout.tensor=2", "layout.sequence=2"]),
        ("low rank", 4, ["layout.tensor=2", "layout.shard=2"]),
        ("sketched mlp", 2, ["layout.tensor=2"]),
        ("some sketched", 2, ["layout.tensor=2"]),
        ("sub-layer norms", 4, ["layout.tensor=2", "layout.shard=2"]),
        ("sketched with sub-layer norms", 2, ["layout.tensor=2"]),
        *[pytest.param(*case, marks=slow("parity")) for case in LONGER_LINEARS],
    ],
    ids=ids,
)
def test_other_linear_layers_take_the_same_steps(
    ranks: Ranks, linear: str, world: int, layout: list[str]
) -> None:
    options = [*layout, *LINEARS[linear], "train.micro_batch=2"]
    assert_same_steps(ranks.run(steps_of, world, options), single_process_steps(*LINEARS[linear]))


def steps_compiled(rank: int, world: int, overrides: list[str]) -> Steps:
    torch._dynamo.reset()  # forget other runs in this process, with other shapes
    return run_steps(rank, world, run_of(world, *overrides), 1)


@slow("compile")
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("layout.sequence=2", []),
        ("layout.sequence=2", ["train.activation_checkpointing=selective"]),
        ("layout.tensor=2", LINEARS["sketched mlp"]),
        ("layout.tensor=2", ["train.activation_checkpointing=selective"]),
        ("layout.zero=3", ["train.activation_checkpointing=full", "train.micro_batch=4"]),
    ],
)
def test_blocks_are_compiled_within_a_layout(
    ranks: Ranks, layout: str, settings: list[str]
) -> None:
    run = ["model.layers=1", "train.eval_samples=8", "train.micro_batch=8", *settings]
    options = [layout, "train.compile=true", *run]
    expected = run_steps(0, 1, run_of(1, *run), 1)
    assert_same_steps(ranks.run(steps_compiled, 2, options, timeout=400), expected)


def train_rank(rank: int, world: int, overrides: list[str], run_dir: str, resume: bool) -> float:
    result = train(
        run_of(world, *overrides), Path(run_dir), resume=resume, world=World(rank, world, rank)
    )
    assert result.validation_loss is not None
    return result.validation_loss


def trained(run_dir: Path, last: int = STEPS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step (steps, 2), and the final weights."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    weights = load(run_dir / "checkpoints" / f"step-{last:08d}", "model")
    return torch.tensor(steps, dtype=torch.float64), weights


def assert_same_run(run_dir: Path, expected: Path) -> None:
    (steps, weights), (expected_steps, expected_weights) = trained(run_dir), trained(expected)
    torch.testing.assert_close(steps, expected_steps, rtol=1e-5, atol=0)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert (weight - expected_weights[name]).norm() <= 1e-4 * expected_weights[name].norm()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run in one process, with the settings that a layout must not change."""

    @cache
    def run_single(*settings: str) -> Path:
        run_dir = tmp_path_factory.mktemp("single") / "run"
        train(run_of(1, *settings), run_dir)
        return run_dir

    return run_single


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.replicate=2", "layout.shard=1"]),
        (2, ["layout.zero=1"]),
        (4, ["layout.zero=3"]),
        (4, ["layout.replicate=2", "layout.shard=2"]),
        (4, ["layout.tensor=2", "layout.shard=2"]),
        (2, ["layout.tensor=2", MEGATRON]),
        (2, ["layout.pipeline=2"]),
        (2, ["layout.pipeline=2", "layout.schedule=interleaved"]),
        (2, ["layout.sequence=2"]),
        pytest.param(
            8, ["layout.pipeline=2", "layout.shard=2", "layout.tensor=2"], marks=slow("parity")
        ),
        pytest.param(
            8, ["layout.sequence=2", "layout.shard=2", "layout.tensor=2"], marks=slow("parity")
        ),
    ],
    ids=ids,
)
def test_a_layout_trains_the_same_run(
    ranks: Ranks, single: Callable[..., Path], tmp_path: Path, world: int, layout: list[str]
) -> None:
    layers = 4 if "layout.schedule=interleaved" in layout else 2
    model, run_dir = [f"model.layers={layers}", "model.tie_embeddings=false"], tmp_path / "run"
    losses = ranks.run(train_rank, world, [*layout, *model], str(run_dir), False)
    assert len(set(losses)) == 1
    assert_same_run(run_dir, single(*model))


def test_a_run_resumes_under_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    whole, resumed, constant = tmp_path / "whole", tmp_path / "resumed", "train.schedule=constant"
    train(run_of(1, constant), whole)
    replicated = ["layout.replicate=2", "layout.shard=1", "train.steps=2"]
    ranks.run(train_rank, 4, ["layout.zero=3", "train.steps=1", constant], str(resumed), False)
    ranks.run(train_rank, 2, [*replicated, constant], str(resumed), True)
    train(run_of(1, constant), resumed, resume=True)
    assert_same_run(resumed, whole)
