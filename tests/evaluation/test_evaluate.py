"""`longspan eval`: against transformers, on one and two ranks, and with models that recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.cli import main
from longspan.data import open_source
from longspan.data.build import build
from longspan.data.tokenizer import ByteTokenizer, load_tokenizer
from longspan.errors import UserError
from longspan.evaluation.evaluate import Wanted, evaluate
from longspan.evaluation.losses import text_bytes
from longspan.evaluation.recall import DEPTHS, Cell, cells, run_cell
from longspan.generate import complete_from_run
from longspan.parallel.world import World
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


def overrides(folder: Path) -> list[str]:
    return [f"data.source={folder / 'data'}", "data.context=128", "train.precision=fp32"]


def test_the_loss_of_a_huggingface_folder_is_that_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = evaluate(folder / "hf", overrides(folder), Wanted(4, (), 1), World())
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


def test_two_ranks_give_what_one_gives(folder: Path, ranks: Ranks) -> None:
    options = [*overrides(folder), "data.context=256"]
    alone = evaluate_on_rank(0, 1, str(folder / "hf"), options)
    assert alone["recall"]
    both = ranks.run(evaluate_on_rank, 2, str(folder / "hf"), options)
    assert both == [alone, alone]


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


def test_bytes_are_those_of_targets_with_a_loss() -> None:
    tokenizer = ByteTokenizer()
    targets = np.array([*"é".encode(), -100, *b"ab", -100, *b"c"])
    assert text_bytes(targets, tokenizer) == 5


@pytest.mark.parametrize(
    ("options", "tasks", "message"),
    [
        (["data.source=builtin"], (), "not that of"),
        (["data.source=nowhere"], (), "nowhere"),
        (["layout.tensor=2"], (), "layout"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    folder: Path, options: list[str], tasks: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(folder / "hf", [*overrides(folder), *options], Wanted(1, tasks, 1), World())


def test_the_command_prints_and_draws(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_huggingface_folder_generates_what_transformers_does(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder / "hf")
    prompt = tokenizer.encode("w5 w60 w7")
    pieces = complete_from_run(
        folder / "hf", "w5 w60 w7", count=12, temperature=0.0, top_p=1.0, seed=0
    )
    text = "".join(piece.text for piece in pieces)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert tokenizer.encode(text) == expected[0].tolist()
