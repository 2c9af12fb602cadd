"""The passes of a micro-batch as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import resolve
from longspan.engines import NativeEngine, open_engine
from longspan.nn.products import chosen_products
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

STEPS = 8


def losses_of(run: Run) -> tuple[list[torch.Tensor], list[torch.Tensor], NativeEngine]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    source = open_source(run.data, run.model)
    with (
        open_mesh(run.layout, World(0, 1, 0), device) as mesh,
        chosen_products(run.train, device),
    ):
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        assert isinstance(engine, NativeEngine)
        state = TrainState(engine, mesh, Guard(0.0, device))
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            found = [train_step(state, data, run.train, device) for _ in range(STEPS)]
    return [x for pair in found for x in pair], list(engine.model.parameters()), engine


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ["train.precision=fp32", "train.compile=false"],
        ["train.precision=bf16", "train.compile=true"],
        ["train.precision=bf16", "train.compile=true", "model.dropout=0.1"],
        ["train.precision=fp16", "train.compile=true"],
        ["train.precision=bf16", "train.activation_checkpointing=selective"],
        ["train.precision=bf16", "train.activation_checkpointing=full", "attention.kind=dense"],
    ],
    ids=lambda x: " ".join(y.partition(".")[2] for y in x),
)
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_graphs_take_the_steps_that_launches_take(options: list[str], micro_batch: int) -> None:
    """Bit for bit, but for sums of dQ in any order."""
    sizes = ["model.hidden=256", "model.heads=4", "model.layers=2", "data.context=1024"]
    sizes += ["data.source=recall", "train.global_batch=4", f"train.micro_batch={micro_batch}"]
    run = load_run(None, [*sizes, "train.device=cuda", *options], builtin="cuda", world=1)
    run = resolve(run, torch.device("cuda"))
    launched, expected, _ = losses_of(run)
    update = {"train": run.train.model_copy(update={"cuda_graphs": True})}
    replayed, found, engine = losses_of(run.model_copy(update=update))
    assert engine._captured is not None
    assert set(engine._captured._graphs) == ({False} if micro_batch == 4 else {False, True})
    for ours, theirs in zip(replayed, launched, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
