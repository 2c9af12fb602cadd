"""Encodes pieces of documents, in batches, in this process or over several."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

from longspan.data.documents import Split
from longspan.data.tokenizer import Marked, Tokenizer
from longspan.data.workers import prepare_worker
from longspan.errors import UserError

BATCH_CHARACTERS = 1 << 19
BATCH_PIECES = 1024
"""A batch ends with the piece that reaches one of these."""


class Place(NamedTuple):
    """Where in the input a document ends: files before its own, and documents of its file."""

    file: int = 0
    document: int = 0


@dataclass(frozen=True)
class Piece:
    """Some text of a document."""

    text: str
    split: Split
    edges: Sequence[int] | None
    """Where characters with a loss begin and end, alternating; None if all have one."""
    has_begin: bool = False
    """Whether it begins a document, before which the tokenizer may have a token."""
    end: DocumentEnd | None = None
    """Set for the last piece of a document, which may be without text."""


@dataclass(frozen=True)
class DocumentEnd:
    has_loss: bool
    """Whether the end-of-text token has one."""
    has_token: bool
    """Whether an end-of-text token follows."""
    place: Place
    fraction: float
    """How much of the input is read."""


def encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, workers: int
) -> Iterator[list[tuple[Piece, Marked]]]:
    """The pieces with their tokens, batch after batch, in their order.

    With `workers` so many processes encode, each two batches ahead at most.
    """
    batches = _batches(pieces)
    if not workers:
        for batch in batches:
            yield list(zip(batch, _encode(tokenizer, *_texts(batch)), strict=True))
        return
    context = multiprocessing.get_context("spawn")  # safe beside threads, such as torch's
    pending: deque[tuple[list[Piece], Future[list[Marked]]]] = deque()
    with ProcessPoolExecutor(workers, context, _start, (tokenizer, os.getpid())) as pool:
        try:
            for batch in batches:
                pending.append((batch, pool.submit(_encode_in_worker, *_texts(batch))))
                if len(pending) >= 2 * workers:
                    done, future = pending.popleft()
                    yield list(zip(done, future.result(), strict=True))
            while pending:
                done, future = pending.popleft()
                yield list(zip(done, future.result(), strict=True))
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process that encodes text was killed, perhaps for lack of memory: use "
                "fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _texts(batch: Sequence[Piece]) -> tuple[list[str], list[Sequence[int]]]:
    return [piece.text for piece in batch], [piece.edges or () for piece in batch]


def _encode(tokenizer: Tokenizer, texts: list[str], edges: list[Sequence[int]]) -> list[Marked]:
    return tokenizer.encode_batch(texts, edges)


_of_worker: Tokenizer | None = None
"""In a worker process."""


def _start(tokenizer: Tokenizer, parent: int) -> None:
    global _of_worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many processes as cores, not threads too
    _of_worker = tokenizer
    prepare_worker(parent)


def _encode_in_worker(texts: list[str], edges: list[Sequence[int]]) -> list[Marked]:
    assert _of_worker is not None
    return _encode(_of_worker, texts, edges)
