"""Mixtures: exact shares in an order that depends on the index of a sample alone."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cli import main
from longspan.config import Data, Model, Run
from longspan.data import Prefetcher, collate, open_source
from longspan.data.build import build
from longspan.data.mixture import MixtureSource, Part
from longspan.data.source import TokenSource
from longspan.data.token_split import TokenSplit
from longspan.data.tokenizer import ByteTokenizer
from longspan.errors import UserError
from longspan.runfile import dump_run, load_run
from longspan.trained import load_trained
from longspan.training import train
from tests.training.test_loop import SMALL, metrics

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=9
).map(lambda values: [Fraction(str(value)) for value in values])


def mixture(weights: list[Fraction]) -> MixtureSource:
    split = TokenSplit([np.arange(40)], np.array([40]))
    source = TokenSource({"train": split, "validation": split}, 8, ByteTokenizer(), 256, "")
    return MixtureSource([Part(str(n), weight, source) for n, weight in enumerate(weights)])


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_a_source_gets_its_share_of_any_stretch_and_each_sample_once(
    weights: list[Fraction], start: int
) -> None:
    mixed, count = mixture(weights), 300
    places = [mixed.locate(index) for index in range(start, start + count)]
    before, after = (list(mixed.samples_by_source(n).values()) for n in (start, start + count))
    assert sum(before) == start
    for number, weight in enumerate(weights):
        found = [inner for source, inner in places if source == number]
        assert found == list(range(before[number], after[number]))  # none twice, none left out
        levels = (len(weights) - 1).bit_length()
        assert abs(len(found) - count * weight / sum(weights)) <= levels


def test_shares_are_within_a_thousandth_over_ten_thousand_samples() -> None:
    weights = [Fraction(x) for x in ("0.5", "0.25", "0.123456", "1e-2", "0.7")]
    mixed = mixture(weights)
    for start in (0, 12_345, 10**9):
        counts = Counter(mixed.locate(start + n)[0] for n in range(10_000))
        for number, weight in enumerate(weights):
            assert abs(counts[number] / 10_000 - weight / sum(weights)) < 0.001


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("mix")
    for name, letters in (("lower", "abcdefghij"), ("upper", "KLMNOPQRSTUV")):
        texts = [letter * 60 + letters for letter in letters * 3]
        (root / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in texts))
        build([root / f"{name}.jsonl"], root / name, validation=0.2)
    return root / "lower", root / "upper"


def mix_of(folders: tuple[Path, Path], *weights: float) -> str:
    tables = [
        f'{{source = "{folder}", weight = {weight}}}'
        for folder, weight in zip(folders, weights, strict=True)
    ]
    return f"data.mix=[{', '.join(tables)}]"


def run_of(folders: tuple[Path, Path], *overrides: str) -> Run:
    return load_run(None, [*SMALL, mix_of(folders, 0.75, 0.25), *overrides])


def test_the_order_is_the_same_on_one_two_and_four_ranks_and_after_a_resume(
    folders: tuple[Path, Path],
) -> None:
    run = run_of(folders)
    cpu, orders = torch.device("cpu"), []
    for ranks, batch in ((1, 8), (2, 8), (4, 8), (4, 4)):
        read: dict[int, list[list[int]]] = {}
        for rank in range(ranks):
            share = batch // ranks

            def local(samples: list[int], first: int = rank * share, n: int = share) -> list[int]:
                return samples[first : first + n]

            source = open_source(run.data, run.model)  # anew: as after a resume
            with Prefetcher(source, 3, local, cpu) as data:  # type: ignore[arg-type]
                for first in range(0, 16, batch):
                    indices = list(range(first, first + batch))
                    found = data.read(indices, [index + batch for index in indices])
                    read |= dict(zip(local(indices), found.batch.tokens.tolist(), strict=True))
                    samples = [source.sample(3, index) for index in indices]
                    assert found.targets == int((collate(samples).targets >= 0).sum())
        orders.append([read[index] for index in range(16)])
    assert all(order == orders[0] for order in orders)
    is_lower = [all(token == 0 or token >= 97 for token in tokens) for tokens in orders[0]]
    assert sum(is_lower) == 12


def test_a_resumed_run_continues_in_the_mixture_and_logs_its_shares(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train.global_batch=4", "data.documents=isolate", "train.lr=0.001"]
    train(run_of(folders, *options, "train.steps=4"), tmp_path / "whole")
    assert "75.00%" in capsys.readouterr().err
    train(run_of(folders, *options, "train.steps=2"), tmp_path / "parts")
    train(run_of(folders, *options, "train.steps=4"), tmp_path / "parts", resume=True)
    whole, parts = (
        [(x["loss"], x["samples_by_source"]) for x in metrics(tmp_path / name) if "loss" in x]
        for name in ("whole", "parts")
    )
    assert whole[2:] == parts[2:]
    assert list(whole[-1][1].values()) == [12, 4]
    run, _, _ = load_trained(tmp_path / "parts", overrides=[f"data.source={folders[1]}"])
    assert run.data.sources == (str(folders[1]),)  # evaluated on one of them alone
    changed = load_run(None, [*SMALL, mix_of(folders, 0.5, 0.5), *options, "train.steps=6"])
    with pytest.raises(UserError, match=r"data is  mixture of 50\.00%"):
        train(changed, tmp_path / "parts", resume=True)


def test_validation_samples_have_the_shares_too(folders: tuple[Path, Path]) -> None:
    run = run_of(folders)
    source = open_source(run.data, run.model)
    samples = source.validation_samples(4)
    assert [bool((sample.tokens >= 97).any()) for sample in samples].count(True) == 3
    assert len(source.validation_samples(1000)) < 100
    assert "fitted on" in source.baseline(samples).name
    assert source.baseline(samples).nats > 0


def test_a_mixture_in_a_run_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[data]\ncontext = 64\n[[data.mix]]\nsource = "{folders[0]}"\nweight = 3\n'
        f'[[data.mix]]\nsource = "{folders[1]}"\nweight = 0\n'
    )
    run = load_run(path)
    assert run.model.vocab == 256  # of its tokenizer
    path.write_text(dump_run(run))
    assert load_run(path) == run
    source = open_source(run.data, run.model)
    assert isinstance(source, MixtureSource)
    assert [part.name for part in source.parts] == [str(folders[0])]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.mix=[]", "data.mix  is empty: add a table [[data.mix]]"),
        ('data.mix=[{source="a",weight=0},{source="b",weight=0}]', "the weights sum to zero"),
        ('data.mix=[{source="a",weight=-1}]', "data.mix.0.weight  expected at least 0, got -1"),
        ('data.mix=[{source="a"},{source="a"}]', 'data.mix.1.source  "a" occurs twice'),
        ('data.mix=[{source="recall"}]', '"recall" is not supported in a mixture'),
        ("data.mix=[{weight=1}]", "data.mix.0.source  is missing"),
        ('data.mix=[{source="a",wieght=1}]', "data.mix.0.wieght  unknown key; did you mean weight"),
        ('data.mix=[{source="/gone",weight=1}]', "cannot read /gone/index.json"),
        ('data.mix=[{source="builtin"}]|data.context=999999999', "builtin: the train split has"),
        ("data.mix=3", "data.mix  expected a list, got 3"),
    ],
)
def test_a_wrong_mixture_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert main(["train", *override.split("|"), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_source_beside_a_mixture_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.source +\"x\" has no effect with data\.mix"):
        load_run(None, ["data.source=x", 'data.mix=[{source="builtin"}]'])


def test_a_source_that_vanishes_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(folders[1], tmp_path / "copy")
    run = run_of((folders[0], copy))
    source = open_source(run.data, run.model)
    shutil.rmtree(copy)
    with pytest.raises(UserError, match=r"cannot read the shard .*copy/train-00000\.bin"):
        [source.sample(0, index) for index in range(8)]


def test_sources_need_one_tokenizer(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n' * 300)
    build([tmp_path / "in.jsonl"], tmp_path / "out", tokenizer=tmp_path, validation=0)
    mix = [{"source": str(x), "weight": 1.0} for x in (folders[0], tmp_path / "out")]
    data = Data.model_validate({"mix": mix, "context": 16})
    with pytest.raises(UserError, match=r"the sources of data\.mix need one tokenizer, but .*out"):
        open_source(data, Model())


def test_damage_in_one_folder_of_a_mixture_is_found(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(folders[1], tmp_path / "copy")
    shard = copy / "train-00000.bin"
    shard.write_bytes(b"x" * shard.stat().st_size)
    run = run_of((folders[0], copy))
    verification = open_source(run.data, run.model).verification()
    assert verification is not None
    with verification, pytest.raises(UserError, match=r"copy/train-00000\.bin is damaged"):
        verification.wait()
