"""A real file system that tests may fill, or make read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.faults import BALLAST, fill_disk


class SmallDisk:
    """A mounted tmpfs of a few MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Write until there is no space left."""
        fill_disk(self.path)
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        (self.path / BALLAST).unlink()

    def remount(self, option: str) -> None:
        """`option`: "ro" or "rw"."""
        subprocess.run(["mount", "-o", f"remount,{option}", self.path], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs of `size`, as "1m", at a new folder; skip the test where that is refused."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"this user may not mount a file system: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
