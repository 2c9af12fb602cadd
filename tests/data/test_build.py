"""`longspan data build` from each kind of input, and the errors for damaged folders."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.cli import main
from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.data.inspection import inspect_folder
from longspan.data.shards import ShardFile, read_index, read_loss
from longspan.data.tokenizer import JsonTokenizer, load_tokenizer
from longspan.errors import UserError
from longspan.models.generation import encode_prompt


def documents(folder: Path, split: str) -> list[bytes]:
    """Read the documents of a byte-level folder by the description of the format alone."""
    index = json.loads((folder / "index.json").read_text())
    found = []
    for shard in index["shards"]:
        content = (folder / shard["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        if shard["split"] == split:
            starts = [0, *shard["document_ends"][:-1]]
            found += [content[a:b] for a, b in zip(starts, shard["document_ends"], strict=True)]
    return found


def test_text_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("zwei ü")
    (tmp_path / "in" / "deep" / "a.md").write_text("one")
    (tmp_path / "in" / ".hidden").write_text("no")
    (tmp_path / "in" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "single.txt").write_text("three")
    build([tmp_path / "in", tmp_path / "single.txt"], tmp_path / "out", validation=0)
    expected = ["zwei ü\0".encode(), b"one\0", b"three\0"]
    assert documents(tmp_path / "out", "train") == expected
    assert documents(tmp_path / "out", "validation") == []


def test_jsonl_with_a_named_field(tmp_path: Path) -> None:
    lines = [json.dumps({"body": text}) for text in ("eins", "zwei")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n\n")
    build([tmp_path / "in.jsonl"], tmp_path / "out", fields=Fields("body"), validation=0)
    assert documents(tmp_path / "out", "train") == [b"eins\0", b"zwei\0"]
    with pytest.raises(UserError, match=r"line 1 has no text in the field 'text', got fields body"):
        build([tmp_path / "in.jsonl"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_hugging_face_datasets_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"text": ["a", "b"]})
    plain.save_to_disk(str(tmp_path / "plain"))
    build([tmp_path / "plain"], tmp_path / "one", validation=0)
    assert documents(tmp_path / "one", "train") == [b"a\0", b"b\0"]
    splits = datasets.DatasetDict(
        train=plain, test=datasets.Dataset.from_dict({"text": ["held out"]})
    )
    splits.save_to_disk(str(tmp_path / "splits"))
    build([tmp_path / "splits"], tmp_path / "two", validation=0)
    assert documents(tmp_path / "two", "train") == [b"a\0", b"b\0"]
    assert documents(tmp_path / "two", "validation") == [b"held out\0"]


def test_a_tokenizers_json_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["<eos>", "the", "cat", "sat"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("the cat sat the")
    build([tmp_path / "in.txt"], tmp_path / "out", tokenizer=tmp_path / "words.json", validation=0)
    index = read_index(tmp_path / "out")
    assert ShardFile(tmp_path / "out", index, index.shards[0])[:].tolist() == [1, 2, 3, 1, 0]
    copied = JsonTokenizer(tmp_path / "out" / "tokenizer.json")
    assert copied.decode([2, 3]) == "cat sat"


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "uint8"), (257, "uint16"), (65537, "uint32")])
def test_tokens_use_the_smallest_dtype(vocab: int, dtype: str) -> None:
    from longspan.data.shards import dtype_for

    assert dtype_for(vocab) == dtype
    assert np.iinfo(dtype).max >= vocab - 1


def test_duplicates_are_in_one_split_and_builds_are_deterministic(tmp_path: Path) -> None:
    texts = [f"text {n % 60}" for n in range(300)]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    for name in ("one", "two"):
        build([tmp_path / "in.jsonl"], tmp_path / name, validation=0.3)
    train, validation = (documents(tmp_path / "one", split) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert 0.1 < len(validation) / 300 < 0.5
    index = "index.json"
    assert (tmp_path / "one" / index).read_text() == (tmp_path / "two" / index).read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("some text " * 20)
    build([tmp_path / "in.txt"], tmp_path / "out", validation=0)
    return tmp_path / "out"


def test_info_summarizes_the_shards(folder: Path) -> None:
    assert inspect_folder(folder, [64])["splits"]["train"] == {
        "shards": 1,
        "tokens": 201,
        "targets": 201,
        "documents": 1,
        "longest": 201,
        "histogram": [{"from": 128, "to": 255, "documents": 1, "tokens": 201}],
        "contexts": [
            {
                "context": 64,
                "cut_documents": 1,
                "cut_tokens": 201,
                "windows": 4,
                "padding": 1 - 201 / 256,
            }
        ],
    }


def test_info_detects_a_flipped_bit(folder: Path) -> None:
    shard = folder / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[17] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged"):
        inspect_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: Input should be 'longspan-tokens-1'"),
        ({"dtype": "float32"}, "dtype: Input should be 'uint8', 'uint16' or 'uint32'"),
        ({"shards": [{"file": "x.bin"}]}, r"shards\.0\.split: Field required"),
        ({"vocab": -5}, "vocab: Input should be greater than or equal to 1"),
        ({"vocab": 1e400}, "not a JSON number"),
        ({"surprise": 1}, "surprise"),
        ({"vocab": 2**32}, "vocab: Input should be less than or equal to 16777216"),
        ({"tokenizer": "a\x1b[2Jb"}, "expected printable text"),
    ],
)
def test_an_invalid_index_is_rejected(
    folder: Path, change: dict[str, object], message: str
) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        read_index(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"document_ends": [5, 3, 201]},
        {"document_ends": [10**30]},
        {"document_ends": [-1, 201]},
        {"document_ends": []},
        {"document_ends": [100.5, 201]},
        {"sha256": None},
        {"split": "other"},
        {"tokens": 200},
        {"file": "a\0.bin"},
    ],
    ids=str,
)
def test_an_invalid_shard_in_the_index_is_rejected(folder: Path, change: dict[str, object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0].update(change)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"is not a longspan-tokens-1 index: shards\.0"):
        read_index(folder)


def test_a_shard_that_is_listed_twice_is_rejected(folder: Path) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "shards": index["shards"] * 2}))
    with pytest.raises(UserError, match=r"the file train-00000\.bin is listed twice"):
        read_index(folder)


def test_more_tokens_than_can_be_counted_are_rejected(folder: Path) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    (shard,) = index["shards"]
    huge = {**shard, "tokens": 2**48, "document_ends": [2**48]}
    shards = [{**huge, "file": f"{n}.bin"} for n in range(2)]
    path.write_text(json.dumps({**index, "shards": shards}))
    with pytest.raises(UserError, match="tokens: expected at most"):
        read_index(folder)


@pytest.mark.parametrize("content", [b"", b"[" * 99999, b"\xff", b"null", b'{"a": 1, "a": 2}'])
def test_an_index_that_is_not_json_is_rejected(folder: Path, content: bytes) -> None:
    (folder / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"not valid JSON|expected a JSON object"):
        read_index(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "\xff"}', "line 1 is not JSON"),
        (b'{"text": "\\ud800"}', "line 1 is not text"),
        (b"[" * 99999, "line 1 is not JSON"),
        (b"[1]", "has no text in the field 'text', got list"),
        (b"\n\n", "no text for the train split"),
    ],
)
def test_invalid_jsonl_is_rejected_and_leaves_no_files(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        build([tmp_path / "in.jsonl"], tmp_path / "out", validation=0)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_input_creates_no_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        build([tmp_path / "nothing"], tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_hugging_face_dataset_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "dataset_dict.json").write_text("{")
    with pytest.raises(UserError, match="not a readable Hugging Face dataset"):
        build([tmp_path / "in"], tmp_path / "out")


def test_a_tokenizer_with_truncation_padding_and_gaps_in_its_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<eos>": 0, "the": 1, "cat": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("the cat " * 10)
    index = build(
        [tmp_path / "in.txt"], tmp_path / "out", tokenizer=tmp_path / "words.json", validation=0
    )
    assert (index.vocab, index.dtype) == (70_001, "uint32")
    tokens = ShardFile(tmp_path / "out", index, index.shards[0])[:].tolist()
    assert tokens == [1, 70_000] * 10 + [0]


def test_an_index_cannot_refer_to_files_outside_its_folder(folder: Path) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0]["file"] = "../in.txt"
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"shards\.0\.file"):
        read_index(folder)


def test_an_existing_folder_is_not_overwritten(folder: Path) -> None:
    before = (folder / "index.json").read_text()
    with pytest.raises(UserError, match="already exists"):
        build([folder.parent / "in.txt"], folder)
    assert (folder / "index.json").read_text() == before


def test_progress_counts_documents_and_tokens(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    seen: list[tuple[int, int, float]] = []
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    build(inputs, tmp_path / "out", validation=0, on_document=lambda *now: seen.append(now))
    length = len("text of a.txt") + 1  # and the end of the document
    assert seen == [(1, length, 0.5), (2, 2 * length, 1.0)]


def notes_of(inputs: list[Path], out: Path, **options: Any) -> list[str]:
    notes: list[str] = []
    build(inputs, out, on_note=notes.append, **options)
    return notes


def test_links_out_and_special_files_are_skipped_aloud(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("not yours")
    (tmp_path / "outside").mkdir()
    (folder / "mine.txt").write_text("mine")
    (folder / "z-inside.txt").symlink_to("mine.txt")
    (folder / "deep" / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "folder").symlink_to(tmp_path / "outside")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "circle").symlink_to("circle")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    os.mkfifo(folder / "fifo.txt")
    notes = notes_of([folder], tmp_path / "out", validation=0.0)
    assert documents(tmp_path / "out", "train") == [b"mine\0", b"mine\0"]
    said = "\n".join(notes)
    assert f"skipped 1 file (links to folders), such as {folder / 'folder'}" in notes
    assert "skipped 3 files (links out of the input folder)" in said
    assert f"broken link), such as {folder / 'fifo.txt'}" in said
    assert f"NUL bytes), such as {folder / 'image.png'}" in said


@pytest.mark.parametrize("name", ["fifo", "zero"])
def test_an_input_that_is_not_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name} is neither a regular file nor a folder"):
        build([tmp_path / name], tmp_path / "out")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"text\0text")
    with pytest.raises(UserError, match=r"in\.txt is not text"):
        build([tmp_path / "in.txt"], tmp_path / "out")


def test_json_lines_are_recognized_in_json_files(tmp_path: Path) -> None:
    files = {
        "lines": '{"text": "one"}\n{"text": "two"}\n',
        "one": '{"text": "three"}\n',
        "settings": '{"width": 3}',
        "pretty": '{\n "text": "x"\n}',
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content)
    inputs = [tmp_path / f"{name}.json" for name in files]
    build(inputs, tmp_path / "out", validation=0)
    whole = [content.encode() + b"\0" for content in list(files.values())[2:]]
    assert documents(tmp_path / "out", "train") == [b"one\0", b"two\0", b"three\0", *whole]
    (tmp_path / "body.json").write_text('{"body": "one"}\n{"body": "two"}\n')
    with pytest.raises(UserError, match="got fields body: set --field"):
        build([tmp_path / "body.json"], tmp_path / "other")


def test_include_and_exclude_select_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in" / "build" / "x").mkdir(parents=True)
    for name in ("a.py", "b.md", "build/c.py", "build/x/d.py"):
        (tmp_path / "in" / name).write_text(name)
    expected = {
        "one": (["*.py"], [], [b"a.py\0", b"build/c.py\0", b"build/x/d.py\0"]),
        "two": (["*.py"], ["build/*"], [b"a.py\0"]),
        "three": ([], ["*.py"], [b"b.md\0"]),
        "four": (["*.md", "build/x/*"], [], [b"b.md\0", b"build/x/d.py\0"]),
    }
    for name, (include, exclude, texts) in expected.items():
        out = tmp_path / name
        build([tmp_path / "in"], out, validation=0, include=include, exclude=exclude)
        assert documents(out, "train") == texts


def test_at_least_one_document_is_for_validation(tmp_path: Path) -> None:
    texts = ["first", "second", "second", "third"]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    hashes = {text: hashlib.sha256(text.encode()).hexdigest() for text in texts}
    lowest = min(texts, key=lambda text: hashes[text])
    assert notes_of([tmp_path / "in.jsonl"], tmp_path / "out", validation=1e-12) == []
    expected = [text.encode() + b"\0" for text in texts]
    chosen = lowest.encode() + b"\0"
    assert documents(tmp_path / "out", "validation") == [x for x in expected if x == chosen]
    assert documents(tmp_path / "out", "train") == [x for x in expected if x != chosen]
    (tmp_path / "one.txt").write_text("all in one")
    (note,) = notes_of([tmp_path / "one.txt"], tmp_path / "single")
    assert "validation split is empty" in note
    assert documents(tmp_path / "single", "train") == [b"all in one\0"]


def test_documents_of_low_hashes_alone_are_for_training(tmp_path: Path) -> None:
    """One document in 20 would be for validation by its hash, which leaves none to train on."""
    texts = [text for text in map(str, range(400)) if hash_of(text) < 0.05]
    assert len(texts) > 5
    for count in (1, 2, 5):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[:count])
        (tmp_path / "in.jsonl").write_text(lines)
        index = build([tmp_path / "in.jsonl"], tmp_path / str(count), on_note=lambda text: None)
        documents = {shard.split: len(shard.document_ends) for shard in index.shards}
        assert documents == {"train": 1, **({"validation": count - 1} if count > 1 else {})}


def hash_of(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def test_a_file_without_records_is_not_taken_for_text_where_records_are_meant(
    tmp_path: Path,
) -> None:
    (tmp_path / "in.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    with pytest.raises(UserError, match=r"in\.json is a JSON array: expected JSON Lines"):
        build([tmp_path / "in.json"], tmp_path / "out")
    (tmp_path / "in.txt").write_text("text")
    for fields in (Fields(prompt="q", answer="a"), Fields(loss="on")):
        with pytest.raises(UserError, match=r"in\.txt has no records, but --prompt"):
            build([tmp_path / "in.txt"], tmp_path / "out", fields=fields)


def test_documents_and_prompts_begin_as_the_tokenizer_says(tmp_path: Path) -> None:
    """As transformers encodes them; a prompt that begins so by itself gets no second one."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    known = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    template = tokenizers.processors.TemplateProcessing
    inner.post_processor = template("<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert encode_prompt(tokenizer, "a b") == theirs("a b").input_ids == [1, 3, 4]
    assert encode_prompt(tokenizer, "<s> a") == [1, 3]
    lines = [{"text": "a b", "q": "b ", "a": "a"}, {"text": "b", "q": "", "a": "b"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"tokenizer": tmp_path / "tokenizer.json", "validation": 0}
    for name, fields in (("plain", Fields()), ("answers", Fields(prompt="q", answer="a"))):
        index = build([tmp_path / "in.jsonl"], tmp_path / name, fields=fields, **options)
        (shard,) = index.shards
        tokens = np.fromfile(tmp_path / name / shard.file, dtype="<u1").tolist()
        loss = read_loss(tmp_path / name, shard)
        if name == "plain":
            assert (tokens, shard.document_ends, loss) == ([1, 3, 4, 2, 1, 4, 2], [4, 7], None)
        else:
            assert (tokens, shard.document_ends) == ([1, 4, 3, 2, 1, 4, 2], [4, 7])
            assert loss is not None
            assert loss.tolist() == [[2, 4], [5, 7]]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfabc")
    index = build([tmp_path / "in.txt"], tmp_path / "out", validation=0)
    assert (tmp_path / "out" / index.shards[0].file).read_bytes() == b"abc\0"


def test_a_dataset_with_only_a_train_split_gets_a_validation_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    datasets.DatasetDict(train=plain).save_to_disk(str(tmp_path / "in"))
    build([tmp_path / "in"], tmp_path / "out")
    assert len(documents(tmp_path / "out", "validation")) == 1
    assert len(documents(tmp_path / "out", "train")) == 2


def test_long_documents_are_built_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.data.documents.PIECE", 1 << 14)
    monkeypatch.setattr("longspan.data.encoding.BATCH_CHARACTERS", 1 << 14)
    line = "äöü words, words " * 1000 + "\n"
    with (tmp_path / "in.txt").open("w") as file:
        file.writelines([line] * 400)
    size = (tmp_path / "in.txt").stat().st_size
    assert size > 8_000_000
    tracemalloc.start()
    build([tmp_path / "in.txt"], tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert documents(tmp_path / "out", "train") == [(line * 400).encode() + b"\0"]
    for text in ("x" * 100_000, line * 3, " " * 50_000 + "\n", "a\n\nb" * 9000, ""):
        (tmp_path / "in.jsonl").write_text(json.dumps({"text": text + "."}))
        shutil.rmtree(tmp_path / "out")
        build([tmp_path / "in.jsonl"], tmp_path / "out")
        assert documents(tmp_path / "out", "train") == [(text + ".").encode() + b"\0"]


def test_a_line_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.data.reading.MAX_LINE_BYTES", 1000)
    for length, is_refused in ((900, False), (1100, True)):
        (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x" * length}) + "\n")
        if not is_refused:
            build([tmp_path / "in.jsonl"], tmp_path / "out")
            continue
        with pytest.raises(UserError, match="line 1 has more than 1,000 bytes: split the document"):
            build([tmp_path / "in.jsonl"], tmp_path / "other")


def word_tokenizer(folder: Path, words: list[str], config: object = None) -> Path:
    """Write a folder of Hugging Face with a tokenizer that knows these words."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(parents=True)
    ids = {word: n for n, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=words[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_folder_and_its_end_of_text_token(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a b")
    words = ["a", "b", "stop", "halt"]
    named = word_tokenizer(tmp_path / "named", words, {"eos_token": {"content": "halt"}})
    plain = word_tokenizer(tmp_path / "plain", words)

    def tokens(name: str, **options: Any) -> list[int]:
        out = tmp_path / name
        index = build([tmp_path / "in.txt"], out, validation=0, **options)
        (shard,) = index.shards
        return list(ShardFile(out, index, shard)[:])

    assert tokens("one", tokenizer=named) == [0, 1, 3]
    assert tokens("two", tokenizer=named, eos="stop") == [0, 1, 2]
    assert tokens("three", tokenizer=plain / "tokenizer.json", eos="stop") == [0, 1, 2]
    # The folder, and with it the run and its export, remember the token.
    assert load_tokenizer(tmp_path / "two").eos_token == "stop"
    assert read_index(tmp_path / "two").tokenizer == "named"
    notes = notes_of([tmp_path / "in.txt"], tmp_path / "four", validation=0, tokenizer=plain)
    assert any("has no end-of-text token" in note and "--eos" in note for note in notes)
    with pytest.raises(UserError, match="--eos names the end-of-text token 'x', which"):
        tokens("five", tokenizer=plain, eos="x")
    with pytest.raises(UserError, match="--eos names a token of --tokenizer"):
        tokens("five", eos="x")


def test_a_tokenizer_with_an_impossible_id_is_refused(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "t", ["a", "b"])
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = 2**32 - 1
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "in.txt").write_text("a b")
    with pytest.raises(UserError, match="has a token of id 4294967295"):
        build([tmp_path / "in.txt"], tmp_path / "out", tokenizer=folder)


def test_a_token_beyond_the_vocabulary_is_refused_at_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = word_tokenizer(tmp_path / "t", ["a", "b"])
    found = [(np.array([0, 2]), [])]
    monkeypatch.setattr(JsonTokenizer, "encode_batch", lambda self, texts, edges: found)
    (tmp_path / "in.txt").write_text("a b")
    with pytest.raises(UserError, match="gives token 2, but its vocabulary size is 2"):
        build([tmp_path / "in.txt"], tmp_path / "out", tokenizer=folder)


@pytest.mark.parametrize("kind", ["fifo", "zero", "nothing"])
def test_a_tokenizer_that_is_not_a_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    (tmp_path / "in.txt").write_text("a b")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer\.json: it"):
        build([tmp_path / "in.txt"], tmp_path / "out", tokenizer=path)


def test_data_build_says_what_it_skips_and_takes_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b[x].bin", "c.log"):
        (tmp_path / "in" / name).write_text(f"{name}\0" if "bin" in name else name)
    out = str(tmp_path / "out")
    assert main(["data", "build", str(tmp_path / "in"), "-o", out, "--exclude", "*.log"]) == 0
    printed = capsys.readouterr()
    assert "longspan: skipped 1 file (not text: NUL bytes), such as" in printed.err
    assert "b[x].bin" in printed.err
    assert "the validation split is empty" in printed.err
    assert "6 tokens" in printed.out
