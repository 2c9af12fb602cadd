"""Verifies shards: their SHA-256 against the index, and that all tokens are in the vocabulary.

What was verified is remembered in a small file, by each shard's size, times and inode, so that a
restart need not read all data again. It is written next to the shards or, where that is not
allowed, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from longspan.data.shards import DTYPES, REBUILD, Index, Shard
from longspan.errors import UserError
from longspan.files import atomic_write_text, open_regular, read_json_object

CACHE = ".verified.json"
MAX_CACHE_BYTES = 1 << 27
CHUNK_BYTES = 1 << 22
THREADS = 8


class Verification:
    """Verifies the shards of a folder in threads: hashing does not hold the interpreter's lock.

    Use it as a context: at its end the threads end, verified or not.
    """

    def __init__(self, folder: Path, index: Index, *, again: bool = False) -> None:
        """`again`: verify those too that are remembered."""
        self._folder, self._index = folder, index
        self._remembered = _read_cache(folder)
        known = {} if again else self._remembered
        self._is_cancelled = Event()
        self._verified: dict[str, list[Any]] = {}
        self._pending: dict[Future[list[Any]], Shard] = {}
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "longspan-verify")
        for shard in index.shards:
            entry = known.get(shard.file)
            if entry is not None and entry == self._entry(shard):
                self._verified[shard.file] = entry
            else:
                self._pending[self._pool.submit(self._verify, shard)] = shard

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_cancelled.set()
        self._pool.shutdown(cancel_futures=True)

    def wait(self, seconds: float | None = None) -> int:
        """Wait until all is verified, but at most `seconds`; return how many bytes remain.

        Raises UserError for a shard that is not what the index says.
        """
        done, _ = wait(self._pending, seconds, FIRST_EXCEPTION)
        for future in done:
            self._verified[self._pending.pop(future).file] = future.result()
        if not self._pending and self._verified != self._remembered:
            _write_cache(self._folder, self._verified)
            self._remembered = dict(self._verified)
        itemsize = np.dtype(DTYPES[self._index.dtype]).itemsize
        return sum(shard.tokens * itemsize for shard in self._pending.values())

    def _entry(self, shard: Shard, descriptor: int | None = None) -> list[Any] | None:
        """What is remembered of a verified shard. No change of a file keeps its ctime."""
        try:
            found = os.stat(self._folder / shard.file if descriptor is None else descriptor)
        except OSError:
            return None  # `_verify` says what is wrong
        times = found.st_mtime_ns, found.st_ctime_ns
        return [found.st_size, *times, found.st_ino, shard.sha256, self._index.vocab]

    def _verify(self, shard: Shard) -> list[Any]:
        path, dtype = self._folder / shard.file, np.dtype(DTYPES[self._index.dtype])
        digest, largest = hashlib.sha256(), 0
        try:
            with open_regular(path, within=self._folder) as file:
                entry = self._entry(shard, file.fileno())
                while not self._is_cancelled.is_set() and (chunk := file.read(CHUNK_BYTES)):
                    digest.update(chunk)
                    whole = len(chunk) - len(chunk) % dtype.itemsize
                    largest = max(largest, int(np.frombuffer(chunk[:whole], dtype).max(initial=0)))
        except OSError as error:
            raise UserError(f"cannot read the shard {path}: {error.strerror}") from error
        if digest.hexdigest() != shard.sha256:
            raise UserError(f"{path} is damaged: its SHA-256 is not the index's; {REBUILD}")
        if largest >= self._index.vocab:
            raise UserError(
                f"{path} contains token {largest}, but the vocabulary size in the index is "
                f"{self._index.vocab}: rebuild the folder with `longspan data build`"
            )
        assert entry is not None
        return entry


class VerificationGroup(Verification):
    """Verifies several folders."""

    def __init__(self, verifications: Sequence[Verification]) -> None:
        self._all = verifications

    def __exit__(self, *exception: object) -> None:
        for each in self._all:
            each.__exit__(*exception)

    def wait(self, seconds: float | None = None) -> int:
        end = None if seconds is None else time.monotonic() + seconds
        return sum(
            each.wait(None if end is None else max(0.0, end - time.monotonic()))
            for each in self._all
        )


def _cache_paths(folder: Path) -> list[Path]:
    """Where it may be remembered: next to the shards, or in the user's cache folder."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    paths = [folder / CACHE, Path(home, "longspan", "verified", f"{name}.json")]
    return [path for path in paths if path.parent == folder or path.is_absolute()]  # no user: "~"


def _read_cache(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in reversed(_cache_paths(folder)):
        try:
            found |= read_json_object(path, MAX_CACHE_BYTES)
        except UserError:
            continue  # then the shards are verified again
    return found


def _write_cache(folder: Path, entries: dict[str, list[Any]]) -> None:
    for path in _cache_paths(folder):
        try:
            if path.parent != folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(path, json.dumps(entries))
            return
        except OSError:
            continue  # nowhere: then they are verified at every start
