"""Options of a layout: gradient compression, CPU offload, loss scaling and mixed precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from longspan.config import Layout
from longspan.engines.loss_scale import grad_scaler
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import assert_same_run, run_of, steps_of, train_rank, trained
from tests.steps import run_steps


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    train(run_of(1), run_dir)
    return run_dir


@pytest.mark.parametrize("zero", [1, 3])
def test_offloading_changes_nothing(ranks: Ranks, single: Path, tmp_path: Path, zero: int) -> None:
    overrides = [f"layout.zero={zero}", "layout.offload=true"]
    ranks.run(train_rank, 2, overrides, str(tmp_path / "run"), False)
    assert_same_run(tmp_path / "run", single)


REPLICAS = ["layout.replicate=2", "layout.shard=1"]


@pytest.mark.parametrize(
    ("layout", "method", "tolerance"),
    [
        (REPLICAS, "bf16", 1e-3),
        (REPLICAS, "powersgd", 0.1),
        (["layout.shard=2", "layout.zero=2"], "bf16", 1e-3),
    ],
)
def test_gradient_compression_changes_losses_little(
    ranks: Ranks, single: Path, tmp_path: Path, layout: list[str], method: str, tolerance: float
) -> None:
    overrides = [*layout, f"layout.gradient_compression={method}"]
    if method == "powersgd":  # which starts after ten exact steps
        overrides.append("train.steps=15")
        single = tmp_path / "single"
        train(run_of(1, "train.steps=15"), single)
    ranks.run(train_rank, 2, overrides, str(tmp_path / "run"), False)
    losses, expected = losses_of(tmp_path / "run"), losses_of(single)
    difference = ((losses - expected) / expected).abs()
    assert 0 < difference.max() < tolerance
    if method == "powersgd":
        assert difference[:10].max() < 1e-5 < difference[11:].min()


def losses_of(run_dir: Path) -> torch.Tensor:
    steps = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    return trained(run_dir, steps)[0][:, 0]


def scaled_step(rank: int, world: int) -> tuple[float, float]:
    """A step in which only rank 1 has an infinite gradient."""
    device = torch.device("cpu")
    with open_mesh(Layout(tensor=world), World(rank, world, rank), device) as mesh:
        scaler = grad_scaler(mesh, device, enabled=True)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum() * (float("inf") if rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        return weight.item(), scaler.get_scale() / before


def test_all_ranks_skip_a_step_in_which_one_overflows(ranks: Ranks) -> None:
    assert ranks.run(scaled_step, 2) == [(1.0, 0.5)] * 2


BF16 = ["train.precision=bf16", "model.sub_layer_norm=true", "train.global_batch=2"]
BF16 += ["data.context=32", "data.recall_pairs=4", "train.eval_samples=1"]


@pytest.mark.parametrize("option", ["layout.zero=1", "layout.zero=3", "model.linear=sketched"])
def test_weights_gathered_in_bf16_give_the_losses_of_autocast(ranks: Ranks, option: str) -> None:
    model = [option] if option.startswith("model.") else []
    expected = run_steps(0, 1, run_of(1, *BF16, *model), 2).losses[:, 0]
    for rank in ranks.run(steps_of, 2, [*BF16, option]):
        torch.testing.assert_close(rank.losses[:, 0], expected, rtol=1e-5, atol=0)
