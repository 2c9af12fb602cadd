"""The vocabulary size that a folder of token shards needs. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeGuard

INDEX = "index.json"
"""The index of a folder of token shards; `data.shards` describes it."""
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
    path = Path(source) / INDEX
    if not os.path.isfile(path):
        return None
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    vocab = index.get("vocab") if isinstance(index, dict) else None
    return vocab if type(vocab) is int and vocab > 0 else None


def rounded_vocab(vocab: int) -> int:
    """Return the vocabulary size of a model for a tokenizer of `vocab` tokens."""
    return -(-vocab // MULTIPLE) * MULTIPLE
