"""Writes the shards of a split, as `data.shards` describes them, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from longspan.data.documents import Span, Split
from longspan.data.shards import DTYPES, Loss, Shard
from longspan.files import sha256_of


@dataclass
class ShardWriter:
    """Appends documents to shards, each up to the document that reaches `limit` tokens."""

    folder: Path
    split: Split
    dtype: str
    limit: int
    shards: list[Shard] = field(default_factory=list)
    """Those that are complete."""
    targets: int = 0
    """Tokens with a loss so far."""
    _file: BinaryIO | None = None
    _tokens: int = 0
    _ends: list[int] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    """Tokens of this shard that have a loss; spans that touch are one."""

    def write(self, tokens: NDArray[Any], loss: Iterable[Span]) -> None:
        """Append tokens of a document, of which the spans `loss` have a loss."""
        if not len(tokens):
            return
        if self._file is None:
            self._file = self._path(".bin").open("wb")
            self._digest = hashlib.sha256()
        for first, stop in loss:
            start = self._tokens + first
            self.targets += stop - first
            if self._spans and self._spans[-1][1] == start:
                start = self._spans.pop()[0]
            self._spans.append((start, self._tokens + stop))
        content = tokens.astype(DTYPES[self.dtype]).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._tokens += len(tokens)

    def end_document(self) -> None:
        """End the document, and the shard if it has reached its limit."""
        if self._tokens > (self._ends[-1] if self._ends else 0):
            self._ends.append(self._tokens)
        if self._tokens >= self.limit:
            self.finish()

    def finish(self) -> None:
        """Close the shard."""
        if self._file is None:
            return
        self._file.close()
        shard = Shard(
            file=self._path(".bin").name,
            split=self.split,
            tokens=self._tokens,
            sha256=self._digest.hexdigest(),
            document_ends=self._ends,
            loss=self._write_loss(),
        )
        self.shards.append(shard)
        self._file, self._tokens, self._ends, self._spans = None, 0, [], []

    def _write_loss(self) -> Loss | None:
        if self._spans == [(0, self._tokens)]:
            return None
        path = self._path(".loss")
        path.write_bytes(np.asarray(self._spans, dtype="<i8").tobytes())
        return Loss(file=path.name, spans=len(self._spans), sha256=sha256_of(path))

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}{suffix}"
