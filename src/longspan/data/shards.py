"""Token shards: memory-mapped .bin files beside one index.json.

    FOLDER/
      index.json            what follows, and per shard its bytes, SHA-256 and document ends
      train-00000.bin       tokens, little-endian, of the index's dtype
      validation-00000.bin
      tokenizer.json        where the tokenizer is not bytes

A document's end is the position after its last token, counted within the shard. Documents never
cross shards.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.errors import UserError
from longspan.files import sha256_of

INDEX = "index.json"
FORMAT = "longspan-tokens-1"
SPLITS = ("train", "validation")
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True)
class Shard:
    file: str
    split: str
    tokens: int
    sha256: str
    document_ends: list[int]


@dataclass(frozen=True)
class Index:
    tokenizer: str
    vocab: int
    dtype: str
    shards: list[Shard]
    format: str = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def dtype_for(vocab: int) -> str:
    """The smallest token type that holds a vocabulary."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """The index of a folder of shards, checked field by field."""
    path = folder / INDEX
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: expected token shards made by `longspan data build`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; make the folder with `longspan data build`"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}; build the folder again") from error
    try:
        return _index_from(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a {FORMAT} index: {error}; build the folder again"
        ) from error


def _index_from(raw: Any) -> Index:
    if raw["format"] != FORMAT:
        raise ValueError(f"its format is {raw['format']!r}")
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {raw['dtype']!r}")
    shards = [Shard(**shard) for shard in raw["shards"]]
    for shard in shards:
        if "/" in shard.file or "\\" in shard.file or shard.file.startswith("."):
            raise ValueError(f"shard names must be plain file names, got {shard.file!r}")
        ends = np.asarray(shard.document_ends, dtype=np.int64)
        if len(ends) == 0 or ends[-1] != shard.tokens or (np.diff(ends, prepend=0) <= 0).any():
            raise ValueError(f"the document ends of {shard.file} do not rise to its token count")
    return Index(raw["tokenizer"], int(raw["vocab"]), raw["dtype"], shards)


def map_shard(folder: Path, index: Index, shard: Shard) -> NDArray[Any]:
    """A shard's tokens, memory-mapped; its size must be what the index says."""
    path = folder / shard.file
    dtype = np.dtype(DTYPES[index.dtype])
    expected = shard.tokens * dtype.itemsize
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
    """What a folder of shards holds; every file's size and SHA-256 is checked."""
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
