"""What a layout can be told beside its axes: sending fewer bytes, offloading, scaling in fp16."""

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
from tests.parallel.test_apply import assert_same_run, run_of, train_rank, trained


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train(run_of(1), run_dir)
    return run_dir


@pytest.mark.parametrize("zero", [1, 3])
def test_offloading_changes_nothing(ranks: Ranks, alone: Path, tmp_path: Path, zero: int) -> None:
    overrides = [f"layout.zero={zero}", "layout.offload=true"]
    ranks.run(train_rank, 2, overrides, str(tmp_path / "run"), False)
    assert_same_run(tmp_path / "run", alone)


@pytest.mark.parametrize(("compress", "most"), [("bf16", 1e-3), ("powersgd", 0.1)])
def test_compressed_gradients_lead_nearly_the_same_way(
    ranks: Ranks, alone: Path, tmp_path: Path, compress: str, most: float
) -> None:
    overrides = ["layout.replicate=2", "layout.shard=1", f"layout.gradient_compression={compress}"]
    if compress == "powersgd":  # which starts after ten exact steps
        overrides.append("train.steps=15")
        alone = tmp_path / "alone"
        train(run_of(1, "train.steps=15"), alone)
    ranks.run(train_rank, 2, overrides, str(tmp_path / "run"), False)
    losses, expected = losses_of(tmp_path / "run"), losses_of(alone)
    apart = ((losses - expected) / expected).abs()
    assert 0 < apart.max() < most
    if compress == "powersgd":
        assert apart[:10].max() < 1e-5 < apart[11:].min()


def losses_of(run_dir: Path) -> torch.Tensor:
    steps = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    return trained(run_dir, steps)[0][:, 0]


def scaled_step(rank: int, world: int) -> tuple[float, float]:
    """A step in which one rank alone has a gradient that is not finite."""
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


def test_no_rank_takes_a_step_that_another_cannot(ranks: Ranks) -> None:
    assert ranks.run(scaled_step, 2) == [(1.0, 0.5)] * 2


SIXTEEN_BITS = ["train.precision=bf16", "model.sub_layer_norm=true"]


@pytest.mark.parametrize("option", ["layout.zero=1", "layout.zero=3", "model.linear=sketched"])
def test_weights_gathered_in_16_bits_compute_what_autocast_does(
    ranks: Ranks, tmp_path: Path, option: str
) -> None:
    of_model = [option] if option.startswith("model.") else []
    train(run_of(1, *SIXTEEN_BITS, *of_model), tmp_path / "alone")
    ranks.run(train_rank, 2, [*SIXTEEN_BITS, option], str(tmp_path / "run"), False)
    losses, expected = losses_of(tmp_path / "run"), losses_of(tmp_path / "alone")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
