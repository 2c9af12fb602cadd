"""Asynchronous checkpointing.

A save begins with a copy of this rank's tensors to CPU memory; training waits for that only. A
thread writes the copy. In the one all-reduce after every step the ranks learn whether any is still
writing or has failed; once all have written, rank 0 commits the checkpoint. Threads run no
collectives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from longspan.checkpoint import PendingCheckpoint, TensorShard, prune, read_key
from longspan.config import Checkpoint
from longspan.errors import Diverged, PeerLost, SaveFailed
from longspan.faults import fault_point
from longspan.parallel.collectives import all_reduce_any
from longspan.parallel.mesh import ParallelMesh
from longspan.training.state import TrainState

POLL_S = 0.1
RETRY_STEPS = 10
"""Steps from a failed save to the next attempt."""
LAST_RETRIES_S = (1.0, 3.0, 9.0)
"""Seconds from a failed last save to each further attempt: a scheduler may grant only 30."""


class Saver:
    """Saves checkpoints, at most one at a time."""

    def __init__(
        self, folder: Path, settings: Checkpoint, mesh: ParallelMesh, log: Callable[[str], None]
    ) -> None:
        self._folder, self._settings, self._mesh, self._log = folder, settings, mesh, log
        self._key = read_key(settings.key_file)
        self._staging: dict[str, Tensor] = {}
        self._pending: PendingCheckpoint | None = None
        self._state: dict[str, Any] = {}
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self.retry_at: int | None = None
        """The step at which to save again after a save that has failed or was lost."""
        self.blocked_s = 0.0
        """How long training has waited for saves."""

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Once a rank is lost, let the thread end before the drafts of checkpoints are removed."""
        if kind is PeerLost and self._thread is not None:
            self._thread.join()

    def is_due(self, step: int) -> bool:
        every = self._settings.every
        retries = self.retry_at is not None and step >= self.retry_at
        return retries or (every > 0 and step % every == 0)

    def begin(self, state: TrainState) -> None:
        """Copy this rank's tensors and start a thread that writes them. Every rank calls this."""
        began = time.monotonic()
        if self._pending is not None:
            self._log(f"still writing the checkpoint of step {self._pending.step}: waiting")
            self.finish()
        if any(all_reduce_any(self._mesh, not state.engine.is_finite())):
            raise Diverged(f"weights are not finite after step {state.step}: lower train.lr")
        self.retry_at = None
        fault_point("staging")
        if self._thread is not None:  # it removes an old checkpoint
            self._thread.join()
        shards = self._stage(state.tensor_shards())
        self._pending = PendingCheckpoint(self._folder, state.step)
        self._state = state.saved_state()
        self._thread = Thread(target=self._write, args=(self._pending, shards), daemon=True)
        self._thread.start()
        if not self._settings.async_save:
            self.finish()
        self.blocked_s += time.monotonic() - began

    def report(self) -> tuple[bool, bool]:
        """Whether this rank is still writing, and whether it has failed."""
        thread = self._thread if self._pending is not None else None
        return thread is not None and thread.is_alive(), self._error is not None

    def proceed(self, is_writing: bool, has_failed: bool) -> None:
        """Act on the reports of all ranks: commit the checkpoint, or discard it."""
        if self._pending is None or is_writing:
            return
        pending, error, self._pending, self._error = self._pending, self._error, None, None
        is_main = self._mesh.world.is_main
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if not has_failed and is_main:
            try:
                pending.commit(self._state, self._mesh.world.size, self._key)
            except Exception as problem:  # noqa: BLE001  all ranks must learn of it
                error, has_failed = problem, True
        is_missing = has_failed and is_main and _is_missing(self._folder.parent)
        has_failed, is_missing = all_reduce_any(self._mesh, has_failed, is_missing)
        if is_missing:
            raise SaveFailed(
                f"cannot save step {pending.step}: the run folder {self._folder.parent} was "
                "removed while the run was training"
            )
        if not has_failed and is_main:
            self._thread = Thread(target=self._prune, daemon=True)
            self._thread.start()
        if has_failed:
            self.retry_at = pending.step + RETRY_STEPS
            reason = error or "another rank could not write, see its log"
            self._log(f"THE CHECKPOINT OF STEP {pending.step} IS NOT WRITTEN: {reason}")
            if is_main:
                pending.discard()

    def finish(self) -> None:
        """Wait on all ranks for a save in progress, with collectives that keep them in step."""
        while (report := all_reduce_any(self._mesh, *self.report()))[0]:
            fault_point("saving")
            time.sleep(POLL_S)
        self.proceed(*report)

    def finish_all(self, state: TrainState) -> None:
        """Wait at the end of a run. A save that has failed is tried again.

        Raises SaveFailed, on all ranks, if the last checkpoint is still not written.
        """
        self.finish()
        for seconds in LAST_RETRIES_S:
            if self.retry_at is None:
                break
            self._log(f"trying again in {seconds:g} s")
            _sleep(seconds)
            self.begin(state)
            self.finish()
        if self._thread is not None:
            self._thread.join()
        if self.retry_at is not None:
            raise SaveFailed(
                f"the last checkpoint, of step {state.step}, could not be written to "
                f"{self._folder}: free or repair the disk, then use --resume to continue from the "
                "one before it"
            )

    def _stage(self, shards: dict[str, TensorShard]) -> dict[str, TensorShard]:
        """Copy into buffers that are reused for the next save, pinned for tensors on a GPU."""
        copies = {}
        for name, shard in shards.items():
            values, buffer = shard.values, self._staging.get(name)
            if buffer is None or buffer.shape != values.shape:
                buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                self._staging[name] = buffer
            buffer.copy_(values, non_blocking=True)
            copies[name] = TensorShard(buffer, shard.shape, shard.region)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _write(self, pending: PendingCheckpoint, shards: dict[str, TensorShard]) -> None:
        rank = self._mesh.world.rank
        try:
            pending.write(shards, rank)
        except Exception as error:  # noqa: BLE001  whatever it is, training must learn of it
            self._error = error
            print(f"rank {rank} could not write step {pending.step}: {error}", file=sys.stderr)

    def _prune(self) -> None:
        try:
            prune(self._folder, self._settings.keep, self._settings.keep_every)
        except OSError as error:
            self._log(f"an old checkpoint could not be removed: {error}")


def _sleep(seconds: float) -> None:
    """Sleep, and let the watchdog know."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        fault_point("saving")
        time.sleep(min(POLL_S, left))


def _is_missing(path: Path) -> bool:
    """Whether there is no such folder; a disk that cannot tell does not count."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
