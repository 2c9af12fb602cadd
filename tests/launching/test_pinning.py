"""Cores of pinned ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from longspan.launching import pinning
from longspan.launching.local import run_processes
from longspan.launching.pinning import available_cores, cores_of_rank, pinned_environment

needs_linux = pytest.mark.skipif(not pinning.CAN_PIN, reason="this system cannot pin")


def test_ranks_have_cores_of_their_own_until_there_are_none_left() -> None:
    variables = pinned_environment([0, 2, 4, 6], 2)
    assert variables["OMP_NUM_THREADS"] == "2"
    cores = [cores_of_rank(variables | {"LOCAL_RANK": str(rank)}) for rank in range(3)]
    assert cores == [{0, 2}, {4, 6}, {0, 2}]


@needs_linux
def test_of_two_hyperthreads_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs 0 and 4 are one core, 1 and 5 another; of 6 nothing is known, and 5 is not ours."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 6})
    for cpu, siblings in {0: "0,4", 4: "0,4", 1: "1,5"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert available_cores(tmp_path) == [0, 1, 6]


@needs_linux
def test_a_process_pins_itself(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\nfrom longspan.launching.local import join_launcher\njoin_launcher()\n"
        "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    )
    last = available_cores()[-1]
    variables = pinned_environment([last], 1)
    command = [sys.executable, str(script)]
    run_processes(command, 2, tmp_path / "logs", quiet=True, variables=variables)
    assert (tmp_path / "logs" / "rank-1.log").read_text() == f"[{last}] 1\n"


def test_processes_share_the_cores_of_this_process_not_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under taskset, Slurm or a container's cpuset: more threads than cores wait in turns."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import os, pathlib; pathlib.Path('threads').write_text(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.chdir(tmp_path)
    assert run_processes([sys.executable, "-c", code], 1, tmp_path / "logs", quiet=True) == 0
    assert int(Path("threads").read_text()) == len(available_cores())
