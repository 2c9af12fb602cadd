"""Sources of samples. A sample is a pure function of (seed, index): resume is one integer.

Whatever the batch size or the number of processes, step by step the run consumes sample 0, 1, 2…
of one endless order: epoch after epoch of the split's windows, each epoch shuffled by its own
keyed permutation.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.config import Data, Model
from longspan.data.permutation import mix, permute
from longspan.data.shards import SPLITS, map_shard, read_index
from longspan.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_beside
from longspan.errors import UserError

IGNORED = -100
"""The target of a position that carries no loss."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sequence: tokens, the next token at each position or IGNORED, and the document of each.

    Each is int64 of shape (context,). Documents are numbered from 0 within the sample.
    """

    tokens: Ints
    targets: Ints
    documents: Ints


@dataclass(frozen=True)
class Batch:
    """Samples stacked: int64 tensors of shape (batch, context)."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Baseline:
    """What a model that uses no long context reaches on the same targets, in nats per token."""

    name: str
    nats: float


class Source(ABC):
    """Where samples come from."""

    tokenizer: Tokenizer | None
    fingerprint: str
    """SHA-256 that tells this data from any other."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abstractmethod
    def sample(self, seed: int, index: int) -> Sample:
        """Training sample `index` of the endless order that `seed` selects."""

    @abstractmethod
    def targets_in(self, seed: int, index: int) -> int:
        """How many positions of training sample `index` carry loss, without reading it.

        So every process knows how many the whole step has, whichever samples it reads itself.
        """

    @abstractmethod
    def validation_samples(self, count: int) -> list[Sample]:
        """The first `count` validation samples, or all where there are fewer; the same always."""

    @abstractmethod
    def baseline(self, samples: list[Sample]) -> Baseline:
        """What these samples cost without long context."""


@dataclass(frozen=True)
class Tokens:
    """One split: arrays that read as if concatenated, and the global end of each document."""

    arrays: list[NDArray[Any]]
    document_ends: Ints

    @property
    def total(self) -> int:
        return sum(len(array) for array in self.arrays)

    def read(self, start: int, stop: int) -> Ints:
        parts, offset = [], 0
        for array in self.arrays:
            low, high = max(start - offset, 0), min(stop - offset, len(array))
            if low < high:
                parts.append(array[low:high].astype(np.int64))
            offset += len(array)
        return np.concatenate(parts)


class TokenSource(Source):
    """Documents in a row, cut into windows of `context` tokens."""

    def __init__(
        self,
        splits: dict[str, Tokens],
        context: int,
        tokenizer: Tokenizer,
        vocab: int,
        fingerprint: str,
    ) -> None:
        self.splits = splits
        self.context = context
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.fingerprint = fingerprint
        if self.windows("train") == 0:
            raise UserError(
                f"the train split holds {splits['train'].total:,} tokens, fewer than one sample "
                f"of data.context + 1 = {context + 1:,}: lower data.context or add text"
            )

    def windows(self, split: str) -> int:
        """Samples in one pass; the last token is only ever a target, a ragged end is left out."""
        return max(0, self.splits[split].total - 1) // self.context

    def describe(self) -> str:
        parts = [f"{split} {self.splits[split].total:,}" for split in self.splits]
        return f"tokens: {', '.join(parts)}; {self.windows('train'):,} samples an epoch"

    def sample(self, seed: int, index: int) -> Sample:
        return self._window("train", self._train_window(seed, index))

    def targets_in(self, seed: int, index: int) -> int:
        # All positions but those that end a document, of which there is one per end in the window.
        start = self._train_window(seed, index) * self.context
        ends = self.splits["train"].document_ends
        first, last = np.searchsorted(ends, [start, start + self.context], side="right")
        return self.context - int(last - first)

    def validation_samples(self, count: int) -> list[Sample]:
        windows = self.windows("validation")
        return [
            self._window("validation", permute(index, windows, 0, 0))
            for index in range(min(count, windows))
        ]

    def baseline(self, samples: list[Sample]) -> Baseline:
        return Baseline("bigram", bigram_nats(samples))

    def _train_window(self, seed: int, index: int) -> int:
        epoch, position = divmod(index, self.windows("train"))
        return permute(position, self.windows("train"), seed, epoch)

    def _window(self, split: str, window: int) -> Sample:
        data, start = self.splits[split], window * self.context
        tokens = data.read(start, start + self.context + 1)
        if tokens.max() >= self.vocab:
            raise UserError(
                f"the data holds token {tokens.max()} and its vocabulary ends at {self.vocab}: "
                "check the folder with `longspan data info`"
            )
        positions = np.arange(start, start + self.context + 1)
        documents = np.searchsorted(data.document_ends, positions, side="right")
        documents -= documents[0]
        targets = np.where(documents[1:] == documents[:-1], tokens[1:], IGNORED)
        return Sample(tokens[:-1], targets, documents[:-1])


class RecallSource(Source):
    """Key-value pairs, filler, then each key again: its value is to be recalled.

        k₁ v₁ k₂ v₂ … kₚ vₚ   filler …   kᵢ vᵢ kⱼ vⱼ …

    Keys are tokens below vocab/2, values and filler those from vocab/2 on. Only the values after
    the filler carry loss, so a model that does not reach back to the pairs stays at ln(values).
    """

    tokenizer = None

    def __init__(self, context: int, pairs: int, vocab: int) -> None:
        self.context, self.pairs, self.vocab = context, pairs, vocab
        self.fingerprint = hashlib.sha256(f"recall {context} {pairs} {vocab}".encode()).hexdigest()

    def describe(self) -> str:
        return f"synthetic recall of {self.pairs} pairs over {self.context:,} tokens"

    def sample(self, seed: int, index: int) -> Sample:
        return self._make(mix(seed, 0, index))

    def targets_in(self, seed: int, index: int) -> int:
        return self.pairs

    def validation_samples(self, count: int) -> list[Sample]:
        return [self._make(mix(0, 1, index)) for index in range(count)]

    def baseline(self, samples: list[Sample]) -> Baseline:
        return Baseline("chance", math.log(self.vocab - self.vocab // 2))

    def _make(self, seed: int) -> Sample:
        draw = np.random.Generator(np.random.PCG64(seed))
        first_value = self.vocab // 2
        keys = draw.permutation(first_value)[: self.pairs]
        values = draw.integers(first_value, self.vocab, self.pairs)
        filler = draw.integers(first_value, self.vocab, self.context + 1 - 4 * self.pairs)
        order = draw.permutation(self.pairs)
        told = np.stack([keys, values], axis=1).ravel()
        asked = np.stack([keys[order], values[order]], axis=1).ravel()
        row = np.concatenate([told, filler, asked]).astype(np.int64)
        targets = np.full(self.context, IGNORED, dtype=np.int64)
        answers = np.arange(len(row) - 2 * self.pairs, len(row), 2)  # positions of the asked keys
        targets[answers] = row[answers + 1]
        return Sample(row[:-1], targets, np.zeros(self.context, dtype=np.int64))


def open_source(data: Data, model: Model) -> Source:
    """The source that a run file's [data] names, checked against the model's vocabulary."""
    if data.source == "recall":
        return RecallSource(data.context, data.recall_pairs, model.vocab)
    if data.source == "builtin":
        source = _builtin(data.context)
    else:
        source = _from_shards(Path(data.source), data.context)
    if source.vocab > model.vocab:
        raise UserError(
            f"the data's tokenizer has {source.vocab:,} tokens and model.vocab = {model.vocab:,}: "
            f"set model.vocab={source.vocab} or more"
        )
    return source


def batch_of(samples: list[Sample], device: torch.device) -> Batch:
    """Samples stacked into tensors of shape (batch, context) on `device`."""
    tokens, targets = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples])).to(device)
        for name in ("tokens", "targets")
    )
    return Batch(tokens, targets)


def count_targets(samples: list[Sample]) -> int:
    """Positions that carry loss."""
    return sum(int((sample.targets != IGNORED).sum()) for sample in samples)


def bigram_nats(samples: list[Sample]) -> float:
    """Cross-entropy, in nats, of the best bigram model of these very samples' targets.

    It is fitted on what it is scored on, so no model of one token's context does better.
    """
    if count_targets(samples) == 0:
        return 0.0
    pairs = np.concatenate(
        [np.stack([s.tokens, s.targets], axis=1)[s.targets != IGNORED] for s in samples]
    )
    _, group, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    _, context, total = np.unique(pairs[:, 0], return_inverse=True, return_counts=True)
    return float(np.mean(np.log(total[context.ravel()]) - np.log(count[group.ravel()])))


def _from_shards(folder: Path, context: int) -> TokenSource:
    index = read_index(folder)
    splits: dict[str, Tokens] = {}
    for split in SPLITS:
        shards = [shard for shard in index.shards if shard.split == split]
        starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        ends = [
            np.asarray(shard.document_ends, dtype=np.int64) + start
            for shard, start in zip(shards, starts, strict=False)
        ]
        splits[split] = Tokens(
            [map_shard(folder, index, shard) for shard in shards],
            np.concatenate([np.zeros(0, dtype=np.int64), *ends]),
        )
    tokenizer = tokenizer_beside(folder)
    fingerprint = hashlib.sha256("".join(s.sha256 for s in index.shards).encode()).hexdigest()
    return TokenSource(splits, context, tokenizer, index.vocab, fingerprint)


def _builtin(context: int) -> TokenSource:
    """The standard library's own .py files: about one in twenty, by name, is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    digest = hashlib.sha256()
    documents: dict[str, list[bytes]] = {"train": [], "validation": []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        content = b"" if skipped & set(name.parts) else path.read_bytes()
        if not content:
            continue
        in_validation = hashlib.sha256(name.as_posix().encode()).digest()[0] < 13
        documents["validation" if in_validation else "train"].append(content + b"\0")
        digest.update(content)
    splits = {
        split: Tokens(
            [np.frombuffer(b"".join(texts), dtype=np.uint8)],
            np.cumsum([len(text) for text in texts], dtype=np.int64),
        )
        for split, texts in documents.items()
    }
    bytes_only = ByteTokenizer()
    return TokenSource(splits, context, bytes_only, bytes_only.vocab, digest.hexdigest())
