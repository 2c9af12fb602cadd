"""Token shards: .bin files beside one index.json.

    FOLDER/
      index.json            tokenizer, dtype, and each shard's size, SHA-256 and document ends
      train-00000.bin       tokens, little-endian, in the index's dtype
      train-00000.loss      where not all tokens have a loss: pairs (first, stop) of those that do,
                            little-endian int64, increasing and apart from each other
      validation-00000.bin
      tokenizer.json        unless the tokenizer is bytes
      tokenizer_config.json its end-of-text token
      .verified.json        which shards were verified, by `data.verification`

A document's end is the position after its last token, relative to the shard. A document never spans
two shards.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from longspan.errors import UserError, first_problem
from longspan.files import open_regular, read_json_object
from longspan.vocabulary import INDEX, MAX_INDEX_BYTES, MAX_VOCAB

FORMAT: Literal["longspan-tokens-1"] = "longspan-tokens-1"
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}
MAX_TOKENS = 1 << 48
REBUILD = "copy it again or rebuild the folder with `longspan data build`"

Spans = NDArray[np.int64]
"""Pairs (first, stop) of positions, increasing and apart: (spans, 2)."""
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"expected printable text, got {text!r}")
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Loss(_Strict):
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.loss$", max_length=200)]
    spans: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(_Strict):
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.bin$", max_length=200)]
    split: Literal["train", "validation"]
    tokens: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    document_ends: Annotated[list[Count], Field(min_length=1)]
    loss: Loss | None = None
    """Which tokens have a loss; None for all of them."""

    @model_validator(mode="after")
    def _document_ends_increase_to_token_count(self) -> Shard:
        ends = np.asarray(self.document_ends)
        if ends[-1] != self.tokens or (np.diff(ends, prepend=0) <= 0).any():
            raise ValueError(f"the document ends of {self.file} do not increase to its token count")
        return self


class Index(_Strict):
    tokenizer: Annotated[str, Field(max_length=255), AfterValidator(_printable)]
    vocab: Annotated[int, Field(ge=1, le=MAX_VOCAB)]
    dtype: Literal["uint8", "uint16", "uint32"]
    shards: list[Shard]
    format: Literal["longspan-tokens-1"] = FORMAT

    @model_validator(mode="after")
    def _shards_are_different_files(self) -> Index:
        files = [shard.file for shard in self.shards]
        files += [shard.loss.file for shard in self.shards if shard.loss]
        if len(set(files)) < len(files):
            twice = next(file for n, file in enumerate(files) if file in files[:n])
            raise ValueError(f"the file {twice} is listed twice")
        total = sum(shard.tokens for shard in self.shards)
        if total > MAX_TOKENS:
            raise ValueError(f"the shards have {total:,} tokens: expected at most {MAX_TOKENS:,}")
        return self

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything in the index, whatever its JSON looks like."""
        digest = hashlib.sha256()
        for part in (self, *self.shards):
            exclude = {"shards", "document_ends"}
            digest.update(part.model_dump_json(exclude=exclude, exclude_none=True).encode() + b"\n")
        for shard in self.shards:
            digest.update(np.asarray(shard.document_ends, dtype="<i8").tobytes())
        return digest.hexdigest()


def dtype_for(vocab: int) -> Literal["uint8", "uint16", "uint32"]:
    """Return the smallest dtype that can hold every token of a vocabulary."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """Read and validate the index of a folder of shards."""
    path = folder / INDEX
    try:
        return Index.model_validate(read_json_object(path, MAX_INDEX_BYTES, within=folder))
    except ValidationError as error:
        raise UserError(
            f"{path} is not a {FORMAT} index: {first_problem(error)}; rebuild the folder with "
            "`longspan data build`"
        ) from error
    except UserError as error:
        raise UserError(f"{error}; create the folder with `longspan data build`") from error


def read_loss(folder: Path, shard: Shard) -> Spans | None:
    """Read and verify which tokens of a shard have a loss; None for all of them."""
    if shard.loss is None:
        return None
    path, size = folder / shard.loss.file, 16 * shard.loss.spans
    try:
        with open_regular(path, within=folder) as file:
            if (found := os.fstat(file.fileno()).st_size) != size:
                raise UserError(f"{path} has {found:,} bytes, expected {size:,}; {REBUILD}")
            content = file.read(size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != shard.loss.sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is not the index's; {REBUILD}")
    edges = np.frombuffer(content, "<i8").astype(np.int64)
    if len(edges) and (edges[0] < 0 or edges[-1] > shard.tokens or (np.diff(edges) <= 0).any()):
        raise UserError(f"{path} holds no spans of tokens that increase; {REBUILD}")
    return edges.reshape(-1, 2)


class ShardFile:
    """The tokens of a shard; a slice reads them from the file.

    It is read, not mapped into memory: a file that is truncated under a running job is then an
    error that names it, where a memory map would end the process by SIGBUS.
    """

    def __init__(self, folder: Path, index: Index, shard: Shard) -> None:
        """Check the file's size against the index."""
        self.path = folder / shard.file
        self._tokens, self._dtype = shard.tokens, np.dtype(DTYPES[index.dtype])
        expected = shard.tokens * self._dtype.itemsize
        try:
            with open_regular(self.path, within=folder) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UserError(f"cannot read the shard {self.path}: {error.strerror}") from error
        if size != expected:
            kind = "truncated" if size < expected else "too long"
            raise UserError(
                f"{self.path} is {kind}: expected {expected:,} bytes, got {size:,}; {REBUILD}"
            )

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, which: slice) -> NDArray[Any]:
        start, stop, step = which.indices(self._tokens)
        assert step == 1, which
        offset, size = start * self._dtype.itemsize, max(0, stop - start) * self._dtype.itemsize
        try:
            # Opened for each read: a folder may have more shards than a process open files.
            with open_regular(self.path) as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise UserError(f"cannot read the shard {self.path}: {error.strerror}") from error
        if len(content) < size:
            raise UserError(f"{self.path} was truncated while the run read it; {REBUILD}")
        return np.frombuffer(content, self._dtype)
