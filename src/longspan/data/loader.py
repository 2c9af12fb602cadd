"""Reads the samples of a user's dataset: a step ahead in worker processes, or when due."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from longspan.data.dataset import DatasetSource, Failure, MicroBatches, NestedBatch
from longspan.data.prefetch import Prefetcher, StepData
from longspan.data.workers import prepare_worker
from longspan.errors import UserError

if TYPE_CHECKING:
    import torch


class DatasetLoader(Prefetcher):
    """Without workers the dataset is read in the process that trains, and nothing is read ahead:
    a thread would share random number generators with the model.
    """  # fmt: skip

    source: DatasetSource  # type: ignore[assignment]

    def __init__(
        self,
        source: DatasetSource,
        seed: int,
        local_samples: Callable[[Sequence[int]], Sequence[int]],
        device: torch.device,
        *,
        micro_batch: int,
        workers: int,
    ) -> None:
        super().__init__(source, seed, local_samples, device)  # type: ignore[arg-type]
        self._micro_batch = micro_batch
        self._workers: ProcessPoolExecutor | None = None
        if workers:
            context = multiprocessing.get_context("fork")  # a dataset need not be picklable
            arguments = source, seed, os.getpid()
            self._workers = ProcessPoolExecutor(workers, context, _start_worker, arguments)

    def _await(self, indices: Sequence[int], following: Sequence[int]) -> StepData:
        return super()._await(indices, following) if self._workers else self._read(indices)

    def _read(self, indices: Sequence[int]) -> StepData:
        local, size = self._local_samples(indices), self._micro_batch
        groups = [local[start : start + size] for start in range(0, len(local), size)]
        found: list[NestedBatch | Failure]
        if self._workers:
            try:
                pending = [self._workers.submit(_read_batch, group) for group in groups]
                found = [batch.result() for batch in pending]
            except BrokenProcessPool as error:
                raise UserError(
                    f"a worker process that reads {self.source.name} was killed, perhaps for lack "
                    "of memory: use fewer workers"
                ) from error
            except Exception as error:  # errors of the dataset come as a Failure
                raise UserError(
                    f"a worker process cannot send a batch of {self.source.name} to the one that "
                    f"trains: {error}; return tensors, numbers and text, or use workers=0"
                ) from error
        else:
            found = [self.source.batch(self._seed, group) for group in groups]
        batches = []
        for batch in found:
            if isinstance(batch, Failure):
                raise UserError(batch.text)
            batches.append(self._pinned(batch))
        return StepData(MicroBatches(batches), None)

    def _pinned(self, batch: NestedBatch) -> NestedBatch:
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def __exit__(self, *exception: object) -> None:
        if self._workers:
            self._workers.shutdown(wait=False, cancel_futures=True)
        super().__exit__(*exception)


_of_worker: tuple[DatasetSource, int] | None = None
"""In a worker process: the dataset and the seed."""


def _start_worker(source: DatasetSource, seed: int, parent: int) -> None:
    global _of_worker
    import torch

    _of_worker = source, seed
    torch.set_num_threads(1)
    prepare_worker(parent)


def _read_batch(indices: Sequence[int]) -> Any:
    assert _of_worker is not None
    source, seed = _of_worker
    return source.batch(seed, indices)
