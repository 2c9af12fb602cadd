"""The vocabulary size that a folder of token shards needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from longspan.errors import UserError
from longspan.files import MAX_JSON_VALUES, read_json_object

INDEX = "index.json"
"""The index of a folder of token shards; `data.shards` describes it."""
MAX_DOCUMENTS = MAX_JSON_VALUES - 1_000_000
"""Documents of a folder: their ends are in the index."""
MAX_INDEX_BYTES = 16 * MAX_JSON_VALUES
MAX_VOCAB = 1 << 24
"""Largest vocabulary; a larger one is an id that was never meant to be one, such as 2³² - 1."""
MULTIPLE = 64
"""Vocabularies are rounded up to a multiple of this, so that matrix products use full tiles and
tensor parallelism can split them."""


def is_folder(source: object) -> TypeGuard[str]:
    """Return whether `data.source` names a folder, not one of the sources without files."""
    return isinstance(source, str) and source not in ("builtin", "recall")


def vocab_of_data(source: str) -> int | None:
    """Return the tokenizer's vocabulary size in the folder `source`; None if none can be read.

    What is wrong with a folder is reported where its data is opened.
    """
    try:
        index = read_json_object(Path(source) / INDEX, MAX_INDEX_BYTES, within=Path(source))
    except UserError:
        return None
    vocab = index.get("vocab")
    return vocab if type(vocab) is int and 0 < vocab <= MAX_VOCAB else None


def vocab_of_sources(sources: Iterable[object]) -> int | None:
    """Return the largest vocabulary of those `sources` that are folders; None if none is known."""
    found = [vocab_of_data(source) for source in sources if is_folder(source)]
    return max((vocab for vocab in found if vocab is not None), default=None)


def rounded_vocab(vocab: int) -> int:
    """Return the vocabulary size of a model for a tokenizer of `vocab` tokens."""
    return -(-vocab // MULTIPLE) * MULTIPLE
