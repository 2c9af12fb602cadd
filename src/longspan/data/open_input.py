"""Opens the files of an input: compressed ones as streams, columnar ones as batches of records."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from longspan.errors import UserError
from longspan.files import open_regular, read_json_object

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
COLUMNAR = (".parquet", ".arrow", ".feather")
BATCH_RECORDS, BATCH_BYTES = 256, 1 << 25
"""Records of a columnar file that are in memory at once: so many, or of so many bytes if fewer."""
MAX_STATE_BYTES = 1 << 24


@contextmanager
def open_stream(path: Path, within: Path | None) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The bytes of a file, decompressed, and a function that says how many of its own were read."""
    with open_regular(path, within=within) as raw:
        opened = _decompressed(raw, path)
        try:
            with opened:
                yield opened, raw.tell
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # of the file, not of what is in it
            raise UserError(
                f"{path} is damaged or not compressed as its name says: {error}"
            ) from error


def _decompressed(raw: BinaryIO, path: Path) -> Any:
    match path.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            stream = import_pyarrow(path).input_stream(raw, compression="zstd")
            return io.BufferedReader(stream, 1 << 20)
    return raw


def inner_suffix(path: Path) -> str:
    """The suffix of a file without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow: pip install 'longspan[arrow]'") from error
    return pyarrow


Batches = Iterator[tuple[list[dict[str, Any]], float]]
"""Records, and how much of the file is read."""


def read_columnar(path: Path, within: Path | None, columns: Sequence[str]) -> Batches:
    """The records of a Parquet or Arrow file, of which only `columns` are read."""
    pyarrow = import_pyarrow(path)
    reader = _read_parquet if path.suffix.lower() == ".parquet" else _read_arrow
    with open_regular(path, within=within) as file:
        try:
            yield from reader(pyarrow, file, columns)
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # of the file, not of what is in it
            raise UserError(f"{path} is not a readable {path.suffix[1:]} file: {error}") from error
        except UnicodeDecodeError as error:  # which Arrow does not look for
            raise UserError(f"{path} has text that is not UTF-8: {error}") from error


def _read_parquet(pyarrow: Any, file: BinaryIO, columns: Sequence[str]) -> Batches:
    from pyarrow import parquet

    # A page at a time, not a row group: those may have gigabytes.
    opened = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    names = _columns_of(opened.schema_arrow.names, columns)
    total, done = opened.metadata.num_rows, 0
    groups = (opened.metadata.row_group(n) for n in range(opened.metadata.num_row_groups))
    columns_of = ((group.column(n) for n in range(group.num_columns)) for group in groups)
    size = sum(
        column.total_uncompressed_size
        for of_group in columns_of
        for column in of_group
        if column.path_in_schema.split(".")[0] in names
    )
    rows = _rows_at_once(size, total)
    for batch in opened.iter_batches(rows, columns=names, use_threads=False):
        done += batch.num_rows
        yield _as_records(batch, opened.schema_arrow.names), done / total


def _read_arrow(pyarrow: Any, file: BinaryIO, columns: Sequence[str]) -> Batches:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        opened = pyarrow.ipc.open_file(file)
        batches = (opened.get_batch(n) for n in range(opened.num_record_batches))
    else:
        opened = pyarrow.ipc.open_stream(file)
        batches = iter(opened)
    names = _columns_of(opened.schema.names, columns)
    for whole in batches:
        batch = whole.select(names)
        rows = _rows_at_once(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, rows):
            yield _as_records(batch.slice(start, rows), opened.schema.names), file.tell() / size


def _rows_at_once(size: int, rows: int) -> int:
    """How many of `rows` records, of `size` bytes in all, to have in memory at once."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES * rows // max(1, size)))


def _columns_of(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those of the wanted columns that a file has; OSError for two of one name."""
    found = [name for name in names if name in wanted]
    if twice := next((name for name in found if found.count(name) > 1), None):
        raise OSError(f"it has two columns {twice!r}")
    return found


def _as_records(batch: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a batch; columns that were not read are there by name, for errors."""
    rows = batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]
    return [{**dict.fromkeys(names), **row} for row in rows]


def dataset_files(folder: Path) -> list[tuple[str | None, Path]]:
    """The Arrow files of a dataset that `save_to_disk` wrote, each with the name of its split."""
    try:
        if not (folder / "dataset_dict.json").exists():
            return [(None, path) for path in _files_of_split(folder)]
        names = read_json_object(folder / "dataset_dict.json", MAX_STATE_BYTES).get("splits")
        if not isinstance(names, list) or not all(map(_is_plain_name, names)):
            raise UserError("dataset_dict.json has no names of splits")
        return [(name, path) for name in names for path in _files_of_split(folder / name)]
    except UserError as error:
        raise UserError(f"{folder} is not a readable Hugging Face dataset: {error}") from error


def _files_of_split(folder: Path) -> list[Path]:
    files = read_json_object(folder / "state.json", MAX_STATE_BYTES).get("_data_files")
    names = [x.get("filename") if isinstance(x, dict) else None for x in files or ()]
    if not isinstance(files, list) or not all(map(_is_plain_name, names)):
        raise UserError(f"{folder / 'state.json'} has no names of Arrow files")
    return [folder / str(name) for name in names]


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"}


def is_json_array(path: Path, within: Path | None) -> bool:
    """Whether a .json file begins as an array."""
    if inner_suffix(path) != ".json":
        return False
    with open_stream(path, within) as (file, _):
        return file.read(1 << 10).lstrip().startswith(b"[")


def json_lines_in(path: Path, within: Path | None, main_field: str, limit: int) -> bool:
    """Whether a file is JSON Lines, by its name or, if that is .json, by its first two lines."""
    suffix = inner_suffix(path)
    if suffix in (".jsonl", ".ndjson"):
        return True
    if suffix != ".json":
        return False
    with open_stream(path, within) as (lines, _):
        try:
            first = json.loads(lines.readline(limit))
            if not isinstance(first, dict):
                return False
            following = lines.readline(limit).strip()
            return isinstance(json.loads(following), dict) if following else main_field in first
        except (ValueError, RecursionError):
            return False
