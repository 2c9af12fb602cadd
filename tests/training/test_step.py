"""One optimizer step."""

from __future__ import annotations

import pytest
import torch

from longspan.benchmarks.step_time import load
from longspan.data import Prefetcher, open_source
from longspan.engines import open_engine
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ["train.cuda_graphs=false"],
        ["train.cuda_graphs=false", "train.compile=false"],
        ["train.cuda_graphs=false", "train.optimizer=adamw8bit"],
        ["train.cuda_graphs=true"],
    ],
)
def test_the_host_does_not_wait_for_the_device(options: list[str]) -> None:
    size = ["model.layers=2", "data.context=4096", "train.micro_batch=1", "train.global_batch=2"]
    run = load([*size, *options, "train.precision=bf16"], "cuda")
    device = torch.device("cuda")
    with open_mesh(run.layout, World(0, 1, 0), device) as mesh:
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        state = TrainState(engine, mesh, Guard(0.0, device))
        source = open_source(run.data, run.model)
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            for step in range(5):
                if step >= 3:  # graphs are captured
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    loss, _ = train_step(state, data, run.train, device)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
