"""What changes the loss, the steps or the weights of a run, the same under every layout."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from longspan.checkpoint import load
from longspan.cli import main
from longspan.costs import count_trained
from longspan.data import open_source
from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.data.source import TokenSource
from longspan.errors import UserError
from longspan.export.huggingface import export
from longspan.models import new_decoder
from longspan.models.initial import initial_weight
from longspan.planning import memory_per_rank
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import ids, run_of, single_process_steps, steps_of
from tests.slow import slow
from tests.steps import assert_same_steps, full_weights, open_state

Z_LOSS = "train.z_loss=0.5"


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.pipeline=2"]),
        pytest.param(
            4,
            ["layout.sequence=2", "layout.tensor=2", "layout.megatron_sequence_parallel=true"],
            marks=slow("parity"),
        ),
    ],
    ids=ids,
)
def test_z_loss_takes_the_same_steps_in_a_layout(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    alone, without = single_process_steps(Z_LOSS), single_process_steps()
    assert_same_steps(ranks.run(steps_of, world, [*layout, Z_LOSS]), alone)
    torch.testing.assert_close(alone.losses[0, 0], without.losses[0, 0])  # the cross-entropy
    assert alone.losses[0, 1] > 1.01 * without.losses[0, 1]  # but not its gradient


def test_z_loss_with_a_model_of_your_own_is_refused() -> None:
    with pytest.raises(UserError, match=r"(?m)^  train.z_loss +is not supported"):
        load_run(None, ["model.factory=a:b", "train.z_loss=1e-4"])


FREEZE = 'train.freeze=["embedding.*","blocks.0.*"]'
SMALL = [
    *("model.hidden=32", "model.heads=2", "model.ffn=48", "data.context=64", "track.prompt="),
    *("attention.kind=dense", "train.warmup_steps=1", "train.eval_samples=1"),
    *("train.schedule=constant", "train.lr=0.01", "data.source=recall", "data.recall_pairs=4"),
]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    return {f"{g}/{n}": x for g in ("model", "optimizer") for n, x in load(path, g).items()}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3", "train.optimizer=muon"]),
        (2, ["layout.pipeline=2", "model.tie_embeddings=false"]),  # the first stage is frozen
        (4, ["layout.tensor=2", "layout.replicate=2"]),
        pytest.param(4, ["layout.pipeline=2", "layout.shard=2"], marks=slow("parity")),
        pytest.param(4, ["layout.sequence=2", "layout.shard=2"], marks=slow("parity")),
        pytest.param(2, ["layout.replicate=2", "layout.shard=1"], marks=slow("parity")),
        pytest.param(2, ["train.activation_checkpointing=full"], marks=slow("parity")),
    ],
    ids=ids,
)
def test_frozen_parameters_stay_what_they_were(ranks: Ranks, world: int, layout: list[str]) -> None:
    settings = [FREEZE, *(x for x in layout if not x.startswith("layout."))]
    found = ranks.run(steps_of, world, [*layout, *settings])
    assert_same_steps(found, single_process_steps(*settings))
    run, unfrozen = run_of(1, *settings), 0
    for key, weight in full_weights(found).items():
        name = key.removeprefix("model/")
        initial = initial_weight(run.model, run.train.seed, name, weight.shape)
        is_frozen = name.startswith(("embedding.", "blocks.0."))
        assert torch.equal(weight, initial) == is_frozen, name
        unfrozen += not is_frozen
    assert unfrozen > 0


def test_a_frozen_run_resumes_to_the_same_bytes_without_state_of_frozen_parameters(
    tmp_path: Path,
) -> None:
    options = [*SMALL, FREEZE]
    train(load_run(None, [*options, "train.steps=2"]), tmp_path / "whole")
    train(load_run(None, [*options, "train.steps=1"]), tmp_path / "resumed")
    train(load_run(None, [*options, "train.steps=2"]), tmp_path / "resumed", resume=True)
    expected, found = tensors(tmp_path / "whole", 2), tensors(tmp_path / "resumed", 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert any(name.startswith("model/embedding.") for name in expected)
    states = {name for name in expected if name.startswith("optimizer/")}
    assert states
    assert not any(name.startswith("optimizer/embedding.") or ".0." in name for name in states)
    with pytest.raises(UserError, match=r"train\.freeze was \['embedding\.\*', 'blocks"):
        train(load_run(None, [*SMALL, "train.steps=2"]), tmp_path / "resumed", resume=True)


def test_the_planner_counts_what_is_trained() -> None:
    options = ["model.layers=3", "model.tie_embeddings=false", "train.precision=fp32"]
    run = load_run(None, [*options, 'train.freeze=["embedding.*","blocks.1.*"]'])
    model = new_decoder(run)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_trained(run.model, run.train.freeze) == trained
    (memory,) = memory_per_rank(run, 1)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    assert memory.parameters == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ('["blocks.*.mpl.*"]', r"'blocks.\*.mpl.\*' matches no parameter"),
        ('["blocks.0.mlp.upp.weight"]', "did you mean blocks.0.mlp.up.weight"),
        ('["layers.0.*"]', "use names such as embedding.weight and blocks.0"),
        ('["*"]', "matches every parameter"),
    ],
)
def test_globs_that_match_nothing_or_everything_are_refused(freeze: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  train.freeze +.*{message}"):
        load_run(None, [f"train.freeze={freeze}"])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["model.lora.rank=4"], "train.freeze"),
        (["layout.pipeline=2", "layout.schedule=zbv"], "layout.schedule"),
        (["engine.name=deepspeed", "engine.offload_param=nvme"], "train.freeze"),
    ],
)
def test_what_freezing_does_not_support_is_refused(options: list[str], key: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  {key} "):
        load_run(None, [FREEZE, *options], world=2)


@pytest.fixture(scope="module")
def epoch_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run on 23 samples of 64 tokens."""
    folder = tmp_path_factory.mktemp("text")
    letters = random.Random(0).choices("abcdefgh", k=23 * 64)
    (folder / "a.txt").write_text("".join(letters))
    build([folder / "a.txt"], folder / "shards", validation=0)
    return [*SMALL, f"data.source={folder / 'shards'}", "data.documents=join"]


def test_epochs_become_steps_that_see_every_sample_as_often(epoch_options: list[str]) -> None:
    run = load_run(None, [*epoch_options, "train.epochs=2", "train.global_batch=4"])
    source = open_source(run.data, run.model)
    assert isinstance(source, TokenSource)
    count = source.num_windows("train")
    assert run.train.steps == math.ceil(2 * count / 4)
    tokens = [tuple(source.sample(run.train.seed, index).tokens) for index in range(2 * count)]
    first, second = tokens[:count], tokens[count:]
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_run_of_epochs_trains_saves_and_resumes(epoch_options: list[str], tmp_path: Path) -> None:
    run = load_run(None, [*epoch_options, "train.epochs=0.5", "train.global_batch=4"])
    assert train(run, tmp_path / "run").step == run.train.steps == 3
    saved = load_run(tmp_path / "run" / "run.toml")
    assert (saved.train.epochs, saved.train.steps) == (None, 3)  # it does not need the data
    longer = load_run(tmp_path / "run" / "run.toml", ["train.epochs=0.6"])
    assert train(longer, tmp_path / "run", resume=True).step == longer.train.steps == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.steps=2"], "and train.steps exclude each other"),
        (["data.source=recall"], "which recall has not"),
        (['data.mix=[{source="builtin"}]'], "which data.mix, whose sources end at different steps"),
        (["data.source=nowhere"], "needs the size of the data, here"),
        (["train.epochs=0"], "expected a number greater than 0"),
    ],
)
def test_epochs_that_have_no_steps_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  train.epochs +.*{message}"):
        load_run(None, ["train.epochs=1", *options])


DROPOUT = "model.dropout=0.3"
DENSE = ["attention.kind=dense", "attention.segment_lengths=[]", "attention.dilation_rates=[]"]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3", "train.micro_batch=2", "train.activation_checkpointing=full"]),
        (2, ["layout.pipeline=2"]),
        (4, ["layout.sequence=2", "layout.tensor=2", "layout.megatron_sequence_parallel=true"]),
        pytest.param(2, ["layout.tensor=2"], marks=slow("parity")),
        pytest.param(2, ["layout.tensor=2", "model.linear=low_rank"], marks=slow("parity")),
        pytest.param(4, ["layout.replicate=2", "layout.shard=2"], marks=slow("parity")),
        pytest.param(4, ["layout.sequence=4", *DENSE], marks=slow("parity")),
        pytest.param(
            4,
            [
                "layout.pipeline=2",
                "layout.shard=2",
                "layout.schedule=zbv",
                "layout.zero=2",
                "model.layers=4",
            ],
            marks=slow("parity"),
        ),
    ],
    ids=ids,
)
def test_dropout_takes_the_same_steps_in_a_layout(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    settings = [DROPOUT, *(x for x in layout if x.startswith(("model.", "attention.")))]
    alone = single_process_steps(*settings)
    assert_same_steps(ranks.run(steps_of, world, [*layout, *settings]), alone)
    assert not torch.allclose(alone.losses, single_process_steps(*settings[1:]).losses, rtol=1e-3)


def test_a_run_with_dropout_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    options = [*SMALL, DROPOUT]
    train(load_run(None, [*options, "train.steps=3"]), tmp_path / "whole")
    train(load_run(None, [*options, "train.steps=1"]), tmp_path / "resumed")
    train(load_run(None, [*options, "train.steps=3"]), tmp_path / "resumed", resume=True)
    expected, found = tensors(tmp_path / "whole", 3), tensors(tmp_path / "resumed", 3)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_stable_run_is_continued_and_any_of_its_checkpoints_is_decayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wsd = ["train.schedule=wsd", "train.decay_steps=2", "train.steps=4"]
    train(load_run(None, [*SMALL, *wsd]), tmp_path / "whole")
    kept = [*SMALL, "checkpoint.every=1", "checkpoint.keep_every=1"]
    train(load_run(None, [*kept, "train.steps=2"]), tmp_path / "stable")
    train(load_run(None, [*kept, "train.steps=3"]), tmp_path / "stable", resume=True)
    command = ["checkpoint", "fork", str(tmp_path / "stable")]
    assert main([*command, "2", str(tmp_path / "fork")]) == 0
    saved = tmp_path / "fork" / "run.toml"
    train(load_run(saved, wsd), tmp_path / "fork", resume=True)
    expected, found = tensors(tmp_path / "whole", 4), tensors(tmp_path / "fork", 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    longer = ["train.schedule=wsd", "train.decay_steps=2", "train.steps=5"]
    train(load_run(None, [*kept, *longer]), tmp_path / "stable", resume=True)
    train(load_run(None, [*SMALL, *longer]), tmp_path / "longer")
    expected, found = tensors(tmp_path / "longer", 5), tensors(tmp_path / "stable", 5)
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert main([*command, "2", str(tmp_path / "fork")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*command, "9", str(tmp_path / "other")]) == 2
    assert "has no checkpoint of step 9, only of 1, 2, 3, 4, 5" in capsys.readouterr().err


def test_weights_of_a_folder_are_decayed_from_the_first_step(tmp_path: Path) -> None:
    train(load_run(None, [*SMALL, "train.steps=1"]), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    options = [f"train.init_from={tmp_path / 'hf'}", "train.warmup_steps=0"]
    options += ["train.schedule=linear", "train.min_lr_ratio=0"]
    run = load_run(None, [*SMALL, *options, "train.steps=2", "track.log_every=1"])
    train(run, tmp_path / "decayed")
    lines = (tmp_path / "decayed" / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr"] for line in map(json.loads, lines) if "lr" in line]
    assert rates == pytest.approx([0.01, 0.005])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run whose samples have very different numbers of tokens with a loss."""
    folder = tmp_path_factory.mktemp("answers")
    records = [{"q": "q" * (60 - 5 * n), "a": "abcdefgh"[: 1 + n % 8] * n} for n in range(1, 9)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields = Fields(prompt="q", answer="a")
    build([folder / "in.jsonl"], folder / "out", fields=fields, validation=0)
    return [f"data.source={folder / 'out'}", "data.documents=isolate"]


@pytest.mark.parametrize(
    ("world", "layout"), [(2, ["layout.replicate=2"]), (2, ["layout.sequence=2"])], ids=ids
)
def test_a_step_divides_by_all_tokens_that_have_a_loss(
    ranks: Ranks, world: int, layout: list[str], answers: list[str]
) -> None:
    run = run_of(1, *answers)
    with open_state(run) as (state, data):
        batch, _ = data.read(range(8), range(8))
        model = state.engine.model
        logits = model(batch.tokens, documents=batch.documents)
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # a mean over targets
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        counts = (batch.targets != -100).sum(1)
        means = [
            cross_entropy(x, targets) for x, targets in zip(logits, batch.targets, strict=True)
        ]
    assert counts.max() > 3 * counts.min()
    assert abs(torch.stack(means).mean() - loss) > 1e-3  # which a mean of means would be
    norm = torch.stack([x.square().sum() for x in gradients]).sum().sqrt()
    expected = torch.stack([loss, norm]).detach().double()
    for found in (single_process_steps(*answers), *ranks.run(steps_of, world, [*layout, *answers])):
        torch.testing.assert_close(found.losses[0], expected, rtol=1e-5, atol=0)


def test_a_global_batch_in_tokens_is_one_of_sequences(tmp_path: Path) -> None:
    run = load_run(None, [*SMALL, "train.global_batch_tokens=256", "train.steps=1"])
    assert run.train.global_batch == 4
    train(run, tmp_path / "run")
    saved = load_run(tmp_path / "run" / "run.toml", ["train.global_batch=2"])
    assert (saved.train.global_batch, saved.train.global_batch_tokens) == (2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.global_batch=2"], "and train.global_batch exclude each other"),
        (["data.context=96"], "256 is not a multiple of data.context = 96: use 288"),
        (["model.factory=a:b"], "is not supported with model.factory"),
    ],
)
def test_a_global_batch_in_tokens_that_is_none_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  train.global_batch_tokens +{message}"):
        load_run(None, ["train.global_batch_tokens=256", *options])


@pytest.mark.parametrize("options", [[FREEZE], [DROPOUT, Z_LOSS]], ids=ids)
def test_a_sequence_walked_in_chunks_takes_the_same_steps(options: list[str]) -> None:
    chunked = single_process_steps(*options, "train.chunk_tokens=16")
    assert_same_steps([chunked], single_process_steps(*options))
