"""`longspan data build` from compressed and columnar files: the documents of plain JSON Lines."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.data.open_input import read_columnar
from longspan.errors import UserError
from tests.data.test_building import build_until, contents

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RECORDS = [
    {"id": n, "text": f"text {n} ü " * (n % 17), "q": f"q{n}", "a": f"a{n}", "on": [[0, 2]]}
    for n in range(1, 300)
]


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its name says."""
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(content))
        case ".bz2":
            path.write_bytes(bz2.compress(content))
        case ".xz":
            path.write_bytes(lzma.compress(content))
        case ".zst":
            with pyarrow.output_stream(str(path), compression="zstd") as stream:
                stream.write(content)
        case ".parquet":
            table = pyarrow.Table.from_pylist(RECORDS)
            parquet.write_table(table, path, row_group_size=100)
        case ".arrow":
            table = pyarrow.Table.from_pylist(RECORDS)
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table, max_chunksize=100)
        case ".feather":
            table = pyarrow.Table.from_pylist(RECORDS)
            with pyarrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
        case _:
            path.write_bytes(content)
    return path


LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.ndjson.xz"),
        *("a.parquet", "a.arrow", "a.feather"),
    ],
)
@pytest.mark.parametrize("fields", [Fields(), Fields(prompt="q", answer="a")], ids=["text", "pair"])
def test_every_format_gives_the_same_bytes(tmp_path: Path, name: str, fields: Fields) -> None:
    (tmp_path / "in").mkdir()
    build([write(tmp_path / "in" / "a.jsonl", LINES)], tmp_path / "plain", fields=fields)
    (tmp_path / "in" / "a.jsonl").unlink()
    write(tmp_path / "in" / name, LINES)
    seen: list[float] = []
    build(
        [tmp_path / "in"],
        tmp_path / "out",
        fields=fields,
        on_document=lambda documents, tokens, fraction: seen.append(fraction),
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    assert seen == sorted(seen)
    assert 0.9 < seen[-1] <= 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_killed_build_of_every_format_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("longspan.data.encoding.BATCH_PIECES", 50)
    path = write(tmp_path / name, LINES)
    build([path], tmp_path / "whole")
    build_until(200, [path], tmp_path / "out")
    notes: list[str] = []
    build([path], tmp_path / "out", on_note=notes.append)
    assert notes == ["continuing an unfinished build after 150 documents"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_compressed_text_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", b"some text")
    build([path], tmp_path / "out", validation=0)
    assert (tmp_path / "out" / "train-00000.bin").read_bytes() == b"some text\0"


def test_loss_spans_of_a_column(tmp_path: Path) -> None:
    fields = Fields(loss="on")
    lines = "".join(json.dumps(x) + "\n" for x in RECORDS if len(x["text"]) > 2).encode()
    kept = [x for x in RECORDS if len(str(x["text"])) > 2]
    parquet.write_table(pyarrow.Table.from_pylist(kept), tmp_path / "a.parquet")
    build([write(tmp_path / "a.jsonl", lines)], tmp_path / "plain", fields=fields)
    build([tmp_path / "a.parquet"], tmp_path / "out", fields=fields)
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz is damaged or not compressed as its name says"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-400], "damaged or not compressed"),
        ("a.jsonl.zst", b"nothing of zstandard", "damaged or not compressed"),
        ("a.jsonl.bz2", b"no bz2", "damaged or not compressed"),
        ("a.jsonl.xz", b"no xz", "damaged or not compressed"),
        (
            "a.txt.gz",
            gzip.compress(b"a\0b", mtime=0),
            "a.txt.gz is not text: it contains NUL bytes",
        ),
        ("a.parquet", b"PAR1 and no more", "a.parquet is not a readable parquet file"),
        ("a.arrow", b"ARROW1 and no more", "a.arrow is not a readable arrow file"),
        ("a.arrow", b"xxxxxxxxxxxxxxxx", "a.arrow is not a readable arrow file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        build([tmp_path / name], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_text_that_is_not_utf8_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    buffers = [None, *map(pyarrow.py_buffer, (bytes([0, 0, 0, 0, 2, 0, 0, 0]), b"\xff\xfe"))]
    wrong = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text"] * 2)
    for table, words in (
        (pyarrow.table({"text": wrong}), "not UTF-8"),
        (twice, "two columns 'text'"),
    ):
        parquet.write_table(table, tmp_path / "in.parquet")
        with pytest.raises(UserError, match=rf"in\.parquet .*{words}"):
            build([tmp_path / "in.parquet"], tmp_path / "out")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_few_long_records_are_in_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("longspan.data.open_input.BATCH_BYTES", 1 << 20)
    texts = [f"{n:03d}" + os.urandom(32768).hex() for n in range(64)]  # 64 KiB each
    table = pyarrow.table({"n": range(64), "text": texts})
    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, use_dictionary=False)
    else:
        kind = pyarrow.ipc.new_stream if suffix == "arrow" else pyarrow.ipc.new_file
        with kind(str(path), table.schema) as file:
            file.write_table(table)
    batches = [records for records, _ in read_columnar(path, None, ["text"])]
    assert [record["text"] for records in batches for record in records] == texts
    assert 8 <= max(map(len, batches)) <= 16


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", b"")
    with pytest.raises(UserError, match=r"record 1 has no text in the field 'body', got fields id"):
        build([path], tmp_path / "out", fields=Fields("body"))


@pytest.mark.parametrize("names", [["../x"], [3], "a", None])
def test_a_dataset_cannot_name_files_outside_its_folder(tmp_path: Path, names: Any) -> None:
    (tmp_path / "in").mkdir()
    files = [{"filename": name} for name in names] if isinstance(names, list) else names
    (tmp_path / "in" / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(UserError, match="is not a readable Hugging Face dataset"):
        build([tmp_path / "in"], tmp_path / "out")
