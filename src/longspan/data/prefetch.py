"""Reads the next step's samples in a background thread while the device computes this step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.data.samples import collate
from longspan.data.source import Source

if TYPE_CHECKING:
    import torch


class StepData(NamedTuple):
    """The samples of a step."""

    batch: Any
    """This rank's, in host memory; pinned for a GPU, so that copies to it are asynchronous."""
    targets: int | None
    """The number of positions with a target in the samples of all ranks; None if only the loss
    function knows what to divide by."""


class Prefetcher:
    """Reads the samples of one step ahead. Use it as a context: at its end the thread ends.

    What is read depends on the indices of the samples alone, so nothing but a wrong guess of the
    next indices, as before a rollback, can go wrong; then it is discarded.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        local_samples: Callable[[Sequence[int]], Sequence[int]],
        device: torch.device,
    ) -> None:
        """`local_samples`: selects this rank's samples of a step."""
        self.source = source
        self._seed, self._local_samples, self._device = seed, local_samples, device
        self._thread = ThreadPoolExecutor(1, "longspan-data")
        self._next: tuple[Sequence[int], Future[StepData]] | None = None
        self.waited_s = 0.0
        """How long training has waited for samples."""

    def read(self, indices: Sequence[int], following: Sequence[int]) -> StepData:
        """Return samples `indices`, and begin to read `following`; raises what reading raises."""
        start = time.perf_counter()
        found = self._await(indices, following)
        self.waited_s += time.perf_counter() - start
        return found

    def _await(self, indices: Sequence[int], following: Sequence[int]) -> StepData:
        expected, future = self._next or (None, None)
        if future is None or expected != indices:
            future = self._thread.submit(self._read, indices)
        self._next = None
        found = future.result()
        self._next = following, self._thread.submit(self._read, following)
        return found

    def _read(self, indices: Sequence[int]) -> StepData:
        local = self._local_samples(indices)
        batch = collate([self.source.sample(self._seed, i) for i in local], local)
        if self._device.type == "cuda":
            import torch  # late, as in `collate`

            if self._device.index is not None:
                torch.cuda.set_device(self._device)  # a thread starts with GPU 0: no context there
            batch = batch.pin_memory()
        targets = sum(self.source.num_targets(self._seed, i) for i in indices)
        return StepData(batch, targets)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
