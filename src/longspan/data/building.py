"""An unfinished folder of shards: what was written to it, and how it is continued after a kill.

It is a hidden folder next to its final name. From time to time `state.json` says up to which
document all is on disk; what was written after that is cut off when a build continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from longspan.data.documents import Document, Split, clipped
from longspan.data.encoding import DocumentEnd, Piece, Place, encoded
from longspan.data.reading import Reader
from longspan.data.shard_writer import ShardWriter, WriterState
from longspan.data.shards import SPLITS, Index, dtype_for
from longspan.data.tokenizer import Marked, Tokenizer
from longspan.errors import UserError
from longspan.files import atomic_write_text, fsync, read_json_object
from longspan.vocabulary import MAX_DOCUMENTS

STATE = "state.json"
MAX_STATE_BYTES = 1 << 27
SAVE_EVERY_S = 5.0

OnDocument = Callable[[int, int, float], None]


class BuildState(BaseModel):
    """How far a build has come."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    key: str
    """Identifies the input and the options."""
    threshold: int
    lowest: int
    highest: int
    file: int
    document: int
    count: int
    documents: int
    tokens: int
    writers: dict[Split, WriterState]


@contextmanager
def partial_folder(out: Path, on_note: Callable[[str], None]) -> Iterator[Path]:
    """Yield the unfinished folder of `out`, and rename it at the end.

    After an error in the input it is removed; after anything else, such as Ctrl-C, it stays, if
    there is a state to continue from.
    """
    folder = out.parent / f".{out.name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process builds {out}: wait for it") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield folder
            (folder / STATE).unlink(missing_ok=True)
            for path in [*folder.iterdir(), folder]:
                fsync(path)
            folder.rename(out)
            fsync(out.parent)
        except BaseException as error:
            if isinstance(error, UserError) or not (folder / STATE).exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                on_note(f"{out} is not finished: the same command continues")
            raise
    finally:
        os.close(descriptor)


class Building:
    """Writes the shards of both splits into an unfinished folder."""

    def __init__(
        self, folder: Path, encoder: Tokenizer, shard_tokens: int, save_every_s: float
    ) -> None:
        self._folder, self._encoder, self._shard_tokens = folder, encoder, shard_tokens
        self._dtype, self._save_every_s = dtype_for(encoder.vocab), save_every_s

    def begin(self, key: str, threshold: int, on_note: Callable[[str], None]) -> None:
        """Begin, or continue what was begun with the same key.

        `threshold`: a document whose hash is below it belongs to the validation split.
        """
        self._key = key
        state = None
        if any(self._folder.iterdir()):
            state = self._read_state()
            if state is None or state.key != key:
                state = None
                on_note("an unfinished build of other input or options is discarded")
        self._reset(threshold)
        if state is not None:
            on_note(f"continuing an unfinished build after {state.count:,} documents")
            self._threshold, self._place = state.threshold, Place(state.file, state.document)
            self.lowest, self.highest = state.lowest, state.highest
            self._count, self._documents = state.count, state.documents
            self._tokens = state.tokens
        kept = {STATE} if state else set()
        for split, writer in self.writers.items():
            kept |= writer.restore(state.writers[split]) if state else set()
        self._remove_all_but(kept)

    def begin_again(self, threshold: int) -> None:
        """Discard what was written, and begin with another threshold."""
        self._remove_all_but(set())
        self._reset(threshold)

    def write(self, reader: Reader, workers: int, on_document: OnDocument) -> None:
        """Write all documents from where it was begun."""
        saved, length = time.monotonic(), 0
        for batch in encoded(self._pieces(reader), self._encoder, workers):
            for piece, marked in batch:
                length += self._write_piece(piece, marked)
                if piece.end is not None:
                    self._end_document(piece.split, piece.end, length)
                    on_document(self._count, self._tokens, piece.end.fraction)
                    length = 0
            if piece.end is not None and time.monotonic() >= saved + self._save_every_s:
                self._save()
                saved = time.monotonic()
        for writer in self.writers.values():
            writer.finish()

    def has(self, split: Split) -> bool:
        return bool(self.writers[split].shards)

    def index(self) -> Index:
        shards = [shard for writer in self.writers.values() for shard in writer.complete_shards()]
        vocab, name = self._encoder.vocab, self._encoder.name
        return Index(tokenizer=name, vocab=vocab, dtype=self._dtype, shards=shards)

    def _pieces(self, reader: Reader) -> Iterator[Piece]:
        for document, place in reader.documents(self._place):
            split, first = self._split_of(document), 0
            text, edges, has_begin = "", None, document.has_special
            for following in document.pieces():
                if text:
                    yield Piece(text, split, edges, has_begin)
                    has_begin = False
                text, stop = following, first + len(following)
                if document.loss is not None:
                    spans = clipped(document.loss, first, stop)
                    edges = [edge for span in spans for edge in span]
                first = stop
            end = DocumentEnd(document.end_has_loss, document.has_special, place, reader.fraction)
            yield Piece(text, split, edges, has_begin, end)

    def _split_of(self, document: Document) -> Split:
        if document.split is not None or self._threshold == 0:
            return document.split or "train"
        digest = hashlib.sha256()
        for piece in document.pieces():
            digest.update(piece.encode())
        value = int.from_bytes(digest.digest()[:8], "big")
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        return "validation" if value < self._threshold else "train"

    def _write_piece(self, piece: Piece, marked: Marked) -> int:
        """Write the tokens of a piece, at the beginning of a document after `bos`."""
        tokens, edges = marked
        bos = self._encoder.bos if piece.has_begin and len(tokens) else ()
        if tuple(tokens[: len(bos)].tolist()) != bos:
            tokens = np.concatenate([np.array(bos, dtype=np.int64), tokens])
            edges = [edge + len(bos) for edge in edges]
        if len(tokens) and tokens.max() >= self._encoder.vocab:
            raise UserError(
                f"the tokenizer {self._encoder.name} gives token {tokens.max()}, but its "
                f"vocabulary size is {self._encoder.vocab}"
            )
        if piece.edges is None:
            edges = [0, len(tokens)]
        self.writers[piece.split].write(tokens, zip(edges[::2], edges[1::2], strict=True))
        return len(tokens)

    def _end_document(self, split: Split, end: DocumentEnd, length: int) -> None:
        """End a document of `length` tokens."""
        writer = self.writers[split]
        if length and end.has_token and self._encoder.eos is not None:
            writer.write(np.array([self._encoder.eos]), [(0, 1)] if end.has_loss else [])
            length += 1
        writer.end_document()
        self._place = end.place
        self._count, self._tokens = self._count + 1, self._tokens + length
        self._documents += bool(length)
        if self._documents > MAX_DOCUMENTS:
            raise UserError(
                f"the input has more than {MAX_DOCUMENTS:,} documents: build several folders"
            )

    def _reset(self, threshold: int) -> None:
        self._threshold, self._place = threshold, Place()
        self.lowest, self.highest = 1 << 64, -1
        """Of the hashes of documents whose input does not name their split."""
        self._count = self._documents = self._tokens = 0
        self.writers: dict[Split, ShardWriter] = {
            name: ShardWriter(self._folder, name, self._dtype, self._shard_tokens)
            for name in SPLITS
        }

    def _save(self) -> None:
        state = BuildState(
            key=self._key,
            threshold=self._threshold,
            lowest=self.lowest,
            highest=self.highest,
            file=self._place.file,
            document=self._place.document,
            count=self._count,
            documents=self._documents,
            tokens=self._tokens,
            writers={split: writer.state() for split, writer in self.writers.items()},
        )
        atomic_write_text(self._folder / STATE, state.model_dump_json())

    def _read_state(self) -> BuildState | None:
        """The state of an unfinished build; None if there is none, or its files are not there."""
        try:
            content = read_json_object(self._folder / STATE, MAX_STATE_BYTES, within=self._folder)
            state = BuildState.model_validate(content)
        except (UserError, ValidationError):
            return None
        names = {name for writer in state.writers.values() for name in writer.files}
        return state if names <= {path.name for path in self._folder.iterdir()} else None

    def _remove_all_but(self, kept: set[str]) -> None:
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()
