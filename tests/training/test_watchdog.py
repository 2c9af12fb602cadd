"""A watchdog ends a process that hangs, even if it cannot report why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANG = """
import sys, time
from pathlib import Path
from longspan.faults import fault_point
from longspan.parallel.world import World
from longspan.training.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), World(), 1.0, 0):
    if sys.argv[2] == "at a fault point":
        fault_point("data")
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["at a fault point", "elsewhere", "history unwritable"])
def test_a_hang_ends_even_if_it_cannot_be_reported(tmp_path: Path, how: str) -> None:
    if how == "history unwritable":
        (tmp_path / "history.jsonl").mkdir()
    command = [sys.executable, "-c", HANG, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "no progress on rank 0 for 1 s" in done.stderr
