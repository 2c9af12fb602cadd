"""The planned peak of a step against the live tensors of a whole step in a fake world."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from longspan.config import Run
from longspan.data import Batch
from longspan.device import autocast
from longspan.engines import DecoderSpec
from longspan.engines.native import NativeEngine
from longspan.engines.optimizer import build_optimizer
from longspan.models import new_decoder
from longspan.parallel.mesh import open_mesh
from longspan.parallel.pipeline import PipelinedDecoder
from longspan.parallel.world import World
from longspan.planning.fake_world import fake_world
from longspan.planning.memory import memory_per_rank
from longspan.planning.parameters import Degrees
from longspan.planning.tracing import LiveMemory
from longspan.runfile import load_run
from longspan.torch_internals import assume_static_shapes, fake_tensors

CPU = torch.device("cpu")
OPTIONS = [
    *["model.hidden=128", "model.layers=2", "model.heads=4", "model.ffn=384", "model.vocab=512"],
    *["data.context=2048", "train.micro_batch=1", "train.device=cpu", "train.compile=false"],
]


def run_of(gpus: int, options: list[str]) -> Run:
    batch = f"train.global_batch={gpus}"
    return load_run(None, [*OPTIONS, batch, *options], world=gpus)


class FakeSpec(DecoderSpec):
    """A decoder whose shards have no memory."""

    def materialize(self, *arguments: Any) -> nn.Module:
        with self.fake:
            return super().materialize(*arguments)

    def __init__(self, run: Run, fake: AbstractContextManager[Any]) -> None:
        super().__init__(new_decoder(run))
        self.fake = fake


def live_peak(run: Run, gpus: int, rank: int) -> int:
    """Bytes at the peak of the second step, which an optimizer state precedes."""
    fake = fake_tensors()
    with fake_world(rank, gpus), open_mesh(run.layout, World(rank, gpus, rank), CPU) as mesh:
        spec, context = FakeSpec(run, fake), partial(autocast, run.train)
        make = partial(build_optimizer, train=run.train)
        engine = NativeEngine(spec, mesh, run.train, CPU, make, context, run.layout)
        if isinstance(engine.module, PipelinedDecoder):
            assume_static_shapes(engine.module.schedule)
        samples = run.train.global_batch // mesh.data_ranks
        with fake, LiveMemory() as memory:
            memory.add(*engine.model.parameters())
            for _ in range(2):
                memory.reset_peak()
                tokens = torch.zeros(samples, run.data.context, dtype=torch.int64)
                engine.backward(Batch(tokens, tokens), torch.tensor(1.0))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return memory.peak


BF16, FP32 = "train.precision=bf16", "train.precision=fp32"
FULL, SELECTIVE = (f"train.activation_checkpointing={x}" for x in ("full", "selective"))


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (1, [BF16]),
        (1, [FP32, "train.micro_batch=2", "train.global_batch=4"]),
        (1, [BF16, SELECTIVE]),
        (1, [BF16, FULL, "train.recompute_layers=1"]),
        (1, [BF16, FULL, "model.vocab=8192", "model.tie_embeddings=false"]),
        (4, [BF16]),
        (4, [FP32, FULL, "layout.zero=2", "train.global_batch=8"]),
        (2, [FP32, "layout.tensor=2", "train.global_batch=1"]),
        (4, [BF16, "layout.tensor=2", "layout.megatron_sequence_parallel=true"]),
        (2, [FP32, "layout.pipeline=2", "train.global_batch=4"]),
        (2, [FP32, "layout.pipeline=2", "train.global_batch=4", "layout.schedule=gpipe"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_planned(gpus: int, options: list[str]) -> None:
    run = run_of(gpus, options)
    stages = Degrees.of(run.layout, gpus).pipeline
    for stage, planned in enumerate(memory_per_rank(run, gpus)):
        measured = live_peak(run, gpus, stage * gpus // stages)
        # Over: FSDP2's buffers are planned for a GPU, where they overlap. Under: storages that it
        # resizes to nothing still count as live here.
        assert 0.97 * measured <= planned.allocated <= 1.05 * measured


ON_GPU = [
    "train.device=cuda", "train.micro_batch=1", "train.global_batch=1",
    "train.activation_checkpointing=full", "train.mlp_tile_tokens=8192",
]  # fmt: skip
TILED = ["model.preset=1.3b", "model.vocab=50304", "data.context=65536"]


@pytest.mark.parametrize(
    ("gib", "options"),
    [
        (31.9, TILED),
        (26.4, [*TILED, "train.offload_activations=true", "train.offload_limit_gib=6.1"]),
        (
            127.62,
            [
                "model.preset=llama3-8b",
                "data.context=501760",
                "attention.kind=dense",
                "train.optimizer=adamw8bit",
                "train.parameter_precision=bf16",
                "train.residual_precision=bf16",
                "train.offload_activations=true",
                "train.offload_limit_gib=88.5",
            ],
        ),
    ],
)
def test_the_peak_of_runs_on_a_gpu_is_planned(gib: float, options: list[str]) -> None:
    """Peaks of the allocator on an H200, of docs/measurements.md and docs/layouts.md."""
    run = load_run(None, [*ON_GPU, *options], builtin="cuda", world=1)
    (planned,) = memory_per_rank(run, 1)
    assert sum(planned.peak.values()) / 2**30 == pytest.approx(gib, rel=0.015)
