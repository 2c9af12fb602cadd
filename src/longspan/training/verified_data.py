"""Opens the data of a run on all ranks, and verifies it on one rank of each machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from longspan.config import Run
from longspan.data import Source, open_source
from longspan.errors import UserError
from longspan.faults import fault_point
from longspan.parallel.collectives import all_reduce_max
from longspan.parallel.mesh import ParallelMesh

INTERVAL_S = 20.0
"""Ranks tell each other so often that they still verify: a collective must not time out."""


def open_verified_source(
    run: Run, mesh: ParallelMesh, show: Callable[[str], None] = lambda text: None
) -> Source:
    """Open the source of a run and, with `data.verify`, verify its shards.

    A problem on any rank, such as a machine without the folder, is an error on all ranks at once.
    """
    source, problem = None, None
    with ExitStack() as stack:
        verification = None
        try:
            source = open_source(run.data, run.model)
            if run.data.verify and mesh.world.local_rank == 0:
                verification = source.verification()
        except UserError as error:
            problem = error
        if verification is not None:
            stack.enter_context(verification)
        before = -1
        while True:
            remaining = 0
            if verification is not None:
                try:
                    remaining = verification.wait(INTERVAL_S)
                except UserError as error:
                    problem = error
            remaining, failed = all_reduce_max(mesh, remaining, int(problem is not None))
            if failed:
                raise problem or UserError("another rank cannot use the data; it says why")
            if remaining == 0:
                assert source is not None
                return source
            if remaining != before:
                fault_point("verifying")  # progress, for the watchdog; none if a disk hangs
            before = remaining
            show(f"verifying the data: {remaining / 1e9:,.1f} GB left")
