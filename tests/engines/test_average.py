"""The moving average of weights: its definition, under layouts, in checkpoints and from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from longspan.checkpoint import Region, TensorShard, load
from longspan.cli import main
from longspan.config import Train
from longspan.engines.optimizer import build_optimizer, step_unless
from longspan.errors import UserError
from longspan.export.huggingface import weight_reader
from longspan.planning import memory_per_rank
from longspan.runfile import load_run
from longspan.trained import load_trained
from longspan.training import train
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.parallel.test_apply import ids, run_of
from tests.slow import slow
from tests.steps import CPU, Steps, full_weights, open_state

DECAY = 0.6
EMA = f"train.ema={DECAY}"
SMALL = [
    *("model.hidden=32", "model.heads=2", "model.ffn=48", "data.context=64", "track.prompt="),
    *("attention.kind=dense", "train.warmup_steps=1", "train.eval_samples=1"),
    *("train.schedule=constant", "train.lr=0.01", EMA),
]


def averages(rank: int, world: int, overrides: list[str]) -> tuple[Steps, list[dict[str, Tensor]]]:
    """The shards of the averages after three steps; in one process also the weights of each."""
    run = run_of(world, EMA, *overrides)
    weights: list[dict[str, Tensor]] = []
    with open_state(run, rank, world) as (state, data):
        for _ in range(3):
            train_step(state, data, run.train, CPU)
            if world == 1:
                named = state.engine.model.named_parameters()
                weights.append({name: p.detach().clone() for name, p in named})
        shards = {
            name: TensorShard(shard.values.clone(), shard.shape, shard.region)
            for name, shard in state.tensor_shards().items()
            if name.startswith("ema/")
        }
    return Steps(torch.zeros(0), None, shards), weights


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3"]),
        (2, ["layout.pipeline=2"]),
        pytest.param(2, ["layout.tensor=2"], marks=slow("parity")),
        pytest.param(4, ["layout.replicate=2", "layout.shard=2"], marks=slow("parity")),
        pytest.param(2, ["layout.sequence=2"], marks=slow("parity")),
        pytest.param(2, ["layout.zero=3", "train.optimizer=muon"], marks=slow("parity")),
        pytest.param(2, ["layout.zero=3", "layout.offload=true"], marks=slow("parity")),
    ],
    ids=ids,
)
def test_a_layout_has_the_averages_of_the_definition(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    settings = [x for x in layout if x.startswith("train.")]
    _, (first, *others) = averages(0, 1, settings)
    found = full_weights([steps for steps, _ in ranks.run(averages, world, layout)])
    assert found.keys() == {f"ema/{name}" for name in first}
    for name, expected in first.items():
        for weights in others:
            expected = DECAY * expected + (1 - DECAY) * weights[name]
        assert (found[f"ema/{name}"] - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize("kind", ["adamw", "muon", pytest.param("adamw8bit", marks=slow("parity"))])
def test_a_skipped_step_leaves_the_average(kind: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(64, 64)])  # type: ignore[assignment]
    optimizer = build_optimizer(model, Train(ema=0.5, optimizer=kind, lr=0.1))  # type: ignore[arg-type]
    weight = next(iter(model.parameters()))
    seen = []
    for skip in (0.0, 0.0, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        step_unless(torch.tensor(skip), optimizer)
        seen.append((weight.detach().clone(), optimizer.state[weight]["ema"].clone()))
    assert torch.equal(seen[0][0], seen[0][1])
    torch.testing.assert_close(seen[1][1], (seen[0][0] + seen[1][0]) / 2)
    assert torch.equal(seen[2][1], seen[1][1])
    assert not torch.equal(seen[2][1], seen[2][0])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("ema")
    train(load_run(None, [*SMALL, "train.steps=3"]), folder / "run")
    return folder / "run"


def test_a_run_resumes_to_the_same_averages(run_dir: Path, tmp_path: Path) -> None:
    train(load_run(None, [*SMALL, "train.steps=1"]), tmp_path / "run")
    train(load_run(None, [*SMALL, "train.steps=3"]), tmp_path / "run", resume=True)
    for group in ("model", "optimizer", "ema"):
        found, expected = (
            load(folder / "checkpoints" / "step-00000003", group)
            for folder in (tmp_path / "run", run_dir)
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
    other = load_run(None, [*SMALL, "train.steps=4", "train.ema=0.9"])
    with pytest.raises(UserError, match=r"train\.ema was 0\.6"):
        train(other, tmp_path / "run", resume=True)


def test_a_run_is_used_with_its_averages(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = load(run_dir / "checkpoints" / "step-00000003", "ema")
    _, model, _ = load_trained(run_dir, ema=True)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    outputs = []
    for options in ([], ["--ema"]):
        assert main(["eval", str(run_dir), "--samples", "1", "--json", *options]) == 0
        assert main(["generate", str(run_dir), "--prompt", "a", "--tokens", "8", *options]) == 0
        assert main(["export", str(run_dir), str(tmp_path / f"hf{len(options)}"), *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert [text.count("the weights are averages (train.ema)") for text in outputs] == [0, 2]
    run = load_run(None, [*SMALL, f"train.init_from={tmp_path / 'hf1'}"])
    read = weight_reader(tmp_path / "hf1", run)
    assert all(torch.equal(read(n, Region.full(tuple(x.shape))), x) for n, x in expected.items())


def test_what_has_no_averages_is_refused(tmp_path: Path) -> None:
    train(load_run(None, [*SMALL, "train.ema=0", "train.steps=1"]), tmp_path / "run")
    with pytest.raises(UserError, match=r"has no averages of weights: set train\.ema"):
        load_trained(tmp_path / "run", ema=True)
    with pytest.raises(UserError, match=r"(?m)^  train.ema "):
        load_run(None, ["model.factory=a:b", EMA])


def test_the_planner_counts_them() -> None:
    options = ["train.precision=fp32", "layout.shard=2", "train.global_batch=2"]
    without, averaged = (
        memory_per_rank(load_run(None, [*options, *more], world=2), 2)[0] for more in ([], [EMA])
    )
    assert averaged.optimizer * 2 == without.optimizer * 3
