"""The loss of each token of a sample, and what is summed of it: by position and by document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.constants import IGNORE_INDEX, LOSS_CHUNK
from longspan.data import Sample, collate
from longspan.data.tokenizer import Tokenizer
from longspan.models import Decoder
from longspan.nn import logits_of

T = TypeVar("T")
FIRST_BUCKET = 256
"""Positions 0 to 255 are the first bucket; each further one is as long as all before it."""
BEFORE = 8
"""Tokens before a text that it is decoded with."""


@dataclass(frozen=True)
class DocumentLoss:
    """The loss on a document, or on the part of it that a sample has."""

    sample: int
    start: int
    """Of its first token in the sample."""
    tokens: int
    """With a loss."""
    nats: float
    """Their sum."""


@dataclass(frozen=True)
class SampleLoss:
    """The loss on a sample. Sums are in nats."""

    by_position: dict[int, tuple[int, float]]
    """Tokens with a loss and their sum, by the first position of the bucket."""
    documents: list[DocumentLoss]
    text_bytes: int | None
    """Of the tokens with a loss, as UTF-8; None if they are not text."""


@torch.no_grad()
def token_losses(model: Decoder, sample: Sample, device: torch.device) -> NDArray[np.float32]:
    """Nats of the target at each position, float32 (context,); 0 where there is none."""
    batch = collate([sample]).to(device)
    hidden = model.hidden(batch.tokens, documents=batch.documents)[0]
    rows = max(1, LOSS_CHUNK // model.config.vocab)
    parts = [
        cross_entropy(
            logits_of(hidden[start : start + rows], model.head_weight).float(),
            batch.targets[0, start : start + rows],
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        for start in range(0, len(hidden), rows)
    ]
    found: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
    return found


def sample_loss(
    model: Decoder,
    sample: Sample,
    index: int,
    tokenizer: Tokenizer | None,
    device: torch.device,
) -> SampleLoss:
    """The loss on sample number `index`, by position and by document."""
    losses = token_losses(model, sample, device).astype(np.float64)
    has_target = sample.targets != IGNORE_INDEX
    starts = document_starts(sample)
    positions = np.concatenate(
        [np.arange(stop - start) for start, stop in pairwise([*starts, len(losses)])]
    )
    by_position = {}
    for first, stop in pairwise(bucket_edges(len(losses))):
        chosen = has_target & (positions >= first) & (positions < stop)
        if count := int(chosen.sum()):
            by_position[first] = (count, float(losses[chosen].sum()))
    documents = []
    for start, stop in pairwise([*starts, len(losses)]):
        chosen = has_target[start:stop]
        if count := int(chosen.sum()):
            nats = float(losses[start:stop][chosen].sum())
            documents.append(DocumentLoss(index, start, count, nats))
    size = None if tokenizer is None else text_bytes(sample, tokenizer)
    return SampleLoss(by_position, documents, size)


def document_starts(sample: Sample) -> list[int]:
    """The position of the first token of each document of a sample."""
    if sample.documents is None:
        return [0]
    return [0, *(np.flatnonzero(np.diff(sample.documents)) + 1).tolist()]


def bucket_edges(context: int) -> list[int]:
    """0, 256, 512, 1024, … up to the first that is not below `context`."""
    edges = [0, FIRST_BUCKET]
    while edges[-1] < context:
        edges.append(2 * edges[-1])
    return edges


def text_bytes(sample: Sample, tokenizer: Tokenizer) -> int:
    """Bytes of the text of a sample's targets, without end-of-document tokens.

    Targets are decoded after a few tokens of their document: some tokenizers drop a space at the
    beginning of a text, and a character may have begun before them.
    """
    is_text = sample.targets != IGNORE_INDEX
    begins = np.zeros(len(is_text), dtype=np.bool_)
    begins[document_starts(sample)] = True
    if tokenizer.eos is not None:
        is_text &= sample.targets != tokenizer.eos
        begins |= sample.tokens == tokenizer.eos  # what follows it is another document
    edges = np.flatnonzero(np.diff(is_text, prepend=False, append=False)).reshape(-1, 2)
    total = 0
    for first, stop in edges.tolist():
        since = np.flatnonzero(begins[max(0, first + 1 - BEFORE) : first + 1])
        start = max(0, first + 1 - BEFORE) + (int(since[-1]) if len(since) else 0)
        before = [t for t in sample.tokens[start : first + 1].tolist() if t != tokenizer.eos]
        texts = (before, [*before, *sample.targets[first:stop].tolist()])
        without, whole = (len(tokenizer.decode(x).encode(errors="replace")) for x in texts)
        total += whole - without
    return total


@dataclass(frozen=True)
class Losses:
    """The loss on all samples."""

    samples: Sequence[SampleLoss]

    @property
    def tokens(self) -> int:
        return sum(count for x in self.samples for count, _ in x.by_position.values())

    @property
    def nats(self) -> float:
        """The sum over all tokens, in the order of samples: the same on any number of ranks."""
        return math.fsum(nats for x in self.samples for _, nats in x.by_position.values())

    @property
    def mean(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        sizes = [x.text_bytes for x in self.samples]
        known = [size for size in sizes if size is not None]
        total = sum(known)
        return self.nats / math.log(2) / total if total and len(known) == len(sizes) else None

    def by_position(self) -> list[dict[str, float]]:
        """Tokens, sum and mean of each bucket of positions."""
        found = []
        for first in sorted({first for x in self.samples for first in x.by_position}):
            pairs = [x.by_position[first] for x in self.samples if first in x.by_position]
            tokens, nats = sum(count for count, _ in pairs), math.fsum(n for _, n in pairs)
            last = max(2 * first, FIRST_BUCKET) - 1
            found.append(
                {
                    "first": first,
                    "last": last,
                    "tokens": tokens,
                    "nats": nats,
                    "loss": nats / tokens,
                }
            )
        return found

    def documents(self) -> list[DocumentLoss]:
        return [document for x in self.samples for document in x.documents]


def in_order(parts: Iterable[Sequence[T]]) -> list[T]:
    """The results of all ranks, of which rank r has r, r + N, r + 2N …, in their order."""
    columns = list(parts)
    return [
        columns[index % len(columns)][index // len(columns)]
        for index in range(sum(map(len, columns)))
    ]


def last_logits(model: Decoder, tokens: Tensor, count: int) -> Tensor:
    """Logits (count, vocab) after the last `count` of tokens (tokens,)."""
    with torch.no_grad():
        return logits_of(model.hidden(tokens[None])[0, -count:], model.head_weight).float()
