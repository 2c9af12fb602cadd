"""`longspan data build`: tokenize text files, JSONL and Hugging Face datasets into token shards.

Memory is bounded: of a document that is longer than a piece, one piece after the other is read,
encoded and written; of JSON Lines, one line.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longspan.data.documents import Document, Fields, Split, clipped
from longspan.data.reading import Reader, find_files
from longspan.data.shard_writer import ShardWriter
from longspan.data.shards import SPLITS, Index, dtype_for
from longspan.data.tokenizer import TOKENIZER, ByteTokenizer, JsonTokenizer, Tokenizer
from longspan.errors import UserError
from longspan.files import atomic_folder
from longspan.vocabulary import INDEX, MAX_DOCUMENTS


def build(
    inputs: list[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    eos: str | None = None,
    fields: Fields = Fields(),  # noqa: B008 (it is frozen)
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
        reader = Reader(find_files(inputs, include, exclude, on_note), fields)
        with atomic_folder(out) as folder:
            written = _Written(folder, encoder, threshold, shard_tokens)
            written.write(reader, on_document)
            if validation and not written.has("validation") and written.lowest < written.highest:
                # Few documents: take the one with the lowest hash, and with it its duplicates.
                for path in folder.iterdir():
                    path.unlink()
                written = _Written(folder, encoder, written.lowest + 1, shard_tokens)
                written.write(reader, on_document)
            names = ", ".join(map(str, inputs))
            if not written.has("train"):
                raise UserError(f"found no text for the train split in {names}")
            if not written.writers["train"].targets:
                raise UserError(f"no token of the train split has a loss in {names}")
            if not written.has("validation"):
                on_note(
                    "the validation split is empty, so that a run has no validation loss: "
                    + ("--validation is 0" if not validation else "expected at least two documents")
                )
            if isinstance(encoder, JsonTokenizer):
                encoder.save(folder)
            index = written.index()
            text = index.model_dump_json(exclude_none=True)
            (folder / INDEX).write_text(text, encoding="utf-8")
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
    writers: dict[Split, ShardWriter] = field(default_factory=dict)

    def write(self, reader: Reader, on_document: Callable[[int, int, float], None]) -> None:
        dtype = dtype_for(self.encoder.vocab)
        for name in SPLITS:
            self.writers[name] = ShardWriter(self.folder, name, dtype, self.shard_tokens)
        total = documents = 0
        for count, document in enumerate(reader.documents(), start=1):
            tokens = self._add(document, self.writers[self._split_of(document)])
            total, documents = total + tokens, documents + bool(tokens)
            if documents > MAX_DOCUMENTS:
                raise UserError(
                    f"the input has more than {MAX_DOCUMENTS:,} documents: build several folders"
                )
            on_document(count, total, reader.fraction)
        for writer in self.writers.values():
            writer.finish()

    def has(self, split: Split) -> bool:
        return bool(self.writers[split].shards)

    def index(self) -> Index:
        shards = [shard for writer in self.writers.values() for shard in writer.shards]
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

    def _add(self, document: Document, writer: ShardWriter) -> int:
        """Write the tokens of a document with its end, none if it is empty; returns how many."""
        characters = total = 0
        for piece in document.pieces():
            stop = characters + len(piece)
            spans = clipped(document.loss or (), characters, stop)
            edges = [edge for span in spans for edge in span]
            ((tokens, found),) = self.encoder.encode_batch([piece], [edges])
            if document.loss is None:
                found = [0, len(tokens)]
            if len(tokens) and tokens.max() >= self.encoder.vocab:
                raise UserError(
                    f"the tokenizer {self.encoder.name} gives token {tokens.max()}, but its "
                    f"vocabulary size is {self.encoder.vocab}"
                )
            writer.write(tokens, zip(found[::2], found[1::2], strict=True))
            characters, total = stop, total + len(tokens)
        if total and self.encoder.eos is not None:
            writer.write(np.array([self.encoder.eos]), [(0, 1)] if document.end_has_loss else [])
            total += 1
        writer.end_document()
        return total
