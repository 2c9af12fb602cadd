"""Data-parallel ranks share the validation samples, and find the loss of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from longspan.config import Run
from longspan.data import collate
from longspan.data.build import build
from longspan.runfile import load_run
from longspan.tracking import Reporter
from longspan.training.evaluation import DecoderEvaluation, position_ranges, sample_text
from longspan.training.signals import StopRequests
from tests.harness import Ranks
from tests.steps import CPU, open_state

OPTIONS = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=4",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.context=64",
    "track.prompt=",
    "train.global_batch=8",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very different lengths, so that windows hold different numbers of targets."""
    root = tmp_path_factory.mktemp("data")
    (root / "in").mkdir()
    for n in range(40):
        text = "ab\n" if n % 3 else "".join(chr(97 + n * i * i % 23) for i in range(50 + 9 * n))
        (root / "in" / f"{n}.txt").write_text(text)
    build([root / "in"], root / "out", validation=0.4)
    return root / "out"


def run_of(world: int, shards: str, *overrides: str) -> Run:
    return load_run(None, [*OPTIONS, f"data.source={shards}", *overrides], world=world)


def evaluate(
    rank: int, world: int, shards: str, overrides: list[str]
) -> list[tuple[float | None, int]]:
    """The validation loss and the number of forward passes, with 6 and 5 samples and with none."""
    found = []
    run = run_of(world, shards, *overrides)
    with open_state(run, rank, world) as (state, data):
        calls: list[object] = []
        model = state.engine.inference_model
        assert isinstance(model, torch.nn.Module)
        model.register_forward_pre_hook(lambda *_: calls.append(None))
        for samples in (6, 5, 0):
            train = run.train.model_copy(update={"eval_samples": samples})
            evaluation = DecoderEvaluation(
                state.engine, data.source, train, CPU, state.mesh, torch.no_grad
            )
            assert len(evaluation.samples) == samples
            calls.clear()
            found.append((evaluation.loss(StopRequests(None)), len(calls)))
    return found


@pytest.mark.parametrize(
    ("world", "layout", "passes"),
    [
        (1, [], (6, 5)),
        (1, ["train.micro_batch=4"], (2, 2)),
        (2, ["layout.replicate=2", "layout.shard=1"], (3, 3)),
        (2, ["layout.zero=3"], (3, 3)),
        (2, ["layout.zero=3", "train.micro_batch=2"], (2, 2)),
        (4, ["layout.replicate=2", "layout.shard=2"], (2, 2)),
        (4, ["layout.sequence=2", "layout.shard=2"], (3, 3)),
        (4, ["layout.pipeline=2", "layout.shard=2", "layout.zero=2"], (3, 3)),
        (4, ["layout.tensor=2", "layout.shard=2"], (3, 3)),
    ],
)
def test_ranks_share_the_samples_and_find_the_loss_of_one_process(
    ranks: Ranks, shards: Path, world: int, layout: list[str], passes: tuple[int, int]
) -> None:
    with open_state(run_of(1, str(shards))) as (state, data), torch.no_grad():
        samples = data.source.validation_samples(6)
        batches = [collate([sample]) for sample in samples]
        model = state.engine.model
        losses = [float(model(x.tokens, x.targets, x.documents)) for x in batches]
    counts = [int((batch.targets >= 0).sum()) for batch in batches]
    assert len(set(counts)) > 1
    expected = [sum(losses[:n]) / sum(counts[:n]) for n in (6, 5)]
    for six, five, none in ranks.run(evaluate, world, str(shards), layout):
        assert six == (pytest.approx(expected[0], rel=1e-6), passes[0])
        assert five == (pytest.approx(expected[1], rel=1e-6), passes[1])
        assert none == (None, 0)


def evaluate_by_position(
    rank: int, world: int, shards: str, overrides: list[str]
) -> dict[str, float]:
    run = run_of(world, shards, "train.eval_samples=6", *overrides)
    with open_state(run, rank, world) as (state, data):
        evaluation = DecoderEvaluation(
            state.engine, data.source, run.train, CPU, state.mesh, torch.no_grad
        )
        return evaluation.by_position(StopRequests(None))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, ["train.micro_batch=4"]),
        (2, ["layout.zero=3", "train.micro_batch=2"]),
        (2, ["layout.replicate=2", "layout.shard=1", "train.micro_batch=2"]),
        (4, ["layout.sequence=2", "layout.shard=2", "train.micro_batch=2"]),
        (4, ["layout.pipeline=2", "layout.tensor=2", "layout.shard=1", "train.micro_batch=4"]),
    ],
)
def test_the_loss_by_position_is_that_of_the_logits(
    ranks: Ranks, shards: Path, world: int, layout: list[str]
) -> None:
    with open_state(run_of(1, str(shards))) as (state, data), torch.no_grad():
        batch = collate(data.source.validation_samples(4))
        logits = state.engine.model(batch.tokens).float()
        losses = cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    expected = {}
    for first, stop in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]:
        targets = batch.targets[:, first:stop] >= 0
        expected[f"{first}-{stop - 1}"] = float(losses[:, first:stop].sum() / targets.sum())
    for found in ranks.run(evaluate_by_position, world, str(shards), layout):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "ranges"),
    [(1, [(0, 1)]), (5, [(0, 1), (1, 2), (2, 5)]), (256, [(0, 2), (2, 4), (4, 8)])],
)
def test_position_ranges_cover_the_context(context: int, ranges: list[tuple[int, int]]) -> None:
    found = position_ranges(context)
    assert found[:3] == ranges
    assert [position for span in found for position in range(*span)] == list(range(context))


def test_a_stop_request_cuts_the_sample_short(shards: Path) -> None:
    with open_state(run_of(1, str(shards)), 0, 1) as (state, data):
        texts = []
        for stop_after in (3, 10):
            asked = iter(range(100))
            text = sample_text(
                state.engine.inference_model, data.source, "the ", 0, CPU,
                Reporter(steps=1, done=1, silent=True),
                should_stop=lambda asked=asked, last=stop_after: next(asked) == last,
            )  # fmt: skip
            assert text is not None
            texts.append(text.encode(errors="ignore"))
    assert len(texts[0]) < len(texts[1]) < 50
