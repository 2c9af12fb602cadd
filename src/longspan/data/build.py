"""`longspan data build`: tokenize text files, JSONL and Hugging Face datasets into token shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from longspan.data.shards import DTYPES, SPLITS, Index, Shard, dtype_for
from longspan.data.tokenizer import TOKENIZER, ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.errors import UserError
from longspan.files import atomic_folder
from longspan.vocabulary import INDEX

_VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class Document:
    text: str
    split: Literal["train", "validation"] | None = None
    """Set if the input itself names its split."""


def build(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    field_name: str = "text",
    validation: float = 0.05,
    shard_tokens: int = 1 << 27,
    on_document: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Index:
    """Write the documents of `inputs` as token shards into the new folder `out`.

    A hash of its text assigns a document to the train or validation split, so duplicates are never
    in both, and building the same text twice gives the same files. `on_document` is called after
    each document with the number of documents and tokens so far.
    """
    if out.exists():
        raise UserError(f"{out} already exists: choose another folder, or remove it")
    if not 0 <= validation < 1:
        raise UserError(f"--validation must be at least 0 and below 1, got {validation}")
    for path in inputs:
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
    encoder: Tokenizer = JsonTokenizer(tokenizer) if tokenizer else ByteTokenizer()
    dtype = dtype_for(encoder.vocab)
    try:
        with atomic_folder(out) as folder:
            writers = {s: _ShardWriter(folder, s, dtype, shard_tokens) for s in SPLITS}
            total = 0
            for count, document in enumerate(_documents(inputs, field_name), start=1):
                tokens = encoder.encode(document.text)
                if not tokens:
                    continue
                if encoder.eos is not None:
                    tokens.append(encoder.eos)
                writers[document.split or _split_of(document.text, validation)].add(tokens)
                total += len(tokens)
                on_document(count, total)
            shards = [shard for writer in writers.values() for shard in writer.finish()]
            if not any(shard.split == "train" for shard in shards):
                raise UserError(
                    "found no text for the train split in " + ", ".join(map(str, inputs))
                )
            if tokenizer is not None:
                (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
            index = Index(tokenizer=encoder.name, vocab=encoder.vocab, dtype=dtype, shards=shards)
            (folder / INDEX).write_text(index.model_dump_json(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot build {out}: {error.filename or out}: {error.strerror}") from error
    return index


def _split_of(text: str, validation: float) -> Literal["train", "validation"]:
    digest = hashlib.sha256(text.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation * 2**64 else "train"


@dataclass
class _ShardWriter:
    """Appends the documents of one split to shards of at most `limit` tokens.

    A longer document gets a shard of its own.
    """

    folder: Path
    split: Literal["train", "validation"]
    dtype: str
    limit: int
    shards: list[Shard] = field(default_factory=list)
    _encoded: list[bytes] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, tokens: list[int]) -> None:
        start = self._ends[-1] if self._ends else 0
        if start and start + len(tokens) > self.limit:
            self._flush()
            start = 0
        self._encoded.append(np.asarray(tokens, dtype=DTYPES[self.dtype]).tobytes())
        self._ends.append(start + len(tokens))

    def finish(self) -> list[Shard]:
        if self._ends:
            self._flush()
        return self.shards

    def _flush(self) -> None:
        content = b"".join(self._encoded)
        name = f"{self.split}-{len(self.shards):05d}.bin"
        (self.folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.shards.append(
            Shard(
                file=name,
                split=self.split,
                tokens=self._ends[-1],
                sha256=digest,
                document_ends=self._ends,
            )
        )
        self._encoded, self._ends = [], []


def _documents(inputs: list[Path], field_name: str) -> Iterator[Document]:
    for path in inputs:
        if path.is_file():
            yield from _from_file(path, field_name)
        elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            yield from _from_hf(path, field_name)
        else:
            yield from _from_folder(path, field_name)


def _from_folder(folder: Path, field_name: str) -> Iterator[Document]:
    """Yield the documents of all text files below `folder`, hidden ones excluded, in path order."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and _is_text(path):
            yield from _from_file(path, field_name)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(1 << 16)


def _from_file(path: Path, field_name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _from_jsonl(path, field_name)
        return
    try:
        yield Document(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _from_jsonl(path: Path, field_name: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error
            yield Document(_text_of(record, field_name, f"{path}, line {number}"))


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
    splits = loaded.items() if isinstance(loaded, datasets.DatasetDict) else [(None, loaded)]
    for name, records in splits:
        split: Literal["train", "validation"] | None = "train" if name else None
        if name in _VALIDATION_NAMES:
            split = "validation"
        for number, record in enumerate(records):
            yield Document(_text_of(record, field_name, f"{path}, record {number}"), split)
