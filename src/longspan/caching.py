"""Caches of tensors, bounded by the bytes that they hold. Threads may share them."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

ENTRY_BYTES = 1024
"""What an entry counts besides its tensors, so that entries without any are bounded as well."""


class ByteCache(Generic[P, R]):
    """A function whose results are kept, those used last, up to `max_bytes` of tensors.

    Those of its arguments count, too. The newest result is kept whatever its size. Two threads that
    miss at the same time both compute it.
    """

    def __init__(self, function: Callable[P, R], max_bytes: int) -> None:
        self._function, self._max_bytes = function, max_bytes
        self._entries: OrderedDict[Hashable, tuple[R, int]] = OrderedDict()
        self._lock = Lock()
        self.held_bytes = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = args, tuple(sorted(kwargs.items()))
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return entry[0]
        result = self._function(*args, **kwargs)
        size = ENTRY_BYTES + tensor_bytes((key, result))
        with self._lock:
            if key not in self._entries:
                self._entries[key] = result, size
                self.held_bytes += size
            while self.held_bytes > self._max_bytes and len(self._entries) > 1:
                _, (_, freed) = self._entries.popitem(last=False)
                self.held_bytes -= freed
        return result


def cached_up_to(max_bytes: int) -> Callable[[Callable[P, R]], ByteCache[P, R]]:
    """Cache a function's results, up to `max_bytes` of tensors."""
    return lambda function: ByteCache(function, max_bytes)


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in tuples, lists, tables and dataclasses; shared storages count once."""
    storages = {s._cdata: s.nbytes() for s in (x.untyped_storage() for x in _tensors(value))}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    inner: Any = ()
    if isinstance(value, tuple | list):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif is_dataclass(value):
        inner = (getattr(value, field.name) for field in fields(value))
    for each in inner:
        yield from _tensors(each)
