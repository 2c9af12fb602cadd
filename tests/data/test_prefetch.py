"""The next step's samples are read in the background, and never the wrong ones are returned."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from longspan.data import Prefetcher, Sample, count_targets
from longspan.data.source import RecallSource
from longspan.errors import UserError

SEED = 7
CPU = torch.device("cpu")


class Recorded(RecallSource):
    """Records which samples are read, and in which thread; some cannot be read."""

    def __init__(self, unreadable: Sequence[int] = ()) -> None:
        super().__init__(context=64, pairs=4, vocab=32)
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.unreadable = unreadable
        self.reached = threading.Event()

    def sample(self, seed: int, index: int) -> Sample:
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        if index in self.unreadable:
            self.reached.set()
            raise UserError(f"sample {index} is damaged")
        return super().sample(seed, index)


def second_half(indices: Sequence[int]) -> Sequence[int]:
    return indices[len(indices) // 2 :]


def data_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("longspan-data")]


def test_it_returns_this_rank_s_samples_and_reads_each_once() -> None:
    source, plain = Recorded(), RecallSource(context=64, pairs=4, vocab=32)
    with Prefetcher(source, SEED, second_half, CPU) as data:
        for first in range(0, 40, 4):
            indices = list(range(first, first + 4))
            batch, targets = data.read(indices, [i + 4 for i in indices])
            expected = [plain.sample(SEED, i) for i in indices[2:]]
            assert np.array_equal(batch.tokens, [x.tokens for x in expected])
            assert np.array_equal(batch.targets, [x.targets for x in expected])
            assert targets == count_targets([plain.sample(SEED, i) for i in indices]) == 16
    assert source.read[:20] == [i for i in range(40) if i % 4 >= 2]
    assert source.threads == {"longspan-data_0"}
    assert data_threads() == []


def test_the_next_samples_are_read_while_the_caller_uses_these() -> None:
    source = Recorded(unreadable=[3])
    with Prefetcher(source, SEED, lambda x: x, CPU) as data:
        data.read([0, 1], [2, 3])
        assert source.reached.wait(60)  # the caller does not ask for them yet
        assert source.read == [0, 1, 2, 3]


def test_a_wrong_guess_is_discarded_even_if_it_cannot_be_read() -> None:
    source, plain = Recorded(unreadable=[3]), RecallSource(context=64, pairs=4, vocab=32)
    with Prefetcher(source, SEED, lambda x: x, CPU) as data:
        data.read([0, 1], [2, 3])
        for indices in ([8, 9], [4, 5], [4, 5]):  # as after a rollback; then the same again
            batch, _ = data.read(indices, [2, 3])
            expected = [plain.sample(SEED, i).tokens for i in indices]
            assert np.array_equal(batch.tokens, expected)


def test_an_error_of_the_reader_is_raised_for_its_own_step_only() -> None:
    source = Recorded(unreadable=[3])
    with Prefetcher(source, SEED, lambda x: x, CPU) as data:
        data.read([0, 1], [2, 3])
        for _ in range(2):
            with pytest.raises(UserError, match="sample 3 is damaged"):
                data.read([2, 3], [4, 5])
        data.read([4, 5], [6, 7])


def test_the_thread_ends_with_its_context_after_an_exception_too() -> None:
    def interrupted() -> None:
        with Prefetcher(Recorded(), SEED, lambda x: x, CPU) as data:
            data.read([0], [1])
            assert data_threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert data_threads() == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_batches_are_pinned_for_a_gpu(name: str) -> None:
    device = torch.device(name)
    with Prefetcher(Recorded(), SEED, lambda x: x, device) as data:
        for indices, following in (([0, 1], [2, 3]), ([2, 3], [4, 5])):
            batch, _ = data.read(indices, following)
            assert batch.tokens.is_pinned()
            parts = [part.to(device) for part in batch.split(1)]
            assert all(part.tokens.is_cuda and part.targets.is_cuda for part in parts)
            assert torch.equal(torch.cat([part.tokens for part in parts]).cpu(), batch.tokens)
