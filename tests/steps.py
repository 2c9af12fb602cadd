"""Training steps without a run folder, to compare layouts and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.checkpoint import TensorShard
from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import autocast, resolve
from longspan.engines import open_engine
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.training.evaluation import DecoderEvaluation
from longspan.training.guard import Guard
from longspan.training.signals import StopRequests
from longspan.training.state import TrainState, resume_key
from longspan.training.step import forward_context_of, train_step

CPU = torch.device("cpu")


def resolved(run: Run) -> Run:
    """The run on a CPU, also with what is refused there."""
    if run.train.precision == "fp16" or run.train.fp8:
        return run.model_copy(update={"train": run.train.model_copy(update={"compile": False})})
    return resolve(run, CPU)


@contextmanager
def open_state(run: Run, rank: int = 0, world: int = 1) -> Iterator[tuple[TrainState, Prefetcher]]:
    """A run's state before its first step, on one rank, and its data."""
    run = resolved(run)
    source = open_source(run.data, run.model)
    torch.manual_seed(run.train.seed)
    with open_mesh(run.layout, World(rank, world, rank), CPU) as mesh:
        engine = open_engine(run, mesh, CPU, forward_context_of(run.train))
        with Prefetcher(source, run.train.seed, mesh.local_samples, CPU) as data:
            yield TrainState(engine, mesh, Guard(0.0, CPU), resume_key(run, source)), data


class Steps(NamedTuple):
    """The results of a few steps on one rank."""

    losses: Tensor
    """(steps, 2): the loss and the gradient norm before clipping."""
    validation_loss: float | None
    shards: dict[str, TensorShard]
    """The weights that this rank saves after the last step."""


def run_steps(rank: int, world: int, run: Run, count: int) -> Steps:
    """Run `count` steps of `run` on one rank, and evaluate."""
    run = resolved(run)
    with open_state(run, rank, world) as (state, data):
        steps = [train_step(state, data, run.train, CPU) for _ in range(count)]
        evaluation = DecoderEvaluation(
            state.engine, data.source, run.train, CPU, state.mesh, lambda: autocast(run.train)
        )
        loss = evaluation.loss(StopRequests(None))
        shards = {
            name: TensorShard(shard.values.clone(), shard.shape, shard.region)
            for name, shard in state.tensor_shards().items()
            if name.startswith("model/")
        }
    return Steps(torch.tensor([[float(x) for x in step] for step in steps]).double(), loss, shards)


def full_weights(ranks: Sequence[Steps]) -> dict[str, Tensor]:
    """The full tensors of which ranks save shards, every element exactly once."""
    full: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for rank in ranks:
        for key, shard in rank.shards.items():
            name = key.split("#")[0]
            tensor = full.setdefault(name, torch.full(shard.shape, torch.nan))
            region = shard.region
            index = tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
            tensor[index] = shard.values
            counts[name] = counts.get(name, 0) + shard.values.numel()
    assert counts == {name: x.numel() for name, x in full.items()}
    return full


def assert_same_steps(ranks: Sequence[Steps], single: Steps) -> None:
    """Compare a layout with one process: losses, gradient norms and weights."""
    for rank in ranks:
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-5, atol=0)
        assert rank.validation_loss == ranks[0].validation_loss
    assert single.validation_loss is not None
    assert abs(ranks[0].validation_loss / single.validation_loss - 1) < 1e-5  # type: ignore[operator]
    weights, expected = full_weights(ranks), full_weights([single])
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
