"""Sources of samples. A sample is a pure function of (seed, index): one integer resumes a run.

A run consumes samples 0, 1, 2… of one infinite sequence, whatever its batch size and number of
processes: epoch after epoch of the split's windows, each shuffled by its own keyed permutation.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import sysconfig
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longspan.config import Data, Model
from longspan.constants import IGNORE_INDEX
from longspan.data.permutation import permute
from longspan.data.shards import SPLITS, ShardFile, read_index
from longspan.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from longspan.data.verification import Verification
from longspan.errors import UserError
from longspan.hashing import hash64
from longspan.wording import counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = NDArray[np.int64]

BASELINE_TOKENS = 1 << 20
"""Training tokens that the bigram baseline is fitted on; reading and sorting them takes 0.2 s."""
BASELINE_STRETCH = 4096
"""They are read in stretches of so many tokens, spread evenly over the training split."""


@dataclass(frozen=True)
class Sample:
    """One sequence of `context` tokens. Arrays are int64 of shape (context,)."""

    tokens: Ints
    targets: Ints
    """The next token at each position, or IGNORE_INDEX for no loss."""
    documents: Ints | None = None
    """A number for each token; a run of equal ones is a document, which attention does not leave.
    None for one document."""


@dataclass(frozen=True)
class Batch:
    """A batch of samples: int64 tensors of shape (batch, context)."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """See `Sample`."""

    def split(self, size: int) -> list[Batch]:
        """Split into batches of at most `size` samples."""
        starts = range(0, len(self.tokens), size)
        return [self._map(itemgetter(slice(i, i + size))) for i in starts]

    def pin_memory(self) -> Batch:
        """Copy to page-locked host memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda x: x.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, asynchronously from pinned memory."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        documents = None if self.documents is None else function(self.documents)
        return Batch(function(self.tokens), function(self.targets), documents)


@dataclass(frozen=True)
class Baseline:
    """The loss of a model without long context on the same targets, in nats per token."""

    name: str
    nats: float


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


class Tokens(Protocol):
    """Tokens that are read by slices: an array, or the file of a shard."""

    def __len__(self) -> int: ...
    def __getitem__(self, which: slice, /) -> NDArray[Any]: ...


class TokenSplit:
    """One split: tokens that are read as if concatenated, and the end of each document."""

    def __init__(self, arrays: Sequence[Tokens], document_ends: Ints) -> None:
        self.arrays, self.document_ends = arrays, document_ends
        self._starts = [0, *itertools.accumulate(map(len, arrays))]
        self.total = self._starts[-1]

    def read(self, start: int, stop: int) -> Ints:
        chunks, first = [], bisect_right(self._starts, start) - 1
        for array, offset in zip(self.arrays[first:], self._starts[first:], strict=False):
            if offset >= stop:
                break
            chunks.append(array[max(start - offset, 0) : stop - offset].astype(np.int64))
        return np.concatenate(chunks)


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
        if self.num_windows("train") == 0:
            raise UserError(
                f"the train split has {counted(splits['train'].total, 'token')}, fewer than one "
                f"sample of data.context + 1 = {context + 1:,}: reduce data.context or add text"
            )

    def num_windows(self, split: str) -> int:
        """Return the number of samples per epoch. A partial window at the end is dropped."""
        return max(0, self.splits[split].total - 1) // self.context

    def describe(self) -> str:
        sizes = [f"{split} {self.splits[split].total:,}" for split in self.splits]
        return (
            f"tokens: {', '.join(sizes)}; {counted(self.num_windows('train'), 'sample')} per epoch"
        )

    def verification(self) -> Verification | None:
        return self._verification() if self._verification else None

    def sample(self, seed: int, index: int) -> Sample:
        return self._window("train", self._train_window(seed, index))

    def num_targets(self, seed: int, index: int) -> int:
        # The last token of each document has no target.
        start = self._train_window(seed, index) * self.context
        ends = self.splits["train"].document_ends
        first, last = np.searchsorted(ends, [start, start + self.context], side="right")
        return self.context - int(last - first)

    def validation_samples(self, count: int) -> list[Sample]:
        windows = self.num_windows("validation")
        return [
            self._window("validation", permute(index, windows, 0, 0))
            for index in range(min(count, windows))
        ]

    def baseline(self, samples: list[Sample]) -> Baseline:
        length = min(BASELINE_STRETCH, self.splits["train"].total - 1)
        stretches = (self.splits["train"].total - 1) // length
        count = min(stretches, BASELINE_TOKENS // length)
        fitted = [
            self._read("train", i * stretches // count * length, length) for i in range(count)
        ]
        name = f"bigram (fitted on {count * length:,} training tokens)"
        return Baseline(name, bigram_nats(fitted, samples, self.vocab))

    def _train_window(self, seed: int, index: int) -> int:
        epoch, position = divmod(index, self.num_windows("train"))
        return permute(position, self.num_windows("train"), seed, epoch)

    def _window(self, split: str, window: int) -> Sample:
        return self._read(split, window * self.context, self.context)

    def _read(self, split: str, start: int, length: int) -> Sample:
        data, tokens = self.splits[split], self._tokens(split, start, start + length + 1)
        # Documents end after these many tokens. The last token of each has no target.
        first, last = np.searchsorted(data.document_ends, [start, start + length], side="right")
        ends = data.document_ends[first:last] - start
        targets = tokens[1:].copy()
        targets[ends - 1] = IGNORE_INDEX
        return Sample(tokens[:-1], targets)

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


def open_source(data: Data, model: Model) -> Source:
    """Open the source that [data] names, and check it against the model's vocabulary."""
    if data.source == "recall":
        return RecallSource(data.context, data.recall_pairs, model.vocab)
    kind: type[TokenSource] = TokenSource
    if data.documents == "isolate":
        from longspan.data.packing import PackedSource  # it is a TokenSource

        kind = PackedSource
    if data.source == "builtin":
        source = _builtin(data.context, kind)
    else:
        source = _from_shards(Path(data.source), data.context, kind)
    if source.vocab > model.vocab:
        raise UserError(
            f"model.vocab must be at least {source.vocab:,}, the vocabulary size of the data, got "
            f"{model.vocab:,}: set model.vocab={source.vocab}"
        )
    return source


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into tensors of shape (batch, context) in host memory."""
    import torch  # late: `longspan data` makes no tensor

    tokens, targets = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "targets")
    )
    documents = [sample.documents for sample in samples if sample.documents is not None]
    return Batch(tokens, targets, torch.from_numpy(np.stack(documents)) if documents else None)


def count_targets(samples: list[Sample]) -> int:
    """Return the number of positions with a target."""
    return sum(int((sample.targets != IGNORE_INDEX).sum()) for sample in samples)


def bigram_nats(fitted: list[Sample], samples: list[Sample], vocab: int) -> float:
    """Return the cross-entropy, in nats, of `samples` under a bigram model of `fitted`.

    Witten-Bell smoothing mixes in the unigram model, by as much as new tokens are to be expected:
        p(b | a) = (n(a, b) + d(a) p(b)) / (n(a) + d(a)),   p(b) = (n(b) + 1) / (n + vocab),
    where n counts pairs and d(a) the different tokens after a; after an unseen a it is p(b). Only
    pairs that occur are counted, so memory is O(tokens + vocab), not O(vocab²).
    """
    if count_targets(samples) == 0:
        return 0.0
    before, after = _pairs(fitted)
    pairs, counts = np.unique(before * vocab + after, return_counts=True)
    unigram = (np.bincount(after, minlength=vocab) + 1) / (len(after) + vocab)
    total = np.bincount(before, minlength=vocab)
    different = np.maximum(1, np.bincount(pairs // vocab, minlength=vocab))
    pairs, counts = np.append(pairs, vocab * vocab), np.append(counts, 0)  # above all pairs
    before, after = _pairs(samples)
    found = np.searchsorted(pairs, before * vocab + after)
    count = np.where(pairs[found] == before * vocab + after, counts[found], 0)
    smoothed = count + different[before] * unigram[after]
    return float(np.mean(np.log(total[before] + different[before]) - np.log(smoothed)))


def _pairs(samples: list[Sample]) -> tuple[Ints, Ints]:
    """The tokens of samples that have a target, and their targets."""
    before = np.concatenate([sample.tokens for sample in samples])
    after = np.concatenate([sample.targets for sample in samples])
    return before[after != IGNORE_INDEX], after[after != IGNORE_INDEX]


def _from_shards(folder: Path, context: int, kind: type[TokenSource]) -> TokenSource:
    index = read_index(folder)
    splits: dict[str, TokenSplit] = {}
    for split in SPLITS:
        shards = [shard for shard in index.shards if shard.split == split]
        starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        ends = [
            np.asarray(shard.document_ends, dtype=np.int64) + start
            for shard, start in zip(shards, starts, strict=False)
        ]
        splits[split] = TokenSplit(
            [ShardFile(folder, index, shard) for shard in shards],
            np.concatenate([np.zeros(0, dtype=np.int64), *ends]),
        )
    tokenizer, fingerprint = load_tokenizer(folder), index.fingerprint()
    if isinstance(tokenizer, JsonTokenizer):
        fingerprint = hashlib.sha256(f"{fingerprint} {tokenizer.sha256}".encode()).hexdigest()
    verification = partial(Verification, folder, index)
    return kind(splits, context, tokenizer, index.vocab, fingerprint, verification)


def _builtin(context: int, kind: type[TokenSource]) -> TokenSource:
    """Read the standard library's .py files; a hash of the name puts 1 in 20 into validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    digest = hashlib.sha256()
    documents: dict[str, list[bytes]] = {"train": [], "validation": []}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped  # site-packages may hold ten thousand files
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(paths):
        name, content = path.relative_to(root), path.read_bytes()
        if not content:
            continue
        in_validation = hashlib.sha256(name.as_posix().encode()).digest()[0] < 13
        documents["validation" if in_validation else "train"].append(content + b"\0")
        digest.update(content)
    splits = {
        split: TokenSplit(
            [np.frombuffer(b"".join(texts), dtype=np.uint8)],
            np.cumsum([len(text) for text in texts], dtype=np.int64),
        )
        for split, texts in documents.items()
    }
    tokenizer = ByteTokenizer()
    return kind(splits, context, tokenizer, tokenizer.vocab, digest.hexdigest())
