"""The tokenizer and generation settings of an exported run, as transformers loads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.data.build import build
from longspan.data.tokenizer import Tokenizer, load_tokenizer
from longspan.export.huggingface import export
from longspan.export.tokenizer import write_tokenizer
from longspan.training import train
from tests.export.test_huggingface import DENSE
from tests.parallel.test_apply import run_of

TEXTS = ["", " a  b\t\n", "Ā ü 漢字 \0 end", "don't . stop", "a\r\nb", "<eos>", "w1 w2"]
TEXTS.append("".join(map(chr, range(0, 0xD800, 37))))


def save_word_tokenizer(path: Path) -> None:
    """A tokenizer whose post-processor adds special tokens, as those of Llama and BERT do."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "<s>": 1} | {f"w{n}": n + 2 for n in range(68)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<eos>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", 1), ("<eos>", 70)]
    )
    inner.save(str(path))


def loaded_by_transformers(folder: Path) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def generate(model: Any, tokens: torch.Tensor, forced: int) -> list[int]:
    """The tokens that transformers generates, of at most 8, if the third one is `forced`."""

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, forced] = torch.inf if ids.shape[1] == tokens.shape[1] + 2 else -torch.inf
        return scores

    out = model.generate(tokens, max_new_tokens=8, do_sample=False, logits_processor=[force])
    return [int(token) for token in out[0, tokens.shape[1] :]]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_transformers_has_the_tokenizer_and_stops_at_its_end_token(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text(" ".join(f"w{n % 60}" for n in range(300)))
    path = tmp_path / "tokenizer.json" if kind == "words" else None
    if path:
        save_word_tokenizer(path)
    build([tmp_path / "in.txt"], tmp_path / "data", tokenizer=path, validation=0)
    train(run_of(1, *DENSE, f"data.source={tmp_path / 'data'}"), tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "out").notes == []  # nothing is missing
    model, theirs = loaded_by_transformers(tmp_path / "out")
    ours = load_tokenizer(tmp_path / "run")
    eos = 70 if kind == "words" else 0
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (eos, None, None)
    for settings in (model.config, model.generation_config):
        ids = (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id)
        assert ids == (eos, None, None)
    assert model.config.vocab_size >= len(theirs)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
    check_decoding(ours, theirs, skips_special=kind == "words")
    tokens = theirs("w1 w2", return_tensors="pt")["input_ids"]
    found = generate(model, tokens, forced=eos)
    assert (len(found), found[-1]) == (3, eos)
    assert len(generate(model, tokens, forced=eos + 1)) == 8


def check_decoding(ours: Tokenizer, theirs: Any, *, skips_special: bool) -> None:
    """Compare the texts of random ids, which for bytes are often no valid UTF-8."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab) for _ in range(rng.randrange(1, 12))]
        assert theirs.decode(ids, skip_special_tokens=skips_special) == ours.decode(ids)


def test_the_recall_task_has_no_tokenizer(tmp_path: Path) -> None:
    train(run_of(1, *DENSE), tmp_path / "run")
    assert "there is no tokenizer" in str(export(tmp_path / "run", tmp_path / "out"))
    assert not list((tmp_path / "out").glob("tokenizer*"))
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id is None
    assert len(generate(model, torch.tensor([[5, 6]]), forced=2)) == 8  # the end token of Llama


def test_a_tokenizer_without_an_end_token_is_reported(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos, tokenizer.eos_token) == (None, None)
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", tokenizer, context=8)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.eos_token_id is None
    assert theirs("b")["input_ids"] == [1]
