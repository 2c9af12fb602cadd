"""Profiles the steps that `track.profile` selects, and writes snapshots of CUDA's memory.

In the folder `profile` of a run each rank writes its traces, which chrome://tracing, Perfetto and
TensorBoard open, and its part of the summary; rank 0 joins the parts. The profiler has no
collective of its own and changes no result.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from longspan.config import Track
from longspan.errors import UserError
from longspan.faults import fault_point
from longspan.files import atomic_write_text
from longspan.torch_internals import record_memory_history, write_memory_snapshot
from longspan.tracking.lines import DiskErrors
from longspan.tracking.trace import (
    FOLDER,
    SUMMARY,
    RankSummary,
    StepTimes,
    TraceSummary,
    rank_path,
    read,
    summarise,
    summarise_rank,
    summarise_run,
)

RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
POINT = "profiling"
"""The point of the watchdog after which a trace is written, which may take minutes."""


class Profiler:
    """Profiles while entered. Every rank calls `step` at the end of each training step.

    Between two calls the ranks must have met in a collective: then all have written their parts
    when rank 0 joins them.
    """

    def __init__(
        self,
        run_dir: Path,
        track: Track,
        device: torch.device,
        *,
        rank: int,
        world: int,
        show: Callable[[str], None],
    ) -> None:
        self._folder, self._device, self._show = run_dir / FOLDER, device, show
        self._rank, self._world, self._disk_errors = rank, world, DiskErrors(run_dir / FOLDER)
        self._records_memory = track.memory_snapshot
        self._torch: profile | None = None
        self._steps_left = 0
        self._steps: list[int] = []  # that the current trace contains
        self._traces: dict[str, TraceSummary] = {}
        self._must_join = self._is_failing = self._has_recorded = False
        if (wanted := track.profile).active:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports every start and end
            # Each cycle has a trace of its own, which is all that is kept of it.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            cycle = {"wait": wanted.wait, "warmup": wanted.warmup, "active": wanted.active}
            self._steps_left = sum(cycle.values()) * wanted.repeat
            activities = [ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._torch = profile(
                activities=activities,
                schedule=schedule(**cycle, repeat=wanted.repeat, skip_first=0),
                on_trace_ready=self._write,
                profile_memory=True,
            )

    def __enter__(self) -> Profiler:
        with self._disk_errors:
            if self._torch is not None or self._records_memory:
                self._folder.mkdir(parents=True, exist_ok=True)
            if self._torch is not None:
                rank_path(self._folder, self._rank).unlink(missing_ok=True)  # of an earlier start
        if self._records_memory:
            record_memory_history(enabled=True)
        if self._torch is not None:
            self._torch.start()
        return self

    def step(self, step: int) -> None:
        """Mark the end of training step `step`."""
        if self._must_join:
            self._join()
        if self._torch is None:
            return
        is_recording = self._torch.current_action in RECORDING
        if is_recording:
            self._has_recorded = True
            self._steps.append(step)
        if self._device.type == "cuda" and (is_recording or self._records_next()):
            torch.cuda.synchronize(self._device)  # so that a step contains its own kernels
        self._torch.step()
        self._steps_left -= 1
        if self._steps_left == 0:
            self._stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_failing = error is not None
        if self._torch is not None and not (self._has_recorded or self._is_failing):
            self._show("no step was profiled: the run has ended in the wait of track.profile")
        self._stop()
        if self._must_join:
            self._join()
        if self._records_memory:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_memory("out-of-memory")
            elif error is None and not self._traces:
                self._write_memory("memory")
            record_memory_history(enabled=False)

    def _records_next(self) -> bool:
        assert self._torch is not None
        return self._torch.schedule(self._torch.step_num + 1) in RECORDING

    def _stop(self) -> None:
        """End the profiler, which writes a trace of the steps that an early end has left."""
        profiler, self._torch = self._torch, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the trace of a cycle and this rank's part of the summary."""
        steps, self._steps = self._steps, []
        if self._is_failing or not steps:
            return
        fault_point(POINT)
        draft = self._folder / f".rank{self._rank}.{os.getpid()}.tmp"
        # TensorBoard's profile plugin takes what precedes the number for the name of the worker.
        path = self._folder / f"rank{self._rank}.{steps[-1]}.pt.trace.json.gz"
        with self._disk_errors:
            try:
                profiler.export_chrome_trace(str(draft))
                content = draft.read_bytes()
                events = _events(content)
                draft.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            self._traces[path.name] = summarise(events, steps)
            found = asdict(summarise_rank(self._rank, self._traces))
            atomic_write_text(rank_path(self._folder, self._rank), json.dumps(found))
            self._must_join = self._rank == 0
        if self._records_memory:
            self._write_memory("memory")

    def _join(self) -> None:
        """Join the parts of all ranks, and show what is in them."""
        self._must_join = False
        with self._disk_errors:
            paths = [rank_path(self._folder, rank) for rank in range(self._world)]
            try:
                ranks = [read(path, RankSummary) for path in paths if path.exists()]
            except UserError as error:
                raise OSError(str(error)) from error
            summary = summarise_run(ranks, self._world)
            text = json.dumps(summary.as_dict(), indent=1)
            atomic_write_text(self._folder / SUMMARY, f"{text}\n")
            self._show(f"profile of {_range(ranks[0].steps)} in {self._folder}\n{summary}")

    def _write_memory(self, name: str) -> None:
        fault_point(POINT)
        path = self._folder / f"{name}-rank{self._rank}.pickle"
        with self._disk_errors:
            write_memory_snapshot(path)
            print(f"longspan: memory snapshot {path}", file=sys.stderr)


def _events(content: bytes) -> list[Any]:
    try:
        events = json.loads(content, strict=False)["traceEvents"]
    except (KeyError, ValueError) as error:
        raise OSError(f"torch has written no complete trace: {error}") from error
    return list(events)


def _range(steps: list[StepTimes]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
