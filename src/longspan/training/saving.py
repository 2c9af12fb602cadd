"""Checkpoints behind the training.

A save begins with a copy of this rank's tensors into the CPU's memory; that is all the training
waits for. A thread writes the copy. The ranks tell one another, in the one message they exchange
after every step anyway, whether any is still writing or has failed; once all have written, the main
one gives the checkpoint its name. Threads exchange no messages.
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

from longspan.checkpoint import Draft, Part, prune
from longspan.config import Checkpoint
from longspan.errors import Diverged, UserError
from longspan.faults import reach
from longspan.parallel.placement import Placement
from longspan.training.state import State

WAIT_S = 0.1
RETRY_STEPS = 10
"""After a save that failed, the steps to the next attempt."""


class Saver:
    """At most one save is under way."""

    def __init__(
        self, folder: Path, settings: Checkpoint, placed: Placement, say: Callable[[str], None]
    ) -> None:
        self._folder, self._settings, self._placed, self._say = folder, settings, placed, say
        self._stage: dict[str, Tensor] = {}
        self._draft: Draft | None = None
        self._state: dict[str, Any] = {}
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._retry_at: int | None = None
        self.blocked_s = 0.0
        """How long training has waited for saves."""

    def is_due(self, step: int) -> bool:
        every = self._settings.every
        retries = self._retry_at is not None and step >= self._retry_at
        return retries or (every > 0 and step % every == 0)

    def begin(self, state: State, trained_with: dict[str, Any]) -> None:
        """Copy what this rank has, and let a thread write it. Every rank must call it."""
        began = time.monotonic()
        if self._draft is not None:
            self._say(f"the checkpoint of step {self._draft.step} is still being written: waiting")
            self.finish()
        if any(self._placed.any(not state.is_finite())):
            raise Diverged(f"weights are not finite after step {state.step}: lower train.lr")
        self._retry_at = None
        reach("staging")
        if self._thread is not None:  # which removes an old one
            self._thread.join()
        parts = self._copied(state.parts())
        self._draft, self._state = Draft(self._folder, state.step), state.scalars(trained_with)
        self._thread = Thread(target=self._write, args=(self._draft, parts), daemon=True)
        self._thread.start()
        if not self._settings.async_save:
            self.finish()
        self.blocked_s += time.monotonic() - began

    def report(self) -> tuple[bool, bool]:
        """Whether this rank is still writing, and whether it has failed."""
        thread = self._thread if self._draft is not None else None
        return thread is not None and thread.is_alive(), self._error is not None

    def proceed(self, is_writing: bool, has_failed: bool) -> None:
        """Take up what all ranks have reported: name the checkpoint, or give it up."""
        if self._draft is None or is_writing:
            return
        draft, error, self._draft, self._error = self._draft, self._error, None, None
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if not has_failed and self._placed.world.is_main:
            try:
                draft.commit(self._state, self._placed.world.size)
            except Exception as problem:  # noqa: BLE001  all ranks must hear of it
                error, has_failed = problem, True
        (has_failed,) = self._placed.any(has_failed)
        if not has_failed and self._placed.world.is_main:
            self._thread = Thread(target=self._prune, daemon=True)
            self._thread.start()
        if has_failed:
            self._retry_at = draft.step + RETRY_STEPS
            reason = error or "another rank could not write, see its log"
            self._say(f"THE CHECKPOINT OF STEP {draft.step} IS NOT WRITTEN: {reason}")
            if self._placed.world.is_main:
                draft.drop()

    def finish(self) -> None:
        """Wait for a save under way, on all ranks: none waits in silence for another's disk."""
        while (report := self._placed.any(*self.report()))[0]:
            reach("saving")
            time.sleep(WAIT_S)
        self.proceed(*report)

    def finish_all(self) -> None:
        """At the end of a run: what cannot be written now is lost."""
        self.finish()
        if self._thread is not None:
            self._thread.join()
        if self._retry_at is not None:
            raise UserError(
                f"the last checkpoint could not be written to {self._folder}: free or mend the "
                "disk, then go on with --resume from the one before it"
            )

    def _copied(self, parts: dict[str, Part]) -> dict[str, Part]:
        """Into memory that is kept from one save to the next, pinned where it comes from a GPU."""
        copies = {}
        for name, part in parts.items():
            stage = self._stage.get(name)
            if stage is None or stage.shape != part.values.shape:
                pinned = part.values.is_cuda
                stage = torch.empty(part.values.shape, dtype=part.values.dtype, pin_memory=pinned)
                self._stage[name] = stage
            stage.copy_(part.values, non_blocking=True)
            copies[name] = Part(stage, part.shape, part.box)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _write(self, draft: Draft, parts: dict[str, Part]) -> None:
        rank = self._placed.world.rank
        try:
            draft.write(parts, rank)
        except Exception as error:  # noqa: BLE001  whatever it is, the training must hear of it
            self._error = error
            print(f"rank {rank} could not write step {draft.step}: {error}", file=sys.stderr)

    def _prune(self) -> None:
        try:
            prune(self._folder, self._settings.keep, self._settings.keep_every)
        except OSError as error:
            self._say(f"an old checkpoint could not be removed: {error}")
