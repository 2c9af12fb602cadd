"""A user's own dataset as a source of samples: the same endless, resumable order as token shards.

A map-style dataset is shuffled epoch by epoch by a keyed permutation; an iterable keeps its order.
Random numbers that a dataset draws depend on the seed and the sample's index in the order alone, so
a run gets the same samples on any number of processes and workers, and after it is resumed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longspan.data.permutation import permute
from longspan.errors import UserError
from longspan.hashing import hash64
from longspan.wording import counted

if TYPE_CHECKING:
    import torch

Collate = Callable[[list[Any]], Any]


class NestedBatch(NamedTuple):
    """What `collate` has made of some samples: tensors in dicts, lists and tuples."""

    content: Any
    seed: int
    """For the random numbers that a model draws; it depends on the first sample's index alone."""

    def to(self, device: torch.device) -> NestedBatch:
        content = _map(lambda x: x.to(device, non_blocking=True), self.content, "to")
        return NestedBatch(content, self.seed)

    def pin_memory(self) -> NestedBatch:
        content = _map(lambda x: x.pin_memory(), self.content, "pin_memory")
        return NestedBatch(content, self.seed)


class MicroBatches:
    """The micro-batches of a step."""

    def __init__(self, batches: Sequence[NestedBatch]) -> None:
        self._batches = batches

    def split(self, size: int, /) -> Sequence[NestedBatch]:
        return self._batches


class Failure(NamedTuple):
    """Why a batch cannot be read; it crosses from a worker process as a value."""

    text: str


class DatasetSource:
    """Samples of a dataset by their index in the endless order of training."""

    tokenizer = None

    def __init__(
        self, dataset: Any, *, collate: Collate | None = None, shuffle: bool = True
    ) -> None:
        self.name = type(dataset).__name__
        self.length = _length(dataset)
        self.is_map = hasattr(dataset, "__getitem__") and not _is_iterable_dataset(dataset)
        if not self.is_map and not hasattr(dataset, "__iter__"):
            raise UserError(
                f"the dataset must have __getitem__ or __iter__, but {self.name} has neither"
            )
        self._dataset, self._collate, self._shuffle = dataset, collate, shuffle and self.is_map
        self._stream: tuple[int, int, Iterator[Any]] | None = None
        """Of an iterable: the epoch, and how many of its samples were read."""
        own = getattr(dataset, "fingerprint", None)
        text = own if isinstance(own, str) else f"{self.name} {self.length}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        order = "" if self._shuffle else ", in their order"
        return f"{self.name}: {counted(self.length, 'sample')} per epoch{order}"

    def batch(self, seed: int, indices: Sequence[int]) -> NestedBatch | Failure:
        """Samples `indices` of the endless order, collated."""
        try:
            samples = [self._sample(seed, index) for index in indices]
            of_batch = hash64(seed, 3, indices[0])
            with seeded(of_batch):  # a collate function may mask or mix samples at random
                return NestedBatch(self._collated(samples), of_batch)
        except _Unreadable as error:
            return Failure(str(error))

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return (self._collate or default_collate)(samples)
        except Exception as error:  # of the user's function, or samples that do not fit together
            raise _Unreadable(
                f"samples of {self.name} cannot be put into one batch: {_text(error)}; give "
                "samples of one shape, a collate function, or train.micro_batch=1"
            ) from error

    def _sample(self, seed: int, index: int) -> Any:
        epoch, position = divmod(index, self.length)
        if not self.is_map:
            return self._next(seed, epoch, position)
        if self._shuffle:
            position = permute(position, self.length, seed, epoch)
        with seeded(hash64(seed, 2, index)):
            try:
                return self._dataset[position]
            except Exception as error:
                now = len(self._dataset)
                changed = f" (its length was {self.length:,} and is {now:,})"
                note = changed if now != self.length else ""
                text = f"{self.name}[{position}] raised {_text(error)}{note}"
                raise _Unreadable(text) from error

    def _next(self, seed: int, epoch: int, position: int) -> Any:
        """A sample of an iterable, which is read up to it, from its beginning where it must be."""
        try:
            if self._stream is None or self._stream[0] != epoch or self._stream[1] > position:
                with seeded(hash64(seed, 4, epoch)):
                    self._stream = epoch, 0, iter(self._dataset)
            _, at, stream = self._stream
            for index in range(at, position + 1):
                with seeded(hash64(seed, 2, epoch * self.length + index)):
                    sample = next(stream)
        except StopIteration:
            text = f"{self.name} has {self.length:,} samples by its length, but it ended earlier"
            raise _Unreadable(text) from None
        except Exception as error:
            raise _Unreadable(f"iterating over {self.name} raised {_text(error)}") from error
        self._stream = epoch, position + 1, stream
        return sample


class _Unreadable(Exception):
    pass


class seeded:
    """A context in which torch, numpy and random draw from `seed`; afterwards from where they were.

    A dataset may use any of them for its augmentations.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        import torch

        self._states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(self._seed)
        np.random.seed(self._seed % (1 << 32))
        random.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])
        random.setstate(self._states[2])


def default_collate(samples: list[Any]) -> Any:
    import torch.utils.data

    return torch.utils.data.default_collate(samples)


def _is_iterable_dataset(dataset: Any) -> bool:
    """Whether it is torch's IterableDataset, which inherits a __getitem__ that only raises."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _length(dataset: Any) -> int:
    name = type(dataset).__name__
    try:
        length = len(dataset)
    except TypeError:
        raise UserError(
            f"the dataset must have a length, but {name} has none: give it __len__"
        ) from None
    if length < 1:
        raise UserError(f"the dataset is empty: {name} has no samples")
    return length


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _map(function: Callable[[Any], Any], value: Any, method: str) -> Any:
    """Apply `function` to what has the method that it calls: tensors in dicts, lists, tuples and
    named tuples, and batches of other libraries (PackedSequence, BatchEncoding).
    """  # fmt: skip
    if hasattr(value, method):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, inner, method) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, inner, method) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(function, inner, method) for inner in value)
    return value
