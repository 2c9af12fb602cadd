"""The lengths of documents: a histogram, and what a context would cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from longspan.data.packing import pack
from longspan.data.samples import Ints

CONTEXTS = (4096, 32768, 131072)
"""What is said of a folder without asking."""
WIDTH = 40
"""Characters of the longest bar."""


def histogram(document_ends: Ints) -> list[dict[str, int]]:
    """Documents and tokens by length, from each power of two up to the next."""
    lengths = np.diff(document_ends, prepend=0)
    if not len(lengths):
        return []
    powers = np.frexp(lengths)[1] - 1  # exact: of n in [2ᵏ, 2ᵏ⁺¹) it is k
    found = []
    for power in range(int(powers.min()), int(powers.max()) + 1):
        of_power = lengths[powers == power]
        found.append(
            {
                "from": 1 << power,
                "to": (2 << power) - 1,
                "documents": len(of_power),
                "tokens": int(of_power.sum()),
            }
        )
    return found


def cut_by(document_ends: Ints, context: int) -> dict[str, Any]:
    """What windows of `context` tokens do to documents, if these are isolated."""
    lengths, packing = np.diff(document_ends, prepend=0), pack(document_ends, context)
    is_cut = lengths > context
    windows = len(packing)
    return {
        "context": context,
        "cut_documents": int(is_cut.sum()),
        "cut_tokens": int(lengths[is_cut].sum()),
        "windows": windows,
        "padding": 1 - packing.tokens / (windows * context) if windows else 0.0,
    }


def picture(split: dict[str, Any]) -> list[str]:
    """The lines that `longspan data info` draws of a split."""
    bins, tokens, documents = split["histogram"], split["tokens"], split["documents"]
    if not documents:
        return []
    most, lines = max(each["documents"] for each in bins), []
    for each in bins:
        bar = "█" * -(-each["documents"] * WIDTH // most)
        span = f"{each['from']:,}-{each['to']:,}" if each["to"] > 1 else "1"
        share = each["tokens"] / tokens
        shares = f"{each['documents']:>10,} documents {share:>7.1%} of tokens"
        lines.append(f"{span:>21} tokens {shares}  {bar}".rstrip())
    for each in split["contexts"]:
        count = each["cut_documents"]
        lines.append(
            f"    a context of {each['context']:,} cuts {count:,} documents "
            f"({count / documents:.1%}, with {each['cut_tokens'] / tokens:.1%} of the tokens) and "
            f"packs {each['windows']:,} windows with {each['padding']:.1%} padding"
        )
    return lines


def contexts_for(longest: int, given: Sequence[int]) -> list[int]:
    """The contexts to speak of: those given, or usual ones up to the first that cuts nothing."""
    if given:
        return list(given)
    return [context for n, context in enumerate(CONTEXTS) if n == 0 or CONTEXTS[n - 1] < longest]
