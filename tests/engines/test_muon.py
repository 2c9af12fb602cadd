"""Muon: orthogonal updates, the same under every layout, and saved to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from longspan.checkpoint import load
from longspan.engines.muon import MOMENTUM, Muon, orthogonal
from longspan.errors import UserError
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import ids, single_process_steps, steps_of
from tests.steps import assert_same_steps

MUON = "train.optimizer=muon"


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_singular_values_become_one_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ found @ v.T  # diagonal in the same vectors
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_steps_are_those_of_torch() -> None:
    """torch's own Muon, which iterates in bfloat16 and takes no sharded matrices."""
    theirs, ours = (nn.Parameter(torch.eye(32, 48)) for _ in range(2))
    norm = nn.Parameter(torch.ones(4))
    options = {"lr": 0.1, "weight_decay": 0.1}
    reference = torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [norm], "weight_decay": 0.0}]
    optimizer = Muon([ours], groups, momentum=0.95, weight_decay=0.1, lr=0.1)
    stream = torch.Generator().manual_seed(0)
    for _ in range(3):
        theirs.grad = torch.randn(32, 48, generator=stream)
        ours.grad, norm.grad = theirs.grad.clone(), torch.ones(4)
        before = ours.detach().clone()
        reference.step()
        optimizer.step()
        assert (ours - theirs).norm() < 0.02 * (ours - before).norm()
        with torch.no_grad():
            ours.copy_(theirs)
    assert optimizer.state[norm].keys() == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3"]),
        (2, ["layout.tensor=2"]),
        (2, ["layout.pipeline=2"]),
        (4, ["layout.tensor=2", "layout.shard=2"]),
        (4, ["layout.replicate=2", "layout.sequence=2"]),
    ],
    ids=ids,
)
def test_a_layout_takes_the_same_steps(ranks: Ranks, world: int, layout: list[str]) -> None:
    alone = single_process_steps(MUON)
    found = ranks.run(steps_of, world, [*layout, MUON])
    assert_same_steps(found, alone)


def tensors(run_dir: Path, step: int) -> dict[str, Tensor]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    groups = ("model", "optimizer")
    return {f"{g}/{n}": x for g in groups for n, x in load(path, g).items()}


def test_a_run_resumes_to_the_same_bytes_with_the_same_optimizer_only(tmp_path: Path) -> None:
    small = ["model.hidden=32", "model.heads=2", "data.context=128", "track.prompt="]
    small += ["train.global_batch=1", "train.warmup_steps=1", "train.schedule=constant"]
    whole, resumed = (tmp_path / name for name in ("whole", "resumed"))
    train(load_run(None, [*small, MUON, "train.steps=4"]), whole)
    train(load_run(None, [*small, MUON, "train.steps=2"]), resumed)
    with pytest.raises(UserError, match=r"is not that of AdamW .*blocks\.0.* use the train\.optim"):
        train(load_run(None, [*small, "train.steps=4"]), resumed, resume=True)
    train(load_run(None, [*small, MUON, "train.steps=4"]), resumed, resume=True)
    expected, found = tensors(whole, 4), tensors(resumed, 4)
    assert f"optimizer/blocks.0.mlp.up.weight.{MOMENTUM}" in expected
    assert "optimizer/blocks.0.mlp.up.weight.exp_avg" not in expected
    assert "optimizer/embedding.weight.exp_avg" in expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["engine.name=deepspeed"], "train.optimizer"),
        (["engine.name=accelerate"], "train.optimizer"),
        (["layout.offload=true", "layout.shard=2"], "train.optimizer"),
        (["model.linear=low_rank"], "train.optimizer"),
        (["model.factory=a:b"], "train.optimizer"),
        (["train.optimizer=adamw", "train.momentum=0.9"], "train.momentum"),
    ],
)
def test_what_it_does_not_support_is_refused(options: list[str], key: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  {key} "):
        load_run(None, [MUON, *options], world=2)
