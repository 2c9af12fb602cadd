"""`longspan eval`: against transformers, on one and two ranks, and with models that recall."""

from __future__ import annotations

import json
import math
import shutil
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.cli import main
from longspan.cli.evaluation import _plot
from longspan.config import Run
from longspan.data import Sample, open_source
from longspan.data.build import build
from longspan.data.tokenizer import ByteTokenizer, load_tokenizer
from longspan.errors import UserError
from longspan.evaluation.evaluate import Evaluation, Wanted, _filler, evaluate
from longspan.evaluation.losses import DocumentLoss, Losses, SampleLoss, text_bytes
from longspan.evaluation.recall import DEPTHS, Cell, cells, run_cell
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.export.families import save_family
from tests.export.test_round_trip import save_tokenizer
from tests.harness import Ranks

CPU = torch.device("cpu")
WORDS = [f"w{n}" for n in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder beside text shards with its tokenizer."""
    path = tmp_path_factory.mktemp("eval")
    save_family("llama", path / "hf")
    save_tokenizer(path / "hf")
    rng = np.random.default_rng(0)
    texts = [path / f"{n}.txt" for n in range(60)]
    for text in texts:
        text.write_text(" ".join(rng.choice(WORDS, size=rng.integers(20, 90))))
    build(texts, path / "data", tokenizer=path / "hf" / "tokenizer.json", validation=0.3)
    return path


@pytest.fixture(scope="module")
def by_character(folder: Path) -> Path:
    """The same with a tokenizer that knows digits: a token per character."""
    import tokenizers

    path = folder / "characters"
    shutil.copytree(folder / "hf", path / "hf")
    known = {"<unk>": 0, "<s>": 1, "</s>": 2}
    known |= {character: n for n, character in enumerate(string.printable, 3)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    every = tokenizers.Regex(r"[\s\S]")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(every, "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(path / "hf" / "tokenizer.json"))
    texts = sorted(folder.glob("*.txt"))
    build(texts, path / "data", tokenizer=path / "hf" / "tokenizer.json", validation=0.3)
    return path


def overrides(folder: Path) -> list[str]:
    return [f"data.source={folder / 'data'}", "data.context=128", "train.precision=fp32"]


@pytest.mark.parametrize("context", [128, 512])
def test_the_loss_of_a_huggingface_folder_is_that_of_transformers(
    folder: Path, context: int
) -> None:
    """Also in a context that is longer than its max_position_embeddings = 128."""
    from transformers import AutoModelForCausalLM

    options = [*overrides(folder), f"data.context={context}"]
    found = evaluate(folder / "hf", options, Wanted(4, (), 1), World())
    assert bool(found.changes) == (context > 128)
    assert found.losses is not None
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    nats, tokens = 0.0, 0
    for sample in open_source(found.run.data, found.run.model).validation_samples(4):
        assert sample.documents is not None
        for document in np.unique(sample.documents):
            inside = np.flatnonzero(sample.documents == document)
            with torch.no_grad():
                logits = model(torch.tensor(sample.tokens[inside])[None]).logits[0].double()
            targets = torch.tensor(sample.targets[inside])
            count = int((targets >= 0).sum())
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            tokens += count
    assert found.losses.tokens == tokens
    assert found.losses.mean == pytest.approx(nats / tokens, abs=1e-5)
    assert sum(row["nats"] for row in found.losses.by_position()) == pytest.approx(nats, rel=1e-6)
    assert sum(x.nats for x in found.losses.documents()) == pytest.approx(nats, rel=1e-6)


def evaluate_on_rank(rank: int, world: int, folder: str, options: list[str]) -> dict[str, Any]:
    wanted = Wanted(3, ("pairs",), 1)
    return evaluate(Path(folder), options, wanted, World(rank, world, rank)).as_dict()


def test_two_ranks_give_what_one_gives(by_character: Path, ranks: Ranks) -> None:
    options = [*overrides(by_character), "data.context=256"]
    alone = evaluate_on_rank(0, 1, str(by_character / "hf"), options)
    assert alone["recall"]
    both = ranks.run(evaluate_on_rank, 2, str(by_character / "hf"), options)
    assert both == [alone, alone]


def test_ranks_that_split_a_model_give_what_one_gives(by_character: Path, ranks: Ranks) -> None:
    options = [*overrides(by_character), "data.context=256"]
    alone = evaluate_on_rank(0, 1, str(by_character / "hf"), options)
    for found in ranks.run(
        evaluate_on_rank, 2, str(by_character / "hf"), [*options, "layout.tensor=2"]
    ):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["tokens"] == alone["tokens"]
        assert found["recall"] == alone["recall"]


def test_recall_needs_a_tokenizer_that_knows_digits(folder: Path) -> None:
    """With one unknown token for every number each answer would be the same."""
    for task in ("needle", "pairs"):
        with pytest.raises(UserError, match="does not distinguish"):
            evaluate(folder / "hf", overrides(folder), Wanted(0, (task,), 1), World())


def test_a_needle_is_hidden_in_text_alone(by_character: Path) -> None:
    """Without padding, which is token 0, and without the ends of documents."""
    run = load_run(None, [*overrides(by_character), "model.vocab=256"])
    source = open_source(run.data, run.model)
    tokenizer, found = load_tokenizer(by_character / "data"), _filler(source)
    assert len(found) > 100
    assert not {0, tokenizer.eos} & set(found)


def test_a_rank_waits_for_the_slowest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end: a model may take an hour longer for the samples of one than of another."""
    waits = list[float]()

    def join(*_: Any, timeout_s: float = 600.0) -> Any:
        waits.append(timeout_s)
        raise UserError("joined")

    monkeypatch.setattr("longspan.evaluation.evaluate.open_mesh", join)
    with pytest.raises(UserError, match="joined"):
        evaluate(folder / "hf", overrides(folder), Wanted(1, (), 1), World())
    assert waits == [86400.0]


class Copies:
    """A model that predicts what followed the last time when it saw the newest four tokens."""

    def __init__(self, *, is_right: bool) -> None:
        self.head_weight, self._shift = torch.eye(257), 0 if is_right else 1

    def hidden(self, tokens: Tensor) -> Tensor:
        row, found = tokens[0].tolist(), torch.zeros(1, tokens.shape[1], 257)
        after = dict[tuple[int, ...], int]()
        for end in range(4, len(row) + 1):
            key = tuple(row[end - 4 : end])
            found[0, end - 1, (after.get(key, 0) + self._shift) % 257] = 1
            if end < len(row):
                after[key] = row[end]
        return found


@pytest.mark.parametrize("task", ["needle", "pairs"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_model_that_copies_recalls(task: str, depth: float) -> None:
    tokenizer, cell = ByteTokenizer(), Cell(task, 400, depth, 0)
    filler = list(b"The sky was grey. " * 9)
    for is_right in (True, False):
        model: Any = Copies(is_right=is_right)
        outcome = run_cell(model, tokenizer, filler, cell, CPU)
        assert outcome is not None
        assert outcome.is_right == is_right
    assert outcome.distance == pytest.approx(400 * (1 - depth), abs=60)


def test_lengths_halve_and_every_depth_is_tried() -> None:
    found = cells(("needle",), 600, 2)
    assert sorted({cell.length for cell in found}) == [150, 300, 600]
    assert len(found) == 3 * len(DEPTHS) * 2


def sample_of(tokens: list[int], targets: list[int]) -> Sample:
    return Sample(np.array(tokens), np.array(targets))


def test_bytes_are_those_of_targets_with_a_loss() -> None:
    tokenizer = ByteTokenizer()
    tokens = list(b"x" + "é".encode() + b"zabc\0d")
    targets = [*"é".encode(), -100, *b"abc", 0, -100, -100]
    assert text_bytes(sample_of(tokens, targets), tokenizer) == 5


def test_the_space_before_an_answer_is_counted() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "b": 2}, "b"))
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer: Any = SimpleNamespace(decode=inner.decode, eos=None, bos=())
    assert tokenizer.decode([1]) == "b"
    assert text_bytes(sample_of([0, 1], [1, -100]), tokenizer) == 2


def test_a_loss_that_is_not_finite_is_null_and_not_drawn() -> None:
    documents = [DocumentLoss(0, 0, 3, math.nan)]
    positions = {0: (1, math.nan), 256: (2, 5.0), 512: (1, math.inf)}
    losses = Losses([SampleLoss(positions, documents, None)])
    found = Evaluation(Run(), "m", None, "d", [], losses, [])

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    as_json = json.loads(json.dumps(found.as_dict()), parse_constant=refuse)
    assert as_json["loss"] is as_json["perplexity"] is as_json["documents"][0]["loss"] is None
    assert as_json["by_position"][1]["loss"] == 2.5
    assert _plot(found).count("<circle") == 1
    only = Losses([SampleLoss({0: (1, math.nan)}, documents, None)])
    with pytest.raises(UserError, match="non-finite"):
        _plot(replace(found, losses=only))


@pytest.mark.parametrize(
    ("options", "tasks", "message"),
    [
        (["data.source=builtin"], (), "not that of"),
        (["data.source=nowhere"], (), "nowhere"),
        (["layout.tensor=2"], (), "layout.tensor = 2 needs a multiple of 2 processes"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    folder: Path, options: list[str], tasks: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(folder / "hf", [*overrides(folder), *options], Wanted(1, tasks, 1), World())


def test_the_command_prints_and_draws(
    by_character: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = by_character
    options = ["--samples", "2", "--pairs", "--trials", "1", "--plot", str(tmp_path / "x.svg")]
    assert main(["eval", str(folder / "hf"), *overrides(folder), *options]) == 0
    out = capsys.readouterr().out
    assert "nats per token" in out
    assert "pairs: share of right answers" in out
    assert "<svg" in (tmp_path / "x.svg").read_text()
    assert main(["eval", str(folder / "hf"), *overrides(folder), "--samples", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    assert main(["eval", str(folder / "hf"), "--trials", "0"]) == 2
    assert main(["eval", str(folder / "hf"), "--plot", str(tmp_path / "no" / "x.svg")]) == 2
