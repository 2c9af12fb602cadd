"""A user's own model gives the same losses in every layout and engine, and resumes in any."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from examples import unet
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from longspan.cli import main
from longspan.config import Run
from longspan.data import DatasetSource, Failure
from longspan.data.dataset import NestedBatch
from longspan.engines.module_pipeline import stage_shapes
from longspan.engines.module_spec import find_blocks
from longspan.errors import Diverged, UserError
from longspan.parallel.world import World
from longspan.runfile import load_run, parse_run
from longspan.tracking import read_metrics
from longspan.trained import load_weights
from longspan.training import train
from longspan.training.module_task import ModuleTask, Task
from longspan.training.trainer import Trainer
from tests.harness import Ranks, RanksFailed
from tests.slow import slow

STEPS = 5
TRAIN = {
    "steps": STEPS,
    "micro_batch": 1,
    "global_batch": 8,
    "lr": 2e-3,
    "warmup_steps": 1,
    "grad_clip": 0.1,
    "eps": 1e-6,
    "device": "cpu",
    "eval_samples": 3,
}
DEEPSPEED = {"name": "deepspeed", "param_persistence_threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"layout": {"replicate": 2, "shard": 1}},
    "zero 1": {"layout": {"shard": 2, "zero": 1}},
    "zero 2": {"layout": {"shard": 2, "zero": 2}},
    "zero 3": {"layout": {"shard": 2}},
    "checkpointed": {"train": {"activation_checkpointing": "full"}},
    "deepspeed zero 2": {"layout": {"shard": 2, "zero": 2}, "engine": DEEPSPEED},
    "deepspeed zero 3": {"layout": {"shard": 2}, "engine": DEEPSPEED},
    "accelerate": {"layout": {"zero": 0}, "engine": {"name": "accelerate"}},
}


def tables(**sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "model": {"factory": "x:y"},
        "train": TRAIN,
        "track": {"log_every": 1},
        "checkpoint": {"every": 2, "keep": 3},
    }
    return {key: base.get(key, {}) | sections.get(key, {}) for key in base.keys() | sections.keys()}


class Weighted(nn.Module):
    """A U-Net beside a parameter that no loss uses, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet.UNet(width=4)
        self.unused = nn.Linear(3, 3)
        self.tied = nn.ModuleList([nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)])
        self.tied[1].weight = self.tied[0].weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.unet(self.tied[1](self.tied[0](x)), level)
        return out


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of some pixels, whose number differs from sample to sample."""
    total, _ = unet.loss(model, batch)
    weight = batch["level"] % 3 + 1
    return total * weight.sum(), weight.sum() * 256


def own_task(run: Run) -> Task:
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # rank 0 has the say
    validation = unet.Shapes(3)
    return Task(Weighted(), loss, unet.Shapes(20), validation=validation, wrap=unet.Block)


def train_own(run: Run, folder: Path, rank: int, world: int, *, resume: bool = False) -> None:
    task = own_task(run)
    train(
        run,
        folder,
        resume=resume,
        world=World(rank, world, rank),
        open_task=lambda run, mesh, show: ModuleTask(run, task),
    )


def losses(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    values = [line["loss"] for line in lines if "loss" in line]
    return values + [line["validation_loss"] for line in lines if "validation_loss" in line]


def train_layouts(rank: int, world: int, folder: str, layouts: dict[str, Any]) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in values.items()})
    for name, sections in layouts.items():
        run = parse_run(tables(**sections), world=world)
        train_own(run, Path(folder, name), rank, world)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "reference"
    train_own(parse_run(tables()), folder, 0, 1)
    return folder


def assert_same(folder: Path, reference: Path) -> None:
    assert losses(folder) == pytest.approx(losses(reference), rel=1e-5)
    weights, expected = load_weights(folder), load_weights(reference)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        if name == "unused.weight" and "deepspeed" in folder.name:
            continue  # in its flat buffers, weight decay applies to what no loss has used
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@slow("parity")
def test_layouts_and_engines_do_not_change_the_losses(
    ranks: Ranks, reference: Path, tmp_path: Path
) -> None:
    layouts = dict(LAYOUTS)
    for name in ("deepspeed", "accelerate"):
        try:
            __import__(name)
        except ImportError:
            layouts = {key: value for key, value in layouts.items() if not key.startswith(name)}
    ranks.run(train_layouts, 2, str(tmp_path), layouts)
    for name in layouts:
        assert_same(tmp_path / name, reference)


def test_hybrid_sharding_does_not_change_the_losses(
    ranks: Ranks, reference: Path, tmp_path: Path
) -> None:
    hybrid = {"hybrid": {"layout": {"replicate": 2, "shard": 2}}}
    ranks.run(train_layouts, 4, str(tmp_path), hybrid)
    assert_same(tmp_path / "hybrid", reference)


def resume_on_ranks(rank: int, world: int, folder: str) -> None:
    run = parse_run(tables(layout={"shard": 2}), world=world)
    train_own(run, Path(folder), rank, world, resume=True)


def test_a_run_that_is_continued_on_other_ranks_is_the_same_run(
    ranks: Ranks, reference: Path, tmp_path: Path
) -> None:
    run, folder = parse_run(tables()), tmp_path / "run"
    train_own(run, folder, 0, 1)
    for step in (4, 5):  # as if it had been killed after step 2
        shutil.rmtree(folder / f"checkpoints/step-{step:08}")
    ranks.run(resume_on_ranks, 2, str(folder))
    assert_same(folder, reference)
    assert load_weights(folder, "buffers").keys() == {"calls"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def with_buffer(values: Tensor) -> Mlp:
    model = Mlp()
    model.register_buffer("b", values)
    return model


class Numbers:
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.arange(4.0) + index
        return {"x": x / 10, "nested": [{"y": x.sum()}]}


def square(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    error = model(batch["x"])[:, 0] - batch["nested"][0]["y"]
    return error.square().sum(), len(error)


def trainer(folder: Path, **changes: Any) -> Trainer:
    run = {"train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "device": "cpu"}}
    options = {"model": Mlp(), "loss": square, "dataset": Numbers(), "run": run, "run_dir": folder}
    return Trainer(**(options | changes))


def split_by_plan(rank: int, world: int, folder: str) -> list[float]:
    torch.manual_seed(0)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    run = {
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
        "layout": {"tensor": 2, "shard": 1},
        "track": {"log_every": 1},
    }
    plan = {"up": "column", "down": "row"}
    trainer(Path(folder), run=run, tensor_plan=plan).train()
    return losses(Path(folder))


def test_a_plan_of_the_users_splits_weights(ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = trainer(tmp_path / "one")
    alone.run = alone.run.model_copy(
        update={"track": alone.run.track.model_copy(update={"log_every": 1})}
    )
    alone.train()
    found, _ = ranks.run(split_by_plan, 2, str(tmp_path / "two"))
    assert found == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


STAGES = [["layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]


def moody(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """A loss that differs in evaluation."""
    total, count = square(model, batch)
    return total if model.training else 3 * total, count


def pipelined(folder: Path, layout: dict[str, Any], stages: list[list[str]] | None) -> Trainer:
    torch.manual_seed(0)
    train = {"steps": 3, "global_batch": 8, "micro_batch": 2, "device": "cpu", "grad_clip": 0.1}
    run = {"train": train, "track": {"log_every": 1}, "layout": layout}
    options = {"stages": stages, "wrap": nn.Sequential, "validation": Numbers(3)}
    return trainer(folder, model=Deep(), loss=moody, run=run, **options)


def run_stages(rank: int, world: int, folder: str, layouts: list[dict[str, Any]]) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    for index, layout in enumerate(layouts):
        stages = [[n] for n in ("layers.0", "layers.1", "layers.2")] + [["layers.3", "head"]]
        is_interleaved = layout.get("schedule") == "interleaved"
        where = Path(folder, str(index))
        pipelined(where, layout, stages if is_interleaved else STAGES).train()


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"pipeline": 2}, {"pipeline": 2, "schedule": "gpipe"}]),
        (2, [{"pipeline": 2, "schedule": "interleaved"}]),
        (4, [{"pipeline": 2, "shard": 2}]),
    ],
)
def test_stages_of_the_users_make_a_pipeline(
    ranks: Ranks, world: int, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    pipelined(tmp_path / "one", {}, None).train()
    ranks.run(run_stages, world, str(tmp_path), layouts)
    for index in range(len(layouts)):
        assert_same(tmp_path / str(index), tmp_path / "one")


def run_bf16_stages(rank: int, world: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    in_bf16(pipelined(Path(folder), {"pipeline": 2}, STAGES)).train()


def in_bf16(given: Trainer) -> Trainer:
    train = given.run.train.model_copy(update={"precision": "bf16"})
    given.run = given.run.model_copy(update={"train": train})
    return given


def test_a_pipeline_in_bf16_agrees_with_one_process(ranks: Ranks, tmp_path: Path) -> None:
    in_bf16(pipelined(tmp_path / "one", {}, None)).train()
    ranks.run(run_bf16_stages, 2, str(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_trying_stages_leaves_parts_in_eval_mode() -> None:
    model = Deep()
    model.layers[1].eval()
    stage_shapes(model, STAGES, torch.ones(2, 4))
    assert model.training
    assert not model.layers[1].training


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (None, "needs to know the stages"),
        ([["layers.0"], ["layers.1"], ["head"]], "has 3 stages, but the layout needs 2"),
        ([["layers.0", "layers.1"], ["head"]], r"layers\.2\.0\.weight is in no stage"),
        ([["layers.1", "layers.0"], ["layers.2", "layers.3", "head"]], "do not compute what Deep"),
        ([["layers.0", "nothing"], ["head"]], "names nothing, which Deep has not"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(
    ranks: Ranks, stages: list[list[str]] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed, match=message):
        ranks.run(run_wrong_stages, 2, str(tmp_path / "run"), stages)


def run_wrong_stages(rank: int, world: int, folder: str, stages: list[list[str]] | None) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    pipelined(Path(folder), {"pipeline": 2}, stages).train()


class Dropped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.5, self.training))


def mixed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = torch.utils.data.default_collate(samples)
    batch["x"] = torch.lerp(batch["x"], batch["x"].flip(0), torch.rand(()))
    return batch


def train_at_random(rank: int, world: int, folder: str) -> None:
    if world > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
    torch.manual_seed(0)
    model = Dropped()
    torch.manual_seed(rank)  # what the program draws elsewhere has no say
    run = {
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "device": "cpu"},
        "track": {"log_every": 1},
    }
    trainer(Path(folder), model=model, collate=mixed, validation=Numbers(), run=run).train()


def test_dropout_and_a_random_collate_function_do_not_depend_on_the_layout(
    ranks: Ranks, tmp_path: Path
) -> None:
    train_at_random(0, 1, str(tmp_path / "one"))
    ranks.run(train_at_random, 2, str(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_workers_and_random_datasets_give_the_same_samples(tmp_path: Path) -> None:
    class Random(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            y = torch.rand(()) + float(np.random.rand()) + random.random()
            return {"x": torch.rand(4), "nested": [{"y": y}]}

    for workers in (0, 2):
        torch.manual_seed(0)
        trainer(tmp_path / str(workers), dataset=Random(), workers=workers).train()
    assert losses(tmp_path / "2") == losses(tmp_path / "0")


def test_a_data_loader_is_taken_as_it_is(tmp_path: Path) -> None:
    for name, data in {
        "plain": Numbers(),
        "loader": DataLoader(Numbers(), batch_size=2, shuffle=True),  # type: ignore[arg-type]
    }.items():
        torch.manual_seed(0)
        trainer(tmp_path / name, dataset=data).train()
    assert losses(tmp_path / "loader") == losses(tmp_path / "plain")


def test_a_validation_loader_is_read_by_samples(tmp_path: Path) -> None:
    found = []
    for name, data in {
        "plain": Numbers(),
        "loader": DataLoader(Numbers(), batch_size=3, shuffle=True),  # type: ignore[arg-type]
    }.items():
        torch.manual_seed(0)
        found.append(trainer(tmp_path / name, validation=data).train().validation_loss)
    assert found[0] == found[1]


class Stream:
    def __init__(self, count: int = 6, length: int = 6) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Numbers()[index] for index in range(self.count))


class TorchStream(Stream, IterableDataset[Any]):
    """It inherits torch's __getitem__, which raises."""


@pytest.mark.parametrize("kind", [Stream, TorchStream])
def test_an_iterable_keeps_its_order_over_epochs(kind: type[Stream]) -> None:
    source = DatasetSource(kind())

    def first(index: int) -> float:
        batch = source.batch(0, [index])
        return float(batch.content["x"][0, 0]) * 10  # type: ignore[union-attr]

    assert [first(n) for n in (0, 1, 4, 6, 11, 2, 17)] == pytest.approx([0, 1, 4, 0, 5, 2, 5])


def test_a_loader_of_an_iterable_is_taken_as_it_is(tmp_path: Path) -> None:
    for name, data in {
        "plain": Stream(),
        "loader": DataLoader(TorchStream(), batch_size=2),
    }.items():
        torch.manual_seed(0)
        trainer(tmp_path / name, dataset=data).train()
    assert losses(tmp_path / "loader") == losses(tmp_path / "plain")


def test_whatever_can_be_moved_to_a_device_is_moved() -> None:
    x = torch.ones(2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([3, 3]), batch_first=True)
    batch = {"x": x, "packed": packed, "text": "kept", "pair": (x, [x])}
    content = NestedBatch(batch, 0).to(torch.device("meta")).content
    tensors = [content["x"], content["packed"].data, content["pair"][0], content["pair"][1][0]]
    assert all(y.is_meta for y in tensors)
    assert content["text"] == "kept"


def test_a_users_optimizer_and_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    own, plain = Mlp(), Mlp()
    plain.load_state_dict(own.state_dict())
    run = {
        "train": {"steps": 2, "global_batch": 12, "micro_batch": 12, "grad_clip": 0.0},
        "checkpoint": {"every": 1},
    }
    run["train"] |= {"device": "cpu"}
    trainer(tmp_path, model=own, run=run, optimizer=sgd, schedule=lambda step: 0.5**step).train()
    assert "learning rate  that of optimizer=, times schedule=" in capsys.readouterr().err
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    batch = torch.utils.data.default_collate([Numbers()[n] for n in range(12)])
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
        optimizer.zero_grad()
        total, count = square(plain, batch)
        (total / count).backward()
        optimizer.step()
    for mine, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert "up.weight.momentum_buffer" in load_weights(tmp_path, "optimizer")


def test_blocks_are_found_by_class_size_and_name() -> None:
    model = Weighted()
    names = ["unet.down.0", "unet.down.1", "unet.middle", "unet.up.0", "unet.up.1"]
    assert find_blocks(model, unet.Block) == names
    assert find_blocks(model, ["unet.down.*", "unet.middle"])[:3] == names[:3]
    assert "unet.middle.first" in find_blocks(model, 500)
    assert find_blocks(model, None) == []
    assert find_blocks(model, nn.Conv2d)  # but not the two that share a weight
    assert not any(name.startswith("tied") for name in find_blocks(model, nn.Conv2d))


def raises(error: str) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise RuntimeError(error)

    return fail


class Broken(Numbers):
    def __init__(self, sample: Callable[[int], Any]) -> None:
        super().__init__()
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": Numbers(0)}, "the dataset is empty"),
        (
            {"dataset": Broken(raises("no such file"))},
            r"Broken\[\d+\] raised RuntimeError: no such",
        ),
        ({"dataset": Broken(lambda i: torch.zeros(i))}, "cannot be put into one batch"),
        ({"dataset": object()}, "must have a length"),
        ({"dataset": Stream(3, 6)}, "it ended earlier"),
        ({"dataset": Stream(), "workers": 1}, "needs a map-style dataset"),
        ({"dataset": DataLoader(Numbers(), batch_size=3)}, "train.micro_batch=3"),  # type: ignore[arg-type]
        ({"dataset": DataLoader(Numbers(), batch_size=None)}, "give batch_size=2"),  # type: ignore[arg-type]
        (
            {"dataset": DataLoader(Numbers(), batch_size=2, worker_init_fn=print)},  # type: ignore[arg-type]
            "do not call: remove it",
        ),
        ({"loss": lambda model, batch: (model(batch["x"]).sum(), -2)}, "the count is -2"),
        ({"loss": lambda model, batch: model(batch["x"]).sum()}, r"must return \(sum, count\)"),
        ({"loss": lambda model, batch: (torch.ones(()), 1)}, "does not depend on a parameter"),
        ({"loss": lambda model, batch: (1.0, 1)}, "the sum is a float"),
        ({"loss": lambda model, batch: (model(batch["x"]).sum(), "2")}, "the count is a str"),
        ({"loss": lambda model, batch: (model(batch["x"]), 1)}, r"tensor of shape \(2, 1\)"),
        ({"loss": lambda model, batch: (model(batch["x"]).sum(), -2)}, "-2, not at least 0"),
        ({"validation": Numbers(), "loss": lambda m, b: (0 * square(m, b)[0], 0)}, "add up to 0"),
        ({"optimizer": lambda model: None}, "must be a function of the model"),
        ({"optimizer": torch.optim.AdamW}, "must be a function of the model"),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "several losses in a step"),
        ({"optimizer": lambda m: torch.optim.SGD(m.up.parameters())}, "2 parameters to train"),
        ({"optimizer": lambda m: torch.optim.SGD(Mlp().parameters())}, "not the model's"),
        ({"optimizer": lambda m: torch.optim.Adafactor(m.parameters())}, "keeps row_var of shape"),
        ({"schedule": lambda step: float("nan")}, r"schedule\(0\) must return .* got nan"),
        ({"schedule": 3}, "schedule= must be a function of the step .* got 3"),
        ({"schedule": lambda: 1.0}, "schedule= must be a function of the step"),
        ({"wrap": -5}, "wrap= must be at least 1 parameter, got -5"),
        (
            {"schedule": float, "run": {"train": {"warmup_steps": 3}}},
            "train.warmup_steps = 3 has no effect with schedule=",
        ),
        (
            {"optimizer": lambda m: None, "run": {"train": {"lr": 0.5}}},
            "train.lr = 0.5 has no effect with optimizer=",
        ),
        ({"dataset": Broken(lambda i: lambda: i), "workers": 1, "collate": list}, "cannot send"),
        ({"wrap": [Mlp()]}, "got a Mlp"),
        ({"wrap": ["up", "blocks.*"]}, r"wrap='blocks\.\*' finds no block in Mlp"),
        ({"model": nn.Identity()}, "no parameters to train"),
        ({"model": with_buffer(torch.ones(2, dtype=torch.complex64))}, "b of Mlp is complex"),
        ({"model": Mlp().half()}, r"float32: call \.float\(\)"),
        ({"model": "mlp"}, "must be a torch.nn.Module"),
        ({"wrap": nn.Conv2d}, "finds no block"),
        ({"tensor_plan": {"up": "diagonal"}}, "must be column, row, sequence"),
        ({"run": {"model": {"layers": 3}}}, r"model.layers  has no effect with model.factory"),
        ({"run": {"data": {"context": 3}}}, "data.context  has no effect"),
        ({"run": {"train": {"halve_on_oom": True}}}, "a Trainer cannot"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trainer(tmp_path / "run", **changes).train()


def test_a_nan_loss_ends_the_run(tmp_path: Path) -> None:
    def nan(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
        total, count = square(model, batch)
        return total * float("nan"), count

    with pytest.raises(Diverged, match="loss is NaN"):
        trainer(tmp_path / "run", loss=nan).train()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_such_module:task", "there is no module no_such_module"),
        ("examples.unet:no_such_function", "has no function no_such_function"),
        ("examples.unet:save_grid", "is called with the run alone"),
        ("examples.unet", 'expected "package.module:function"'),
    ],
)
def test_a_factory_that_cannot_be_called_is_an_error(
    factory: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train(load_run(None, [f"model.factory={factory}"]), tmp_path / "run")


def test_a_dataset_of_another_length_does_not_resume(tmp_path: Path) -> None:
    trainer(tmp_path / "run").train()
    with pytest.raises(UserError, match="12 samples per epoch"):
        trainer(tmp_path / "run", dataset=Numbers(13)).train(resume=True)


@pytest.mark.parametrize("name", ["broken_factory", "broken_factory_too"])
def test_an_error_within_a_factory_keeps_its_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def task(run):\n    return 1 + None\n"
    if name.endswith("too"):  # the name of what is missing is the beginning of the module's own
        text = "import broken_factory_to\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    expected = ModuleNotFoundError if name.endswith("too") else TypeError
    with pytest.raises(expected):
        train(load_run(None, [f"model.factory={name}:task"]), tmp_path / "run")


def test_random_iterables_and_collate_functions_depend_on_the_sample_alone() -> None:
    class Noise(torch.utils.data.IterableDataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Tensor]:
            return (torch.rand(2) for _ in range(6))

    def masked(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) * torch.rand(2)

    def read(source: DatasetSource, *indices: int) -> Tensor:
        batch = source.batch(3, indices)
        assert not isinstance(batch, Failure)
        found: Tensor = batch.content
        return found

    data = DataLoader(Noise(), batch_size=2, collate_fn=masked)
    task = Task(Mlp(), square, data)
    run = parse_run(tables(train={"micro_batch": 2}))
    first, second = ModuleTask(run, task).source, ModuleTask(run, task).source
    expected = [read(first, 0, 1), read(first, 2, 3), read(first, 6, 7)]
    torch.rand(5)  # as if the model had drawn something
    assert torch.equal(read(second, 2, 3), expected[1])
    assert torch.equal(read(second, 6, 7), expected[2])
    assert not torch.equal(expected[0], expected[2])


def test_a_step_whose_loss_counts_nothing_is_skipped(tmp_path: Path) -> None:
    model = Mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(Diverged):
        trainer(tmp_path, model=model, loss=lambda m, b: (square(m, b)[0], 0)).train()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


class Normed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.block(x))


def test_evaluation_leaves_parts_in_eval_mode_and_others_in_train_mode(tmp_path: Path) -> None:
    model = Normed().eval()
    trainer(tmp_path / "whole", model=model, validation=Numbers(2)).train()
    assert all(module.training for module in model.modules())
    model = Normed()
    model.block.eval()
    trainer(tmp_path / "part", model=model, validation=Numbers(2)).train()
    assert model.training
    assert not any(module.training for module in model.block.modules())
    buffers = load_weights(tmp_path / "part", "buffers")
    assert buffers["block.0.num_batches_tracked"] == 0


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_updates_batch_norms_once(mode: str, tmp_path: Path) -> None:
    run = {"train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "device": "cpu"}}
    for name in ("none", mode):
        torch.manual_seed(0)
        run["train"] |= {"activation_checkpointing": name}
        trainer(tmp_path / name, model=Normed(), run=run, wrap=["block"]).train()
    expected = load_weights(tmp_path / "none", "buffers")
    assert expected["block.0.num_batches_tracked"] == 6
    for name, value in load_weights(tmp_path / mode, "buffers").items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_any_names_and_empty_buffers_are_saved_and_resumed(tmp_path: Path) -> None:
    def odd() -> nn.Module:
        model = with_buffer(torch.zeros(0))
        model.extra = nn.ParameterDict({"a/b c-ü": nn.Parameter(torch.ones(2))})
        return model

    trainer(tmp_path, model=odd()).train()
    assert "extra.a/b c-ü" in load_weights(tmp_path)
    run = {"train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "device": "cpu"}}
    assert trainer(tmp_path, model=odd(), run=run).train(resume=True).step == 4


class Hybrid(torch.optim.SGD):
    """Keeps other state for matrices than for vectors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() > 1:
                self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))


def test_an_optimizer_is_resumed_by_itself_alone(tmp_path: Path) -> None:
    def hybrid(model: nn.Module) -> torch.optim.Optimizer:
        return Hybrid(model.parameters(), lr=1e-3, momentum=0.9)

    run = {"train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "device": "cpu"}}
    trainer(tmp_path, optimizer=hybrid).train()
    with pytest.raises(UserError, match=r"optimizer was Hybrid\n.* is  that of \[train\]"):
        trainer(tmp_path, run=run).train(resume=True)
    assert trainer(tmp_path, run=run, optimizer=hybrid).train(resume=True).step == 4


def test_a_run_of_another_factory_gives_a_trainer_its_settings(tmp_path: Path) -> None:
    run = load_run(None, ["model.factory=a:b", "train.steps=7"])
    assert trainer(tmp_path, run=run).run.train.steps == 7


def test_blocks_by_size_are_modules_that_are_called() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.Sequential(layer, nn.Linear(8, 8))
    model.many = nn.ModuleList([nn.Linear(2, 2) for _ in range(20)])
    assert find_blocks(model, 60) == ["0.self_attn", "0.linear1", "0.linear2", "1"]


def test_the_summary_names_the_users_classes(tmp_path: Path) -> None:
    task = ModuleTask(parse_run(tables()), Task(Mlp(), square, Numbers(), wrap=nn.Linear))
    for module in task.spec.model.modules():
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})  # as FSDP2
    mesh: Any = SimpleNamespace(ranks=parse_run(tables()).layout.resolve(1))
    rows = task.summary(None, mesh, is_new=True)  # type: ignore[arg-type]
    assert rows["model"].startswith("Mlp, ")
    assert rows["blocks"] == "2 Linear"


def test_plan_refuses_a_factory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.factory=a:b"]) != 0
    assert "plan needs the decoder" in capsys.readouterr().err
