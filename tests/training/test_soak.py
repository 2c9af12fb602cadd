"""A run with every sink leaks nothing: memory, threads and file descriptors stay as they are.

`make soak` takes the 5,000 steps; `make test` a few hundred.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from longspan.config import Run
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.tracking import read_metrics
from longspan.tracking.sinks import Sinks
from longspan.training import loop, train
from tests.harness import Ranks
from tests.tracking.test_sinks import ALL
from tests.training.test_loop import SMALL

IS_LONG = bool(os.environ.get("LONGSPAN_SLOW"))
STEPS = 5000 if IS_LONG else 150
SAMPLES = 10
MAX_GROWTH = 64 << 20
"""Bytes by which malloc moves anyway: it has taken 32 MiB and given back 42."""
MAX_FILES = 20
"""Files that SQLite and MLflow may have open at the moment of a sample."""


class Sample(NamedTuple):
    """What this process uses after a step."""

    step: int
    rss: int
    threads: int
    files: int


def sample(step: int) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    return Sample(
        step, pages * os.sysconf("SC_PAGESIZE"), threads, len(os.listdir("/proc/self/fd"))
    )


def soak(rank: int, world: int, run: Run, folder: str, trackio: str) -> list[Sample]:
    """Train, and sample now and then, when all sinks have taken all lines."""
    os.environ["TRACKIO_DIR"] = trackio
    found: list[Sample] = []
    opened: list[Sinks] = []
    original, open_sinks = loop.train_step, loop.open_sinks

    def opening(*arguments: Any, **options: Any) -> Sinks:
        opened.append(open_sinks(*arguments, **options))
        return opened[-1]

    def stepping(state: Any, *arguments: Any) -> Any:
        if state.step and state.step % (run.train.steps // SAMPLES) == 0:
            while opened[-1].pending:
                time.sleep(0.01)
            found.append(sample(state.step))
        return original(state, *arguments)

    with patch.object(loop, "train_step", stepping), patch.object(loop, "open_sinks", opening):
        train(run, folder, world=World(rank, world, rank))
    left = {thread.name for thread in threading.enumerate()}
    assert not {f"longspan-{name}" for name in ALL} & left, left
    return found


def test_memory_threads_and_files_are_flat_with_every_sink_on(
    ranks: Ranks, tmp_path: Path, trackio_folder: Path
) -> None:
    sinks = f"track.sinks={list(ALL)}"
    options = [f"train.steps={STEPS}", "checkpoint.every=0", "track.per_layer_norms=true", sinks]
    run = load_run(None, [*SMALL, *options])
    (found,) = ranks.run(soak, 1, run, str(tmp_path / "run"), str(trackio_folder))
    for line in found:
        print(f"{line.step:>6} steps  {line.rss / 2**20:8.1f} MiB  {line[2:]}")
    assert len(found) == SAMPLES - 1
    first, last = found[1], found[-1]  # before, sinks open and buffers grow
    assert last.threads <= first.threads, found
    assert last.files <= first.files + MAX_FILES, found
    assert last.rss <= first.rss + MAX_GROWTH, found
    lines = [x for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in x]
    assert len(lines) == STEPS
