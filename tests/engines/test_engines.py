"""Every engine runs the same steps, and resumes from another's checkpoint."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import checkpoint
from longspan.checkpoint import Region
from longspan.config import Run
from longspan.engines import Engine
from longspan.engines.optimizer import set_learning_rate
from longspan.engines.settings import zero_stage
from longspan.models.initial import initial_weight
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training import train
from longspan.training.step import train_step
from tests.collectives import Collectives
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import CPU, open_state

STEPS = 5
OPTIONS = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "model.ffn=53",  # half of such a matrix ends within a row
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.source=recall",
    "data.recall_pairs=8",
    "data.context=64",
    "train.warmup_steps=1",
    "train.lr=0.01",
    "train.eps=1e-6",
    "train.grad_clip=0.5",
    "train.schedule=constant",
    "train.global_batch=8",
    "train.micro_batch=2",  # two micro-batches on each of two ranks
    "train.eval_samples=2",
    "train.eval_every=2",
    "track.log_every=1",
    "track.prompt=",
]
DEEPSPEED = ["engine.name=deepspeed", "engine.param_persistence_threshold=0"]
OFFLOADED = ["engine.offload_optimizer=cpu", "engine.offload_param=cpu"]
CASES = {
    "native 0": ["layout.zero=0"],
    "zero 0": [*DEEPSPEED, "layout.zero=0"],
    "zero 1": [*DEEPSPEED, "layout.zero=1"],
    "zero 2": [*DEEPSPEED, "layout.zero=2"],
    "zero 3": [*DEEPSPEED, "layout.zero=3"],
    "zero 3, persistent parameters": [
        "engine.name=deepspeed",
        "engine.param_persistence_threshold=100",
    ],
    "zero 1, offloaded": [*DEEPSPEED, "layout.zero=1", OFFLOADED[0]],
    "zero 2, offloaded": [*DEEPSPEED, "layout.zero=2", OFFLOADED[0], "engine.overlap_comm=true"],
    "zero 3, offloaded": [
        *DEEPSPEED,
        "layout.zero=3",
        *OFFLOADED,
        "engine.deepspeed_config={folder}/ds.json",
    ],
    "zero 3, activation checkpointing": [
        *DEEPSPEED,
        "layout.zero=3",
        "train.activation_checkpointing=full",
    ],
    "zero 2, selective": [*DEEPSPEED, "layout.zero=2", "train.activation_checkpointing=selective"],
    "accelerate": ["engine.name=accelerate", "layout.zero=0"],
}
ADDED = {
    "zero_optimization": {
        "offload_param": {"pin_memory": True},
        "offload_optimizer": {"pin_memory": True},
        "sub_group_size": 1e9,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "allgather_partitions": True,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "wall_clock_breakdown": False,
}
"""A DeepSpeed file of settings that are passed on."""
CHAIN = [
    (2, [*DEEPSPEED, "layout.zero=3"]),
    (3, ["engine.name=accelerate", "layout.zero=0"]),
    (4, [*DEEPSPEED, "layout.zero=2"]),
]
"""The last step, and the engine; one native process runs the first step and the last."""
CHAINS = {
    "chain": [],
    "frozen chain": ["train.ema=0.6", 'train.freeze=["embedding.*","blocks.0.mlp.*","norm.*"]'],
}


def run_of(world: int, *overrides: str) -> Run:
    return load_run(None, [*OPTIONS, f"train.steps={STEPS}", *overrides], world=world)


def set_launcher_environment(rank: int, world: int) -> None:
    """Set the variables that a launcher sets and the engines read."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in values.items()})


def train_all(rank: int, world: int, folder: str) -> None:
    """All in one process group: DeepSpeed caches its first one for good."""
    set_launcher_environment(rank, world)
    for name, case in CASES.items():
        options = [option.format(folder=folder) for option in case]
        train(run_of(world, *options), Path(folder, name), world=World(rank, world, rank))
    for name, settings in CHAINS.items():
        for steps, options in CHAIN:
            run = run_of(world, *settings, *options, f"train.steps={steps}")
            train(run, Path(folder, name), resume=True, world=World(rank, world, rank))


def skip_steps(rank: int, world: int, options: list[list[str]]) -> list[list[float]]:
    """How far this rank's weights move in four steps of each engine, two of which are skipped."""
    set_launcher_environment(rank, world)
    return [_skip_steps(rank, world, run_of(world, *each)) for each in options]


def _skip_steps(rank: int, world: int, run: Run) -> list[float]:
    with open_state(run, rank, world) as (state, data):
        engine = state.engine
        set_learning_rate(engine.optimizer, 0.01)
        batch, _ = data.read(range(8), range(8))
        moved = []
        # A step, a skipped one, one with NaN gradients, a step.
        for scale, skip in ((1e-3, 0.0), (1e-3, 1.0), (float("nan"), 0.0), (1e-3, 0.0)):
            before = _weights(engine)
            engine.backward(batch, torch.tensor(scale))
            engine.step(partial(_must_skip, skip))
            moved.append(float((_weights(engine) - before).norm()))
        return moved


def reduce_gradients(
    rank: int, world: int, counted: list[list[str]], moved: list[list[str]]
) -> tuple[list[int], list[float]]:
    """The bytes that a step of each engine reduces, and how far its first step moves weights."""
    set_launcher_environment(rank, world)
    sizes = [_reduced_bytes(rank, world, run_of(world, *options)) for options in counted]
    return sizes, [_skip_steps(rank, world, run_of(world, *options))[0] for options in moved]


def _reduced_bytes(rank: int, world: int, run: Run) -> int:
    with open_state(run, rank, world) as (state, data), Collectives() as mode:
        train_step(state, data, run.train, CPU)
    return sum(count for name, count in mode.bytes.items() if "reduce" in name)


def _must_skip(skip: float, norm: Tensor, *, may_overflow: bool) -> Tensor:
    return torch.tensor(skip) if norm.isfinite() else torch.tensor(1.0)


def _weights(engine: Engine) -> Tensor:
    shards = sorted(engine.tensor_shards().items())
    values = [x.values.detach().flatten() for name, x in shards if name.startswith("model/")]
    return torch.cat(values).clone() if values else torch.zeros(1)


def run_in_fresh_processes(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Run in fresh processes, which take what the engines cache with them when they end."""
    ranks = Ranks()
    try:
        return ranks.run(function, world, *arguments, timeout=400)
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all cases on two ranks, and "single" in one native process."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "ds.json").write_text(json.dumps(ADDED))
    train(run_of(1), folder / "single")
    train(run_of(1, *CHAINS["frozen chain"]), folder / "frozen single")
    for name, settings in CHAINS.items():
        train(run_of(1, *settings, "train.steps=1"), folder / name)
    run_in_fresh_processes(train_all, 2, str(folder))
    for name, settings in CHAINS.items():
        train(run_of(1, *settings), folder / name, resume=True)
    return folder


def trained(run_dir: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient norm of each step, then validation losses; and all saved tensors."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [x for line in lines if "loss" in line for x in (line["loss"], line["grad_norm"])]
    evaluated = [line["validation_loss"] for line in lines if "validation_loss" in line]
    saved = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    tensors = {
        f"{group}/{name}": x
        for group in ("model", "optimizer", "ema")
        for name, x in checkpoint.load(saved, group).items()
    }
    return torch.tensor(steps + evaluated[-1:], dtype=torch.float64), tensors


@pytest.mark.parametrize("case", [*CASES, *CHAINS])
def test_an_engine_does_not_change_the_run(folder: Path, case: str) -> None:
    single = "frozen single" if case == "frozen chain" else "single"
    (losses, tensors), (expected, reference) = trained(folder / case), trained(folder / single)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert tensors.keys() == reference.keys()
    for name, x in tensors.items():
        assert (x - reference[name]).norm() <= 1e-4 * reference[name].norm(), name


def test_frozen_parameters_stay_what_they_were_in_every_engine(folder: Path) -> None:
    run = run_of(1, *CHAINS["frozen chain"])
    _, tensors = trained(folder / "frozen chain")
    frozen = {
        name: x
        for name, x in tensors.items()
        if name.startswith(("model/embedding.", "model/blocks.0.mlp.", "model/norm."))
    }
    assert len(frozen) == 5
    for name, x in frozen.items():
        name = name.removeprefix("model/")
        assert torch.equal(x, initial_weight(run.model, run.train.seed, name, x.shape))
        assert not any(key.startswith(f"optimizer/{name}") for key in tensors)


def test_each_rank_saves_its_shard(folder: Path) -> None:
    for case in ("zero 1", "zero 2", "zero 3"):
        saved = checkpoint.open_checkpoint(folder / case / f"checkpoints/step-{STEPS:08d}")
        held = [0, 0]
        for name in saved.shapes("model"):
            for shard in saved.manifest.tensors[f"model/{name}"].shards:
                held[int(shard.file.split(".")[0].split("-")[1])] += math.prod(shard.shape)
        assert max(held) < 1.05 * min(held)
    assert "model-00000-1.safetensors" in saved.files  # the beginning of a row


def test_skipped_steps_change_nothing() -> None:
    options = [[*DEEPSPEED, f"layout.zero={stage}"] for stage in range(4)]
    options.append([*DEEPSPEED, "layout.zero=3", *OFFLOADED])
    options.append(["engine.name=accelerate", "layout.zero=0"])
    for moved in run_in_fresh_processes(skip_steps, 2, options)[0]:
        assert [x > 0 for x in moved] == [True, False, False, True]


def test_a_skipped_step_with_a_loss_scale_changes_nothing() -> None:
    train = run_of(1).train.model_copy(update={"precision": "fp16", "device": "cpu"})
    moved = _skip_steps(0, 1, run_of(1).model_copy(update={"train": train}))
    assert [x > 0 for x in moved] == [True, False, False, True]


def test_one_process_needs_no_launcher(folder: Path, tmp_path: Path) -> None:
    for name in ("deepspeed", "accelerate"):
        run_in_fresh_processes(train_one, 1, name, str(tmp_path / name))
        (losses, _), (expected, _) = trained(tmp_path / name), trained(folder / "single")
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@slow("parity")
def test_gradients_are_reduced_in_bf16_on_request() -> None:
    bf16, replicas = "layout.gradient_compression=bf16", "layout.zero=0"
    stages = [[*DEEPSPEED, f"layout.zero={stage}"] for stage in range(4)]
    accelerate = ["engine.name=accelerate", replicas]
    (sizes, (native, compressed, exact)), _ = run_in_fresh_processes(
        reduce_gradients,
        2,
        [*stages, *[[*stage, bf16] for stage in stages]],
        [[replicas, bf16], [*accelerate, bf16], accelerate],
    )
    for size, halved in zip(sizes[:4], sizes[4:], strict=True):
        assert size > 50_000  # of which the loss and the gradient norm are a few
        assert abs(halved - size / 2) < 200
    assert compressed == native != exact


def train_one(rank: int, world: int, name: str, run_dir: str) -> None:
    torch.distributed.destroy_process_group()
    train(run_of(1, f"engine.name={name}"), Path(run_dir))
    if not torch.distributed.is_initialized():  # the pool destroys it
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )


def test_the_zero_stage_follows_from_the_layout() -> None:
    def stage(run: Run, world: int) -> int:
        return zero_stage(run.layout, run.layout.resolve(world))

    assert stage(run_of(2), 2) == 3
    assert stage(run_of(2, "layout.zero=0"), 2) == 0
    assert stage(run_of(2, "layout.replicate=2", "layout.shard=1"), 2) == 0
    assert stage(run_of(1, "layout.zero=2"), 1) == 2


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4), (1, 1)])
def test_a_flat_range_of_a_tensor_is_its_regions(shape: tuple[int, ...]) -> None:
    whole = Region.full(shape)
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(x.numel() + 1):
        for stop in range(start, x.numel() + 1):
            regions = Region.of_flat_range(start, stop, shape)
            found = [x[region.slices_within(whole)].flatten() for region in regions]
            assert len(regions) <= 2 * len(shape) - 1
            assert torch.equal(torch.cat([x.flatten()[:0], *found]), x.flatten()[start:stop])


SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("fp16", 1e-2)])
def test_on_a_gpu_an_engine_does_not_change_the_run(
    tmp_path: Path, precision: str, tolerance: float
) -> None:
    """Including Accelerate's sharded modes, which need a GPU."""
    pytest.importorskip("deepspeed")
    engines = {
        "native": [],
        **{f"zero {n}": [*DEEPSPEED, f"layout.zero={n}"] for n in range(4)},
        "offloaded": [*DEEPSPEED, "layout.zero=3", *OFFLOADED],
        **{
            f"accelerate {mode}": ["engine.name=accelerate", f"engine.mode={mode}", "layout.zero=2"]
            for mode in ("plain", "fsdp2", "deepspeed")
        },
    }
    options = [*OPTIONS, f"train.steps={STEPS}", "train.device=cuda", "train.compile=false"]
    options.append(f"train.precision={precision}")
    for port, (name, settings) in enumerate(engines.items(), 29600):
        command = [sys.executable, "-m", "longspan", "train", *options, *settings]
        subprocess.run(
            [*command, "--run-dir", str(tmp_path / name)],
            env={**os.environ, **SINGLE_RANK, "MASTER_PORT": str(port)},
            check=True,
        )
    expected, reference = trained(tmp_path / "native")
    for name in engines:
        losses, tensors = trained(tmp_path / name)
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0, msg=name)
        for key, x in tensors.items() if precision == "fp32" else ():
            assert (x - reference[key]).norm() <= 1e-3 * reference[key].norm(), (name, key)
