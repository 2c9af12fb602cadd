"""Which tokens have a loss: from records to shards, and from shards through packing to targets."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cli import main
from longspan.config import Data, Model
from longspan.constants import IGNORE_INDEX
from longspan.data import open_source
from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.data.inspection import inspect_folder
from longspan.data.packing import PackedSource
from longspan.data.shards import ShardFile, read_index
from longspan.data.source import TokenSource
from longspan.data.token_split import TokenSplit
from longspan.data.tokenizer import ByteTokenizer
from longspan.errors import UserError

PAIR = Fields(prompt="q", answer="a")


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def masks(folder: Path) -> list[tuple[list[int], str]]:
    """The tokens of each training document and their mask, by the description of the format."""
    index, found = json.loads((folder / "index.json").read_text()), []
    for shard in index["shards"]:
        content = (folder / shard["file"]).read_bytes()
        tokens = np.frombuffer(content, {"uint8": "<u1", "uint16": "<u2"}[index["dtype"]])
        mask = ["." if "loss" in shard else "x"] * len(tokens)
        if "loss" in shard:
            spans = (folder / shard["loss"]["file"]).read_bytes()
            assert hashlib.sha256(spans).hexdigest() == shard["loss"]["sha256"]
            for first, stop in np.frombuffer(spans, "<i8").reshape(shard["loss"]["spans"], 2):
                mask[first:stop] = "x" * (stop - first)
        for first, stop in pairwise([0, *shard["document_ends"]]):
            found.append((tokens[first:stop].tolist(), "".join(mask[first:stop])))
    return found


def test_only_answers_and_the_end_after_them_have_a_loss(tmp_path: Path) -> None:
    records = [{"q": "wie? ", "a": "sö"}, {"q": "", "a": "b"}, {"q": "none", "a": ""}]
    path = write_lines(tmp_path / "in.jsonl", records)
    build([path], tmp_path / "out", fields=PAIR, validation=0, shard_tokens=9)
    expected = [("wie? sö", ".....xxxx"), ("b", "xx"), ("none", "....x")]
    assert masks(tmp_path / "out") == [([*t.encode(), 0], mask) for t, mask in expected]
    train = inspect_folder(tmp_path / "out")["splits"]["train"]
    assert (train["tokens"], train["targets"]) == (16, 7)
    # A document's first token is no target, whether it has a loss or not.
    source = open_source(Data(source=str(tmp_path / "out"), context=15), Model())
    assert "43.8% of them" not in source.describe()
    assert "tokens: train 16, validation 0, 37.5% of them with a loss" in source.describe()


def test_characters_with_a_loss_from_a_field(tmp_path: Path) -> None:
    records = [
        {"text": "ab cd ef", "on": [[0, 2], [6, 8]]},
        {"text": "ab cd", "on": [[3, 4]]},
        {"text": "ab", "on": []},
    ]
    path = write_lines(tmp_path / "in.jsonl", records)
    build([path], tmp_path / "out", fields=Fields(loss="on"), validation=0)
    assert [mask for _, mask in masks(tmp_path / "out")] == ["xx....xxx", "...x..", "..."]


def test_a_document_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"q": "one two ", "a": "three four"}]
    path = write_lines(tmp_path / "in.jsonl", records)
    monkeypatch.setattr("longspan.data.documents.PIECE", 5)
    build([path], tmp_path / "out", fields=PAIR, validation=0)
    assert masks(tmp_path / "out") == [([*b"one two three four", 0], "." * 8 + "x" * 11)]


def test_tokens_of_a_tokenizer_are_masked_by_their_characters(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "the": 1, "cat": 2, "sat": 3, "catsat": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    records = [{"q": "the cat ", "a": "sat the"}, {"q": "the cat", "a": "sat"}]
    path = write_lines(tmp_path / "in.jsonl", records)
    build([path], tmp_path / "out", tokenizer=tmp_path, fields=PAIR, validation=0)
    # A token on both sides of the edge belongs to the answer.
    assert masks(tmp_path / "out") == [([1, 2, 3, 1, 0], "..xxx"), ([1, 4, 0], ".xx")]


def test_plain_text_has_no_mask_and_the_index_of_before(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "one"}, {"text": "two"}])
    build([path], tmp_path / "out", validation=0)
    assert "loss" not in (tmp_path / "out" / "index.json").read_text()
    assert not list((tmp_path / "out").glob("*.loss"))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    density=st.floats(0, 1),
    context=st.integers(1, 40),
)
def test_targets_are_the_tokens_with_a_loss(
    lengths: list[int], seed: int, density: float, context: int
) -> None:
    total, ends = sum(lengths), np.cumsum(lengths)
    mask = np.random.default_rng(seed).random(total) < density
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    stream = np.arange(total) % 251
    split = TokenSplit([stream], ends, edges.reshape(-1, 2))
    # By hand: the targets of each position.
    begins = {0, *ends.tolist()}
    counted = [p for p in range(1, total) if mask[p] and p not in begins]
    targets = [int(stream[p]) if p in counted else IGNORE_INDEX for p in range(1, total + 1)]
    assert split.targets == sum(target != IGNORE_INDEX for target in targets)
    if not split.targets:
        return
    splits = {"train": split, "validation": TokenSplit([], np.zeros(0, dtype=np.int64))}
    for kind in (TokenSource, PackedSource):
        if total <= context:
            continue  # less than a sample
        source = kind(splits, context, ByteTokenizer(), 256, "")
        for index in range(source.num_windows("train")):
            sample = source.sample(3, index)
            found = int((sample.targets != IGNORE_INDEX).sum())
            assert source.num_targets(3, index) == found
            if kind is TokenSource:
                start = source._train_window(3, index) * context
                assert sample.targets.tolist() == targets[start : start + context]
        if kind is PackedSource:  # every target once
            samples = [source.sample(3, index) for index in range(source.num_windows("train"))]
            kept = [int(t) for x in samples for t in x.targets if t != IGNORE_INDEX]
            assert sorted(kept) == sorted(t for t in targets if t != IGNORE_INDEX)


@pytest.mark.parametrize("documents", ["isolate", "join"])
def test_other_prompts_have_the_same_targets(tmp_path: Path, documents: str) -> None:
    for name, letter in (("one", "p"), ("two", "r")):
        records = [{"q": letter * (3 + n % 9), "a": f"answer {n}"} for n in range(30)]
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        build([path], tmp_path / name, fields=PAIR, validation=0)
    sources = [
        open_source(Data(source=str(tmp_path / x), context=24, documents=documents), Model())
        for x in ("one", "two")
    ]
    for index in range(15):
        one, two = (source.sample(0, index) for source in sources)
        assert not np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.targets, two.targets)


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        ({"q": "x"}, ["--prompt=q", "--answer=a"], "no text in the field 'a', got fields q"),
        ({"text": "x"}, ["--prompt=q"], "give both"),
        ({"text": "x"}, ["--prompt=q", "--answer=a", "--loss=l"], "take the place of --field"),
        ({"text": "abc", "l": [[2, 1]]}, ["--loss=l"], "has [2, 1]: expected pairs"),
        ({"text": "abc", "l": [[0, 4]]}, ["--loss=l"], "that increase up to 3"),
        ({"text": "abc", "l": [[0, True]]}, ["--loss=l"], "has [0, True]"),
        ({"text": "abc"}, ["--loss=l"], "the field 'l' is NoneType"),
        ({"text": "abc", "l": []}, ["--loss=l"], "no token of the train split has a loss"),
        ({"prompt": "abc"}, [], "set --field, --prompt and --answer, or --chat"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, Any],
    options: list[str],
    words: str,
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [record])
    assert main(["data", "build", str(path), "-o", str(tmp_path / "out"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_mask_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"q": "abc", "a": "def"}] * 2)
    build([path], tmp_path / "out", fields=PAIR, validation=0)
    loss, folder = tmp_path / "out" / "train-00000.loss", tmp_path / "out"
    data, content = Data(source=str(folder), context=4), loss.read_bytes()
    index = read_index(folder)
    assert len(ShardFile(folder, index, index.shards[0])) == 14
    for changed, words in (
        (content[:-1], "has 31 bytes, expected 32"),
        (content[:-1] + b"\1", "its SHA-256 is not the index's"),
    ):
        loss.write_bytes(changed)
        with pytest.raises(UserError, match=words):
            open_source(data, Model())
    wrong = np.array([[3, 7], [6, 99]], dtype="<i8").tobytes()
    loss.write_bytes(wrong)
    text = (folder / "index.json").read_text()
    sha = hashlib.sha256(content).hexdigest(), hashlib.sha256(wrong).hexdigest()
    (folder / "index.json").write_text(text.replace(*sha))
    with pytest.raises(UserError, match="holds no spans of tokens that increase"):
        inspect_folder(folder)
    loss.unlink()
    with pytest.raises(UserError, match=r"cannot read .*train-00000\.loss"):
        open_source(data, Model())
