"""Token shards: memory-mapped .bin files beside one index.json.

    FOLDER/
      index.json            tokenizer, dtype, and each shard's size, SHA-256 and document ends
      train-00000.bin       tokens, little-endian, in the index's dtype
      validation-00000.bin
      tokenizer.json        unless the tokenizer is bytes

A document's end is the position after its last token, relative to the shard. A document never spans
two shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longspan.errors import UserError, first_problem
from longspan.files import sha256_of
from longspan.vocabulary import INDEX

FORMAT: Literal["longspan-tokens-1"] = "longspan-tokens-1"
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}

Count = Annotated[int, Field(ge=1, le=1 << 48)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shard(_Strict):
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.bin$")]
    split: Literal["train", "validation"]
    tokens: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    document_ends: Annotated[list[Count], Field(min_length=1)]

    @model_validator(mode="after")
    def _document_ends_increase_to_token_count(self) -> Shard:
        ends = np.asarray(self.document_ends)
        if ends[-1] != self.tokens or (np.diff(ends, prepend=0) <= 0).any():
            raise ValueError(f"the document ends of {self.file} do not increase to its token count")
        return self


class Index(_Strict):
    tokenizer: str
    vocab: Count
    dtype: Literal["uint8", "uint16", "uint32"]
    shards: list[Shard]
    format: Literal["longspan-tokens-1"] = FORMAT


def dtype_for(vocab: int) -> Literal["uint8", "uint16", "uint32"]:
    """Return the smallest dtype that can hold every token of a vocabulary."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """Read and validate the index of a folder of shards."""
    path = folder / INDEX
    try:
        return Index.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; create the folder with `longspan data build`"
        ) from error
    except ValidationError as error:
        raise UserError(
            f"{path} is not a {FORMAT} index: {first_problem(error)}; rebuild the folder with "
            "`longspan data build`"
        ) from error


def map_shard(folder: Path, index: Index, shard: Shard) -> NDArray[Any]:
    """Memory-map a shard's tokens, after checking its size against the index."""
    path = folder / shard.file
    dtype = np.dtype(DTYPES[index.dtype])
    expected = shard.tokens * dtype.itemsize
    if path.exists() and not path.is_file():
        raise UserError(f"cannot read the shard {path}: it is not a file")
    try:
        size = path.stat().st_size
        if size != expected:
            kind = "truncated" if size < expected else "too long"
            raise UserError(
                f"{path} is {kind}: expected {expected:,} bytes, got {size:,}; "
                "copy it again or rebuild the folder with `longspan data build`"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UserError(f"cannot read the shard {path}: {error.strerror}") from error


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Summarize a folder of shards, after checking the size and SHA-256 of every file."""
    index = read_index(folder)
    for shard in index.shards:
        map_shard(folder, index, shard)
        if sha256_of(folder / shard.file) != shard.sha256:
            raise UserError(
                f"{folder / shard.file} is damaged: its SHA-256 is not the index's; copy it again "
                "or rebuild the folder with `longspan data build`"
            )
    splits = {}
    for split in SPLITS:
        shards = [shard for shard in index.shards if shard.split == split]
        lengths = [np.diff(shard.document_ends, prepend=0) for shard in shards]
        splits[split] = {
            "shards": len(shards),
            "tokens": sum(shard.tokens for shard in shards),
            "documents": sum(len(shard.document_ends) for shard in shards),
            "longest": max((int(length.max()) for length in lengths), default=0),
        }
    return {"tokenizer": index.tokenizer, "vocab": index.vocab, "splits": splits}
