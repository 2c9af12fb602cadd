"""`longspan data build`: tokenize text files, JSONL and Hugging Face datasets into token shards.

Memory is bounded: of a document that is longer than a piece, one piece after the other is read,
encoded and written; of JSON Lines, one line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from longspan.data.shards import DTYPES, SPLITS, Index, Shard, dtype_for
from longspan.data.tokenizer import TOKENIZER, ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.errors import UserError
from longspan.files import atomic_folder, open_regular
from longspan.vocabulary import INDEX, MAX_DOCUMENTS
from longspan.wording import counted

PIECE = 1 << 21
"""Characters that are encoded at once. A longer document is cut after a line, or else a word; there
its tokens may differ from those of the whole text, if the tokenizer is not bytes."""
MAX_LINE_BYTES = 1 << 27
"""Longest line of JSON Lines, which is parsed as a whole."""

_VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
_UNSUPPORTED = {
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "convert it to JSON Lines"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst"), "decompress it"),
}

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Document:
    pieces: Callable[[], Iterable[str]]
    """Reads the text from its beginning."""
    split: Split | None = None
    """Set if the input itself names its split."""


def build(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    eos: str | None = None,
    field_name: str = "text",
    validation: float = 0.05,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    shard_tokens: int = 1 << 27,
    on_document: Callable[[int, int, float], None] = lambda documents, tokens, fraction: None,
    on_note: Callable[[str], None] = lambda text: print(f"longspan: {text}", file=sys.stderr),
) -> Index:
    """Write the documents of `inputs` as token shards into the new folder `out`.

    A hash of its text assigns a document to the train or validation split, so duplicates are never
    in both, and building the same text twice gives the same files. `include` and `exclude` select
    files of folders. `on_document` is called after each document with the number of documents and
    tokens so far and the fraction of the input that is read; `on_note` with what the user should
    know, such as files that were skipped.
    """
    if out.exists():
        raise UserError(f"{out} already exists: choose another folder, or remove it")
    if not 0 <= validation < 1:
        raise UserError(f"--validation must be at least 0 and below 1, got {validation}")
    encoder = _open_tokenizer(tokenizer, eos, on_note)
    threshold = max(int(validation * 2**64), validation > 0)
    try:
        reader = _Reader(_find_files(inputs, include, exclude, on_note), field_name)
        with atomic_folder(out) as folder:
            written = _Written(folder, encoder, threshold, shard_tokens)
            written.write(reader, on_document)
            if validation and not written.has("validation") and written.lowest < written.highest:
                # Few documents: take the one with the lowest hash, and with it its duplicates.
                for path in folder.iterdir():
                    path.unlink()
                written = _Written(folder, encoder, written.lowest + 1, shard_tokens)
                written.write(reader, on_document)
            if not written.has("train"):
                names = ", ".join(map(str, inputs))
                raise UserError(f"found no text for the train split in {names}")
            if not written.has("validation"):
                on_note(
                    "the validation split is empty, so that a run has no validation loss: "
                    + ("--validation is 0" if not validation else "expected at least two documents")
                )
            if isinstance(encoder, JsonTokenizer):
                encoder.save(folder)
            index = written.index()
            (folder / INDEX).write_text(index.model_dump_json(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot build {out}: {error.filename or out}: {error.strerror}") from error
    return index


def _open_tokenizer(
    path: Path | None, eos: str | None, on_note: Callable[[str], None]
) -> Tokenizer:
    if path is None:
        if eos is not None:
            raise UserError("--eos names a token of --tokenizer; for bytes it is NUL: remove it")
        return ByteTokenizer()
    found = JsonTokenizer(path / TOKENIZER if path.is_dir() else path, eos=eos)
    if found.eos is None:
        on_note(
            f"the tokenizer {path} has no end-of-text token ({', '.join(found.EOS_NAMES)}): "
            "documents follow each other without a mark, unless --eos names one of its tokens"
        )
    return found


@dataclass
class _Written:
    """The shards of both splits."""

    folder: Path
    encoder: Tokenizer
    threshold: int
    """A document whose hash is below this belongs to the validation split."""
    shard_tokens: int
    lowest: int = 1 << 64
    highest: int = -1
    """Of the hashes of documents whose input does not name their split."""
    _writers: dict[str, _ShardWriter] = field(default_factory=dict)

    def write(self, reader: _Reader, on_document: Callable[[int, int, float], None]) -> None:
        dtype = dtype_for(self.encoder.vocab)
        for name in SPLITS:
            self._writers[name] = _ShardWriter(self.folder, name, dtype, self.shard_tokens)
        total = documents = 0
        for count, document in enumerate(reader.documents(), start=1):
            tokens = self._writers[self._split_of(document)].add(self._encode(document.pieces()))
            total, documents = total + tokens, documents + bool(tokens)
            if documents > MAX_DOCUMENTS:
                raise UserError(
                    f"the input has more than {MAX_DOCUMENTS:,} documents: build several folders"
                )
            on_document(count, total, reader.fraction)
        for writer in self._writers.values():
            writer.finish()

    def has(self, split: Split) -> bool:
        return bool(self._writers[split].shards)

    def index(self) -> Index:
        shards = [shard for writer in self._writers.values() for shard in writer.shards]
        vocab = self.encoder.vocab
        name = self.encoder.name
        return Index(tokenizer=name, vocab=vocab, dtype=dtype_for(vocab), shards=shards)

    def _split_of(self, document: Document) -> Split:
        if document.split is not None or self.threshold == 0:
            return document.split or "train"
        digest = hashlib.sha256()
        for piece in document.pieces():
            digest.update(piece.encode())
        value = int.from_bytes(digest.digest()[:8], "big")
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        return "validation" if value < self.threshold else "train"

    def _encode(self, pieces: Iterable[str]) -> Iterator[NDArray[Any]]:
        """The tokens of a document, with its end; nothing for an empty one."""
        is_empty = True
        for piece in pieces:
            if isinstance(self.encoder, ByteTokenizer):
                tokens: NDArray[Any] = np.frombuffer(piece.encode(), dtype=np.uint8)
            else:
                tokens = np.asarray(self.encoder.encode(piece), dtype=np.int64)
            if len(tokens) and tokens.max() >= self.encoder.vocab:
                raise UserError(
                    f"the tokenizer {self.encoder.name} gives token {tokens.max()}, but its "
                    f"vocabulary size is {self.encoder.vocab}"
                )
            is_empty &= len(tokens) == 0
            yield tokens
        if not is_empty and self.encoder.eos is not None:
            yield np.array([self.encoder.eos])


@dataclass
class _ShardWriter:
    """Appends the documents of one split to shards, each up to the document that reaches `limit`
    tokens.
    """

    folder: Path
    split: Split
    dtype: str
    limit: int
    shards: list[Shard] = field(default_factory=list)
    _file: BinaryIO | None = None
    _ends: list[int] = field(default_factory=list)

    def add(self, pieces: Iterator[NDArray[Any]]) -> int:
        """Append a document, and return how many tokens it has."""
        if self._ends and self._ends[-1] >= self.limit:
            self.finish()
        start = end = self._ends[-1] if self._ends else 0
        for tokens in pieces:
            if self._file is None:
                self._file = (self.folder / self._name()).open("wb")
                self._digest = hashlib.sha256()
            content = tokens.astype(DTYPES[self.dtype]).tobytes()
            self._file.write(content)
            self._digest.update(content)
            end += len(tokens)
        if end > start:
            self._ends.append(end)
        return end - start

    def finish(self) -> None:
        """Close the shard."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if not self._ends:
                (self.folder / self._name()).unlink()  # only documents without a token
        if self._ends:
            shard = Shard(
                file=self._name(),
                split=self.split,
                tokens=self._ends[-1],
                sha256=self._digest.hexdigest(),
                document_ends=self._ends,
            )
            self.shards.append(shard)
            self._ends = []

    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.bin"


@dataclass(frozen=True)
class _File:
    """A file of the input, or the folder of a Hugging Face dataset."""

    path: Path
    within: Path | None
    """The folder of the input that links may not leave."""
    bytes: int
    is_dataset: bool = False


def _find_files(
    inputs: list[Path],
    include: Sequence[str],
    exclude: Sequence[str],
    on_note: Callable[[str], None],
) -> list[_File]:
    """Find the files of the inputs; what cannot be used is refused, or skipped with a note."""
    files: list[_File] = []
    skipped: dict[str, list[Path]] = {}
    for path in inputs:
        try:
            found = path.stat()
        except (OSError, ValueError) as error:
            raise UserError(f"no such file or folder: {path}") from error
        if stat.S_ISREG(found.st_mode):
            _check_supported(path)
            if not _is_text(path, None):
                raise UserError(f"{path} is not text: it contains NUL bytes")
            files.append(_File(path, None, found.st_size))
        elif not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{path} is neither a regular file nor a folder")
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            files.append(_File(path, path, 0, is_dataset=True))
        else:
            files += _find_below(path, include, exclude, skipped)
    for reason, paths in skipped.items():
        on_note(f"skipped {counted(len(paths), 'file')} ({reason}), such as {paths[0]}")
    return files


def _find_below(
    folder: Path, include: Sequence[str], exclude: Sequence[str], skipped: dict[str, list[Path]]
) -> list[_File]:
    """Find the text files below `folder`, hidden ones excluded, in path order."""

    def skip(reason: str, path: Path) -> None:
        skipped.setdefault(reason, []).append(path)

    def unreadable(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
        for name in folders:
            if Path(parent, name).is_symlink():  # which os.walk does not enter
                skip("links to folders", Path(parent, name))
    files, root = [], folder.resolve()
    for path in sorted(paths):
        relative = path.relative_to(folder)
        if (include and not _matches(relative, include)) or _matches(relative, exclude):
            continue
        if path.is_symlink() and not _stays_within(path, root):
            skip("links out of the input folder", path)
        elif not path.is_file():
            skip("not regular: FIFO, device, socket or broken link", path)
        elif not path.stat().st_size:
            continue
        else:
            _check_supported(path)
            if _is_text(path, folder):
                files.append(_File(path, folder, path.stat().st_size))
            else:
                skip("not text: NUL bytes", path)
    return files


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    """Whether the name, or for a pattern with a slash the path in the input folder, matches one."""
    names = path.name, path.as_posix()
    return any(fnmatch(names["/" in pattern], pattern) for pattern in patterns)


def _stays_within(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links in a circle
        return False


def _check_supported(path: Path) -> None:
    suffix = path.suffix.lower()
    if suffix in _UNSUPPORTED:
        raise UserError(
            f"{path}: {suffix[1:]} files are not supported: {_UNSUPPORTED[suffix]} first, or skip "
            f"such files of a folder with --exclude '*{suffix}'"
        )


def _is_text(path: Path, within: Path | None) -> bool:
    with open_regular(path, within=within) as file:
        return b"\0" not in file.read(1 << 16)


class _Reader:
    """Reads the documents of files, one after the other."""

    def __init__(self, files: Sequence[_File], field_name: str) -> None:
        self._files, self._field_name = files, field_name
        self._total = sum(file.bytes for file in files)
        self._read = 0

    @property
    def fraction(self) -> float:
        """How much of the input is read; that of datasets is not known, and counts as nothing."""
        return self._read / self._total if self._total else 0.0

    def documents(self) -> Iterator[Document]:
        self._read = 0
        for file in self._files:
            before = self._read
            if file.is_dataset:
                yield from _from_hf(file.path, self._field_name)
            elif _is_json_lines(file, self._field_name):
                yield from self._from_json_lines(file)
            else:
                self._read += file.bytes
                yield _from_text(file)
            self._read = before + file.bytes

    def _from_json_lines(self, file: _File) -> Iterator[Document]:
        with open_regular(file.path, within=file.within) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                self._read += len(line)
                where = f"{file.path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{where} has more than {MAX_LINE_BYTES:,} bytes: split the document"
                    )
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where} is not JSON: {error}") from error
                yield _in_memory(_text_of(record, self._field_name, where))


def _is_json_lines(file: _File, field_name: str) -> bool:
    """Whether a file is JSON Lines, by its name or, if that is .json, by its first two lines."""
    if file.path.suffix in (".jsonl", ".ndjson"):
        return True
    if file.path.suffix != ".json":
        return False
    with open_regular(file.path, within=file.within) as lines:
        try:
            first = json.loads(lines.readline(MAX_LINE_BYTES))
            if not isinstance(first, dict):
                return False
            following = lines.readline(MAX_LINE_BYTES).strip()
            return isinstance(json.loads(following), dict) if following else field_name in first
        except (ValueError, RecursionError):
            return False


def _from_text(file: _File) -> Document:
    def pieces() -> Iterator[str]:
        try:
            with (
                open_regular(file.path, within=file.within) as raw,
                io.TextIOWrapper(raw, encoding="utf-8") as text,
            ):
                yield from _cut(text.read)
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path} is not UTF-8 text: {error}") from error

    if file.bytes > PIECE:
        return Document(pieces)
    kept = list(pieces())  # read once
    return Document(lambda: kept)


def _in_memory(text: str, split: Split | None = None) -> Document:
    def pieces() -> Iterator[str]:
        slices = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return _cut(lambda _: next(slices, ""))

    return Document(pieces, split)


def _cut(read: Callable[[int], str]) -> Iterator[str]:
    """Yield a text in pieces, cut after a line, or else a word, if it is longer than one."""
    text = read(PIECE)
    while text:
        following = read(PIECE)
        end = len(text)
        if following:
            end = text.rfind("\n") + 1 or text.rfind(" ") + 1 or end
        yield text[:end]
        text = text[end:] + following


def _text_of(record: object, field_name: str, where: str) -> str:
    text = record.get(field_name) if isinstance(record, dict) else None
    if not isinstance(text, str):
        got = type(record).__name__
        if isinstance(record, dict):
            got = f"fields {', '.join(record)}"
        raise UserError(f"{where} has no text in the field {field_name!r}, got {got}: set --field")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not text: {error}") from error
    return text


def _from_hf(path: Path, field_name: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is a Hugging Face dataset: pip install 'longspan[hf]' to read it"
        ) from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library and Arrow raise many kinds
        raise UserError(f"{path} is not a readable Hugging Face dataset: {error}") from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {None: loaded}
    names_validation = any(name in _VALIDATION_NAMES for name in splits)
    for name, records in splits.items():
        split: Split | None = "train" if names_validation else None
        if name in _VALIDATION_NAMES:
            split = "validation"
        for number, record in enumerate(records):
            yield _in_memory(_text_of(record, field_name, f"{path}, record {number}"), split)
