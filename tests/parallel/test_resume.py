"""A checkpoint of any layout, loaded under any other: bitwise equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan import checkpoint
from longspan.checkpoint import PendingCheckpoint, open_checkpoint
from longspan.parallel.world import World
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import run_of
from tests.steps import open_state

LAYOUTS = {
    "one": (1, []),
    "zero 3": (2, ["layout.zero=3"]),
    "tensor": (2, ["layout.tensor=2"]),
    "pipeline": (2, ["layout.pipeline=2", "layout.schedule=zbv", "model.layers=4"]),
    "sequence": (2, ["layout.sequence=2", "layout.zero=1"]),
    "two by two": (4, ["layout.shard=2", "layout.tensor=2"]),
}
SMALL = [
    "train.steps=2",
    "train.global_batch=4",
    "model.layers=4",
    "model.ffn=54",  # does not divide evenly by 2 × 2 ranks
    "model.tie_embeddings=true",
]


def train_rank(rank: int, world: int, layout: list[str], run_dir: str) -> None:
    run = run_of(world, *SMALL, *layout)
    train(run, Path(run_dir), world=World(rank, world, rank))


def load_and_save(rank: int, world: int, layout: list[str], folder: str, names: list[str]) -> None:
    """Load each run's checkpoint under a layout, and save it again."""
    with open_state(run_of(world, *SMALL, *layout), rank, world) as (state, _):
        for name in names:
            path = Path(folder, name, "checkpoints/step-00000002")
            state.restore(open_checkpoint(path))
            Path(folder, "resaved").mkdir(exist_ok=True)
            pending = PendingCheckpoint(Path(folder, "resaved", name), 2)
            pending.write(state.tensor_shards(), rank)
            dist.barrier()
            if rank == 0:
                pending.commit(state.saved_state(), world)
            dist.barrier()


def contents(path: Path) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": x
        for group in ("model", "optimizer", "rng")
        for name, x in checkpoint.load(path, group).items()
    }


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps in each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for name, (world, layout) in LAYOUTS.items():
        ranks.run(train_rank, world, layout, str(folder / name))
    return folder


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_every_other(
    ranks: Ranks, trained: Path, target: str, tmp_path: Path
) -> None:
    world, layout = LAYOUTS[target]
    for name in LAYOUTS:
        (tmp_path / name).symlink_to(trained / name)
    ranks.run(load_and_save, world, layout, str(tmp_path), list(LAYOUTS))
    for name in LAYOUTS:
        before = contents(trained / name / "checkpoints/step-00000002")
        after = contents(tmp_path / "resaved" / name / "step-00000002")
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[key]) for key, x in before.items())
        saved = open_checkpoint(tmp_path / "resaved" / name / "step-00000002")
        assert saved.state["samples"] == 8


def test_each_rank_writes_its_shard(trained: Path) -> None:
    saved = open_checkpoint(trained / "two by two" / "checkpoints/step-00000002")
    assert saved.files_of("model") == [f"model-0000{rank}.safetensors" for rank in range(4)]
    shards = saved.manifest.tensors["model/blocks.0.mlp.up.weight"].shards
    assert len(shards) == 4
    assert saved.manifest.tensors["model/blocks.0.mlp_norm.weight"].shards[0].shape == (16,)
