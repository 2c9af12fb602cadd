"""Samples are a pure function of (seed, index); every window occurs once per epoch."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from longspan.config import Data, Model
from longspan.constants import IGNORE_INDEX
from longspan.data import collate, count_targets, open_source
from longspan.data.build import build
from longspan.data.samples import Sample, bigram_nats
from longspan.data.source import RecallSource, TokenSource
from longspan.data.token_split import TokenSplit
from longspan.errors import UserError
from longspan.models import new_decoder
from longspan.runfile import load_run

MODEL = Model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of 10 to 49 bytes in several small shards."""
    root = tmp_path_factory.mktemp("data")
    (root / "texts").mkdir()
    for n in range(40):
        (root / "texts" / f"{n:02d}.txt").write_text(chr(65 + n) * (10 + n))
    build([root / "texts"], root / "shards", validation=0.2, shard_tokens=200)
    return root / "shards"


def open_folder(folder: Path, context: int) -> TokenSource:
    source = open_source(Data(source=str(folder), context=context, documents="join"), MODEL)
    assert isinstance(source, TokenSource)
    return source


def test_an_epoch_contains_every_window_once(folder: Path) -> None:
    source = open_folder(folder, 16)
    windows = source.num_windows("train")
    assert len([shard for shard in folder.glob("train-*.bin")]) > 2
    stream = source.splits["train"].read(0, source.splits["train"].total)
    expected = sorted(tuple(stream[i * 16 : i * 16 + 16]) for i in range(windows))
    for epoch in (0, 1, 2):
        indices = range(epoch * windows, (epoch + 1) * windows)
        assert sorted(tuple(source.sample(5, i).tokens) for i in indices) == expected
    orders = [[tuple(source.sample(s, i).tokens) for i in range(windows)] for s in (0, 1)]
    assert orders[0] != orders[1]


def test_a_sample_depends_on_seed_and_index_only(folder: Path) -> None:
    first, second = open_folder(folder, 16), open_folder(folder, 16)
    forwards = [first.sample(7, index) for index in range(30)]
    backwards = [second.sample(7, index) for index in reversed(range(30))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.targets, b.targets)


def test_no_targets_across_documents(folder: Path) -> None:
    source = open_folder(folder, 64)
    for index in range(source.num_windows("train")):
        sample = source.sample(0, index)
        ends = sample.tokens == 0  # NUL ends a document
        # The last token of a document has no target; elsewhere it is the next token.
        assert (sample.targets[ends] == IGNORE_INDEX).all()
        inside = ~ends[:-1]
        assert np.array_equal(sample.targets[:-1][inside], sample.tokens[1:][inside])


@pytest.mark.parametrize("context", [1, 7, 16, 64])
def test_num_targets_equals_the_count_in_the_sample(folder: Path, context: int) -> None:
    source = open_folder(folder, context)
    for index in range(min(300, 2 * source.num_windows("train"))):
        assert source.num_targets(3, index) == count_targets([source.sample(3, index)])
    recall = RecallSource(context=200, pairs=8, vocab=64)
    assert recall.num_targets(0, 5) == count_targets([recall.sample(0, 5)])


def test_validation_is_disjoint_from_training(folder: Path) -> None:
    source = open_folder(folder, 16)
    samples = source.validation_samples(1000)
    assert len(samples) == source.num_windows("validation") > 0
    assert len(source.validation_samples(2)) == 2
    train = set(source.splits["train"].read(0, source.splits["train"].total))
    validation = set(source.splits["validation"].read(0, source.splits["validation"].total))
    assert train & validation == {0}  # each document is one letter, repeated


def test_builtin_is_the_standard_library_split_by_file() -> None:
    source = open_source(Data(context=4096), MODEL)
    assert isinstance(source, TokenSource)
    train, validation = (source.splits[s] for s in ("train", "validation"))
    assert train.total > 5_000_000
    assert 0.02 < validation.total / train.total < 0.2
    texts = [t.read(0, t.total).astype(np.uint8).tobytes() for t in (train, validation)]
    argparse_source = Path(__import__("argparse").__file__).read_bytes()
    assert sum(argparse_source in text for text in texts) == 1
    assert source.fingerprint == open_source(Data(context=64), MODEL).fingerprint


def test_recall_targets_are_the_values_of_the_pairs() -> None:
    source = RecallSource(context=200, pairs=8, vocab=64)
    sample = source.sample(0, 3)
    pairs = dict(zip(sample.tokens[0:16:2], sample.tokens[1:16:2], strict=True))
    queried = np.flatnonzero(sample.targets != IGNORE_INDEX)
    assert len(pairs) == len(queried) == 8
    assert queried.min() >= 200 - 16
    assert [pairs[key] for key in sample.tokens[queried]] == list(sample.targets[queried])
    # Keys occur nowhere else.
    assert np.isin(sample.tokens[16:184], list(pairs)).sum() == 0
    assert not np.array_equal(source.sample(0, 4).tokens, sample.tokens)
    assert not np.array_equal(source.sample(1, 3).tokens, sample.tokens)
    assert np.array_equal(source.sample(0, 3).tokens, sample.tokens)
    assert source.baseline([sample]).nats == pytest.approx(math.log(32))


def test_bigram_nats_equals_its_definition() -> None:
    def sample(tokens: list[int], targets: list[int]) -> Sample:
        return Sample(np.array(tokens), np.array(targets), np.zeros(len(tokens), dtype=np.int64))

    fitted = sample([1, 2, 1, 3, 1, 2, 2], [2, 1, 3, 1, 2, IGNORE_INDEX, 1])
    vocab = 50_000  # whose square would take 20 GB
    pairs = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 2), (2, 1)]

    def probability(a: int, b: int) -> float:
        unigram = (sum(y == b for _, y in pairs) + 1) / (len(pairs) + vocab)
        after = [y for x, y in pairs if x == a]
        if not after:
            return unigram
        return (after.count(b) + len(set(after)) * unigram) / (len(after) + len(set(after)))

    # Of the pairs, one is unseen, one follows an unseen token, and one has the largest tokens.
    scored = [(1, 2), (1, 1), (2, 1), (7, 2), (vocab - 1, vocab - 1)]
    samples = [sample([a for a, _ in scored], [b for _, b in scored])]
    samples.append(sample([3, 3], [IGNORE_INDEX, 1]))
    expected = -np.mean([math.log(probability(a, b)) for a, b in [*scored, (3, 1)]])
    assert bigram_nats([fitted], samples, vocab) == pytest.approx(expected)
    assert sum(probability(1, b) for b in range(vocab)) == pytest.approx(1)
    assert count_targets([fitted, fitted]) == 12
    nothing = sample([1], [IGNORE_INDEX])
    assert bigram_nats([nothing], samples, vocab) == pytest.approx(math.log(vocab))
    assert bigram_nats([fitted], [nothing], vocab) == 0.0


def test_the_baseline_is_fitted_on_the_training_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_folder(folder, 16)
    samples = source.validation_samples(4)
    found, tokens = source.baseline(samples), source.splits["train"].total - 1
    assert found.name == f"bigram (fitted on {tokens:,} training tokens)"
    # A validation document repeats a letter that no training document has.
    assert found.nats > math.log(source.vocab)
    assert source.baseline([source.sample(0, 1)]).nats < 1.0
    # With fewer tokens they are spread over the split, and are the same at every context.
    monkeypatch.setattr("longspan.data.source.BASELINE_TOKENS", 64)
    monkeypatch.setattr("longspan.data.source.BASELINE_STRETCH", 8)
    read: list[int] = []
    split = TokenSplit.read
    monkeypatch.setattr(TokenSplit, "read", lambda self, a, b: read.append(a) or split(self, a, b))
    assert "fitted on 64 training" in source.baseline(samples).name
    assert len(read) == 8
    assert read[0] == 0
    assert max(np.diff(read)) - min(np.diff(read)) <= 8
    assert tokens - tokens // 8 - 16 < read[-1] < tokens
    assert source.baseline(samples) == open_folder(folder, 32).baseline(samples)


def test_collate_stacks_samples(folder: Path) -> None:
    source = open_folder(folder, 16)
    samples = [source.sample(0, index) for index in range(3)]
    batch = collate(samples)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    assert batch.tokens[2].tolist() == samples[2].tokens.tolist()


def test_a_token_outside_the_vocabulary_is_rejected(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    index = tmp_path / "copy" / "index.json"
    index.write_text(index.read_text().replace('"vocab":256', '"vocab":40'))
    with pytest.raises(UserError, match="but its vocabulary size is 40"):
        open_folder(tmp_path / "copy", 16).sample(0, 0)


def test_too_long_a_context_is_rejected(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has .* tokens, fewer than one sample of 100,001"):
        open_folder(folder, 100_000)


def test_too_small_a_vocabulary_is_rejected(folder: Path) -> None:
    with pytest.raises(UserError, match=r"set model\.vocab=256"):
        open_source(Data(source=str(folder), context=16), Model(vocab=100))


def test_documents_are_isolated_unless_a_run_says_otherwise(folder: Path) -> None:
    cases = {
        (): False,  # the built-in run is measured as it is
        (f"data.source={folder}",): True,
        (f"data.source={folder}", "data.documents=join"): False,
        ('data.mix=[{source="builtin"}]',): True,
        ("data.source=recall", "data.documents=isolate"): False,  # a sample is one document
    }
    for overrides, isolates in cases.items():
        run = load_run(None, ["data.context=128", *overrides])
        assert run.data.isolates == isolates, overrides
        assert (open_source(run.data, run.model).sample(0, 0).documents is not None) == isolates
        assert new_decoder(run).has_documents == isolates
    assert Data().isolates
    assert not Data(source="recall").isolates
