"""Whether the disk of a run folder takes its checkpoints, and how fast. Imports no torch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from longspan.config import Checkpoint, Run
from longspan.costs import checkpoint_bytes
from longspan.doctor.finding import Finding
from longspan.wording import size_text

WRITTEN = 64 << 20
"""Bytes that are written to measure the speed, at most."""


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def checkpoints_kept(checkpoint: Checkpoint, steps: int) -> int:
    """Checkpoints on the disk at the end of a run: a new one is written before the oldest goes."""
    forever = steps // checkpoint.keep_every if checkpoint.keep_every else 0
    return checkpoint.keep + 1 + forever


def check_disk(run: Run, run_dir: Path) -> Iterator[Finding]:
    """Whether the run folder can be written, has space for all checkpoints, and at what speed."""
    folder = existing_folder(run_dir)
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    size = None if run.model.factory else checkpoint_bytes(run.model, run.train)
    seen = f"{size_text(free)} free in {folder}"
    if size is None:
        yield Finding("disk space", "ok", f"{seen}; the size of a task's checkpoint is not known")
    else:
        kept = checkpoints_kept(run.checkpoint, run.train.steps)
        needed = f"{kept} checkpoints of {size_text(size)}"
        if kept * size > free:
            yield Finding(
                "disk space",
                "error",
                f"{seen}, but {needed} need {size_text(kept * size)}",
                "free space, give a --run-dir on another disk, or lower checkpoint.keep or raise "
                "checkpoint.keep_every",
            )
        else:
            yield Finding("disk space", "ok", f"{seen} for {needed}")
    try:
        speed = write_speed(folder, min(WRITTEN, free // 2))
    except OSError as error:
        yield Finding(
            "disk writes",
            "error",
            f"cannot write in {folder}: {error.strerror}",
            "give a --run-dir that this user may write to on every machine",
        )
        return
    if speed is None:
        yield Finding("disk writes", "error", f"no space to write in {folder}", "free space")
        return
    seen = f"{speed / 1e6:,.0f} MB/s in {folder}"
    if size is None:
        yield Finding("disk writes", "ok", seen)
        return
    seconds = size / speed
    seen += f": a checkpoint takes {seconds:,.1f} s of one writer"
    if seconds > run.train.save_timeout_s:
        yield Finding(
            "disk writes",
            "warning",
            f"{seen}, more than train.save_timeout_s = {run.train.save_timeout_s:g}",
            "use a faster disk, or raise train.save_timeout_s",
        )
    else:
        yield Finding("disk writes", "ok", seen)


def write_speed(folder: Path, size: int) -> float | None:
    """Bytes per second that reach the disk, of a file that is removed; None without any space."""
    chunk = os.urandom(min(size, 1 << 20))  # a file system may compress zeros
    if not chunk:
        with tempfile.TemporaryFile(dir=folder):  # is it writable at all?
            return None
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        written = 0
        while written < size:
            written += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
