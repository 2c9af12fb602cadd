"""Sources of samples. A sample is a pure function of (seed, index): one integer resumes a run.

A run consumes samples 0, 1, 2… of one infinite sequence, whatever its batch size and number of
processes: epoch after epoch of the split's windows, each shuffled by its own keyed permutation.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from longspan.constants import IGNORE_INDEX
from longspan.data.permutation import permute
from longspan.data.samples import Baseline, Ints, Sample, bigram_nats
from longspan.data.token_split import TokenSplit
from longspan.data.tokenizer import Tokenizer
from longspan.data.verification import Verification
from longspan.errors import UserError
from longspan.hashing import hash64
from longspan.wording import counted

BASELINE_TOKENS = 1 << 20
"""Training tokens that the bigram baseline is fitted on; reading and sorting them takes 0.2 s."""
BASELINE_STRETCH = 4096
"""They are read in stretches of so many tokens, spread evenly over the training split."""


class Source(ABC):
    """A source of training and validation samples."""

    tokenizer: Tokenizer | None
    context: int
    fingerprint: str
    """SHA-256 that identifies the data."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the data in one line."""

    def verification(self) -> Verification | None:
        """Begin to verify the files of this source; None if it has none."""
        return None

    def samples_by_source(self, count: int) -> dict[str, int]:
        """How many of the first `count` training samples are from each source of a mixture."""
        return {}

    def first_starts(self, count: int = 16) -> list[tuple[int, ...]]:
        """Where documents begin in the first `count` training samples; empty if they are joined."""
        found = []
        for index in range(count):
            documents = self.sample(0, index).documents
            if documents is None:
                return []
            found.append((0, *(np.flatnonzero(np.diff(documents)) + 1).tolist()))
        return found

    @abstractmethod
    def sample(self, seed: int, index: int) -> Sample:
        """Return training sample `index` of the infinite sequence that `seed` selects."""

    @abstractmethod
    def num_targets(self, seed: int, index: int) -> int:
        """Return how many positions of training sample `index` have a target, without reading it.

        So every rank knows the number of targets in the global batch without communication.
        """

    @abstractmethod
    def validation_samples(self, count: int) -> list[Sample]:
        """Return the first `count` validation samples, or all if fewer; the same in every run."""

    @abstractmethod
    def baseline(self, samples: list[Sample]) -> Baseline:
        """Return the loss on these samples that needs no long context."""


class TokenSource(Source):
    """Packs documents: concatenates them and splits the stream into windows of `context` tokens."""

    def __init__(
        self,
        splits: dict[str, TokenSplit],
        context: int,
        tokenizer: Tokenizer,
        vocab: int,
        fingerprint: str,
        verification: Callable[[], Verification] | None = None,
    ) -> None:
        """`verification`: begins to verify the files that the splits read."""
        self._verification = verification
        self.splits = splits
        self.context = context
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.fingerprint = fingerprint
        if splits["train"].total < self.least_tokens:
            raise UserError(
                f"the train split has {counted(splits['train'].total, 'token')}, fewer than one "
                f"sample of {self.least_tokens:,}: reduce data.context or add text"
            )
        if not splits["train"].targets:
            raise UserError("no token of the train split has a loss: there is nothing to learn")

    @property
    def least_tokens(self) -> int:
        """Tokens of one sample, with its last target."""
        return self.context + 1

    def num_windows(self, split: str) -> int:
        """Return the number of samples per epoch. A partial window at the end is dropped."""
        return max(0, self.splits[split].total - 1) // self.context

    def describe(self) -> str:
        sizes = [f"{split} {self.splits[split].total:,}" for split in self.splits]
        train = self.splits["train"]
        loss = f", {train.targets / train.total:.1%} of them with a loss" if train.is_masked else ""
        windows = counted(self.num_windows("train"), "sample")
        return f"tokens: {', '.join(sizes)}{loss}; {windows} per epoch"

    def verification(self) -> Verification | None:
        return self._verification() if self._verification else None

    def sample(self, seed: int, index: int) -> Sample:
        return self._window("train", self._train_window(seed, index))

    def num_targets(self, seed: int, index: int) -> int:
        start = np.array(self._train_window(seed, index) * self.context) + 1
        return int(self.splits["train"].num_targets(start, start + self.context))

    def validation_samples(self, count: int) -> list[Sample]:
        windows = self.num_windows("validation")
        return [
            self._window("validation", permute(index, windows, 0, 0))
            for index in range(min(count, windows))
        ]

    def baseline(self, samples: list[Sample]) -> Baseline:
        fitted = self.stretches(BASELINE_TOKENS)
        tokens = sum(len(sample.tokens) for sample in fitted)
        name = f"bigram (fitted on {tokens:,} training tokens)"
        return Baseline(name, bigram_nats(fitted, samples, self.vocab))

    def stretches(self, tokens: int) -> list[Sample]:
        """About so many tokens of the training split, spread evenly over it, as samples."""
        length = min(BASELINE_STRETCH, self.splits["train"].total - 1)
        stretches = (self.splits["train"].total - 1) // length
        count = min(stretches, max(1, tokens // length))
        return [self._read("train", i * stretches // count * length, length) for i in range(count)]

    def _train_window(self, seed: int, index: int) -> int:
        epoch, position = divmod(index, self.num_windows("train"))
        return permute(position, self.num_windows("train"), seed, epoch)

    def _window(self, split: str, window: int) -> Sample:
        return self._read(split, window * self.context, self.context)

    def _read(self, split: str, start: int, length: int) -> Sample:
        tokens = self._tokens(split, start, start + length + 1)
        is_target = self.splits[split].is_target(start + 1, start + length + 1)
        return Sample(tokens[:-1], np.where(is_target, tokens[1:], IGNORE_INDEX))

    def _tokens(self, split: str, start: int, stop: int) -> Ints:
        tokens = self.splits[split].read(start, stop)
        if tokens.max() >= self.vocab:
            raise UserError(
                f"the data contains token {tokens.max()}, but its vocabulary size is {self.vocab}: "
                "check the folder with `longspan data info`"
            )
        return tokens


class RecallSource(Source):
    """Synthetic recall: key-value pairs, filler, then each key again, whose value is the target.

        k₁ v₁ k₂ v₂ … kₚ vₚ   filler …   kᵢ vᵢ kⱼ vⱼ …

    Keys are tokens below vocab/2; values and filler are the rest. Only the values after the filler
    have a loss, so a model that cannot attend to the pairs stays at ln(number of values).
    """

    tokenizer = None

    def __init__(self, context: int, pairs: int, vocab: int) -> None:
        self.context, self.pairs, self.vocab = context, pairs, vocab
        self.fingerprint = hashlib.sha256(f"recall {context} {pairs} {vocab}".encode()).hexdigest()

    def describe(self) -> str:
        return f"synthetic recall of {counted(self.pairs, 'pair')} over {self.context:,} tokens"

    def sample(self, seed: int, index: int) -> Sample:
        return self._generate(hash64(seed, 0, index))

    def num_targets(self, seed: int, index: int) -> int:
        return self.pairs

    def validation_samples(self, count: int) -> list[Sample]:
        return [self._generate(hash64(0, 1, index)) for index in range(count)]

    def baseline(self, samples: list[Sample]) -> Baseline:
        return Baseline("chance", math.log(self.vocab - self.vocab // 2))

    def _generate(self, seed: int) -> Sample:
        rng = np.random.Generator(np.random.PCG64(seed))
        first_value = self.vocab // 2
        keys = rng.permutation(first_value)[: self.pairs]
        values = rng.integers(first_value, self.vocab, self.pairs)
        filler = rng.integers(first_value, self.vocab, self.context + 1 - 4 * self.pairs)
        order = rng.permutation(self.pairs)
        pairs = np.stack([keys, values], axis=1).ravel()
        queries = np.stack([keys[order], values[order]], axis=1).ravel()
        tokens = np.concatenate([pairs, filler, queries]).astype(np.int64)
        targets = np.full(self.context, IGNORE_INDEX, dtype=np.int64)
        queried = np.arange(len(tokens) - 2 * self.pairs, len(tokens), 2)  # positions of the keys
        targets[queried] = tokens[queried + 1]
        return Sample(tokens[:-1], targets)
