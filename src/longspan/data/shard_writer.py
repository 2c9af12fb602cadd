"""Writes the shards of a split, as `data.shards` describes them, in bounded memory.

Beside each shard a file `.ends` holds the ends of its documents until the index is written, and
`state` says how far a shard has come: a writer that is given it continues there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from longspan.data.documents import Span, Split
from longspan.data.shards import DTYPES, Loss, Shard
from longspan.files import fsync, sha256_of

ENDS = ".ends"


class WrittenShard(BaseModel):
    """A complete shard, without the ends of its documents."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str
    tokens: int
    sha256: str
    loss: Loss | None = None


class WriterState(BaseModel):
    """How far a writer has come."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shards: list[WrittenShard] = []
    tokens: int = 0
    """Of the shard that is not complete, as the following."""
    documents: int = 0
    spans: int = 0
    """Those in its file of spans."""
    last_span: list[int] = []
    """The last one, which may grow."""
    targets: int = 0
    """Tokens with a loss, of all shards."""
    files: list[str] = []
    """The files that this is of."""


@dataclass
class ShardWriter:
    """Appends documents to shards, each up to the document that reaches `limit` tokens."""

    folder: Path
    split: Split
    dtype: str
    limit: int
    shards: list[WrittenShard] = field(default_factory=list)
    """Those that are complete."""
    targets: int = 0
    """Tokens with a loss so far."""
    _files: dict[str, BinaryIO] = field(default_factory=dict)
    """Those of the shard that is not complete, by suffix."""
    _tokens: int = 0
    _end: int = 0
    """Tokens up to the end of the last document."""
    _documents: int = 0
    _spans: int = 0
    _last_span: Span | None = None

    def write(self, tokens: NDArray[Any], loss: Iterable[Span]) -> None:
        """Append tokens of a document, of which the spans `loss` have a loss."""
        if not len(tokens):
            return
        for first, stop in loss:
            if first < stop:
                self._add_span(self._tokens + first, self._tokens + stop)
        content = tokens.astype(DTYPES[self.dtype]).tobytes()
        if ".bin" not in self._files:
            self._digest = hashlib.sha256()
        self._file(".bin").write(content)
        self._digest.update(content)
        self._tokens += len(tokens)

    def end_document(self) -> None:
        """End the document, and the shard if it has reached its limit."""
        if self._tokens > self._end:
            self._file(ENDS).write(self._tokens.to_bytes(8, "little"))
            self._end = self._tokens
            self._documents += 1
        if self._tokens >= self.limit:
            self.finish()

    def finish(self) -> None:
        """Close the shard."""
        if not self._tokens:
            return
        loss = None
        if self._spans or self._last_span != (0, self._tokens):
            self._flush_span()
            self._file(".loss").close()
            path = self._path(".loss")
            loss = Loss(file=path.name, spans=self._spans, sha256=sha256_of(path))
        for file in self._files.values():
            file.close()
            fsync(Path(file.name))
        name, sha256 = self._path(".bin").name, self._digest.hexdigest()
        self.shards.append(WrittenShard(file=name, tokens=self._tokens, sha256=sha256, loss=loss))
        self._files, self._tokens, self._end, self._documents = {}, 0, 0, 0
        self._spans, self._last_span = 0, None

    def complete_shards(self) -> list[Shard]:
        """The shards as they stand in the index; their files of ends are removed."""
        found = []
        for shard in self.shards:
            path = (self.folder / shard.file).with_suffix(ENDS)
            ends = np.fromfile(path, dtype="<i8").tolist()
            found.append(Shard(**dict(shard), split=self.split, document_ends=ends))
            path.unlink()
        return found

    def state(self) -> WriterState:
        """How far it has come, after a document, once that is safely on disk."""
        for file in self._files.values():
            file.flush()
            fsync(Path(file.name))
        return WriterState(
            shards=list(self.shards),
            tokens=self._tokens,
            documents=self._documents,
            spans=self._spans,
            last_span=list(self._last_span or ()),
            targets=self.targets,
            files=self._names(),
        )

    def restore(self, state: WriterState) -> set[str]:
        """Continue after `state` in its files, whose names are returned."""
        self.shards, self.targets = list(state.shards), state.targets
        self._tokens = self._end = state.tokens
        self._documents, self._spans = state.documents, state.spans
        self._last_span = (state.last_span[0], state.last_span[1]) if state.last_span else None
        itemsize = np.dtype(DTYPES[self.dtype]).itemsize
        sizes = {".bin": itemsize * self._tokens, ENDS: 8 * self._documents}
        sizes[".loss"] = 16 * self._spans
        for suffix, size in sizes.items():
            if size:
                path = self._path(suffix)
                file = path.open("r+b")
                file.truncate(size)
                file.seek(size)
                self._files[suffix] = file
        if self._tokens:
            self._digest = hashlib.sha256()
            with self._path(".bin").open("rb") as content:
                while chunk := content.read(1 << 20):
                    self._digest.update(chunk)
        return set(state.files)

    def _names(self) -> list[str]:
        names = [shard.file for shard in self.shards]
        names += [str(Path(name).with_suffix(ENDS)) for name in names]
        names += [shard.loss.file for shard in self.shards if shard.loss]
        return names + [self._path(suffix).name for suffix in self._files]

    def _add_span(self, first: int, stop: int) -> None:
        self.targets += stop - first
        if self._last_span is not None and self._last_span[1] == first:
            first = self._last_span[0]  # spans that touch are one
        else:
            self._flush_span()
        self._last_span = first, stop

    def _flush_span(self) -> None:
        if self._last_span is not None:
            self._file(".loss").write(np.array(self._last_span, dtype="<i8").tobytes())
            self._spans += 1
            self._last_span = None

    def _file(self, suffix: str) -> BinaryIO:
        if suffix not in self._files:
            self._files[suffix] = self._path(suffix).open("wb")
        return self._files[suffix]

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}{suffix}"
