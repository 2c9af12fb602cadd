"""How the ranks of a doctor exchange what they have found: a store, before any process group.

A rank that never comes is named after a time limit; nothing here waits for ever.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from longspan.doctor.finding import Finding, ranks_text
from longspan.doctor.network import AGENT_STORE
from longspan.loopback import STORE
from longspan.parallel.world import World

ROUNDS = 4
"""Questions for the time per rank, of which the quickest counts."""
SKEW_WARNING_S, SKEW_ERROR_S = 1.0, 3.0
"""torchrun takes a node for dead whose clock is behind by keep_alive_interval ×
keep_alive_max_attempt: 15 s by default, 3 s as the docs advise."""


def open_store(world: World, timeout_s: float) -> Any:
    """A store that all ranks share; raises an error of torch if rank 0 is not reached in time."""
    prefix = "longspan-doctor"
    if world.size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
    elif file := os.environ.get(STORE):
        store = dist.FileStore(f"{file}.doctor", world.size)  # type: ignore[attr-defined]
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world.size,
            world.rank == 0 and os.environ.get(AGENT_STORE) != "True",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


class Meeting:
    """The ranks that share a store."""

    def __init__(self, store: Any, world: World, timeout_s: float) -> None:
        self.store, self.world, self.timeout_s = store, world, timeout_s
        self.present = list(range(world.size))

    @property
    def is_led(self) -> bool:
        """Whether this rank hears the others: rank 0, or one that does not reach it."""
        return self.world.rank == self.present[0]

    def check_in(self) -> list[int]:
        """Wait for all ranks, and return those that have not come."""
        found = self.gather("here", "", range(self.world.size), self.timeout_s)
        # Rank 0 may have waited for all of its time.
        self.present = self.share("present", sorted(found), 2 * self.timeout_s)
        return sorted(set(range(self.world.size)) - set(self.present))

    def gather(
        self, key: str, value: Any, ranks: Collection[int] | None = None, limit_s: float = 0.0
    ) -> dict[int, Any]:
        """Rank 0 returns the values of those `ranks` that have set one in time; others nothing."""
        self.store.set(f"{key}/{self.world.rank}", json.dumps(value))
        if not self.is_led:
            return {}
        ranks = self.present if ranks is None else ranks
        deadline, pause = time.monotonic() + (limit_s or self.timeout_s), 0.005
        waiting = [f"{key}/{rank}" for rank in ranks]
        while not self.store.check(waiting) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
        return {
            rank: json.loads(self.store.get(f"{key}/{rank}"))
            for rank in ranks
            if self.store.check([f"{key}/{rank}"])
        }

    def share(self, key: str, value: Any, limit_s: float = 0.0) -> Any:
        """Return rank 0's value on all ranks; TimeoutError if it does not come."""
        if self.is_led:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.ask(key, limit_s or self.timeout_s))

    def ask(self, key: str, limit_s: float) -> bytes:
        """Wait for a key and return its value; TimeoutError if it is not set in time."""
        try:
            self.store.wait([key], timedelta(seconds=limit_s))
        except RuntimeError as error:  # of torch, which has several kinds
            text = f"rank 0 did not answer within {limit_s:g} s"
            raise TimeoutError(text) from error
        return bytes(self.store.get(key))

    def measure_clocks(self, clock: Callable[[], float] = time.time) -> tuple[float, float]:
        """How many seconds this rank's clock is ahead of rank 0's, and the error of that.

        Rank 0 answers one rank after the other with its time. An answer is as old as half the round
        trip, give or take that half. `clock`: replaced in tests.
        """
        others = [rank for rank in self.present if rank > 0]
        if self.world.rank == 0:
            deadline = time.monotonic() + 0.9 * self.timeout_s
            for rank in others:
                with suppress(TimeoutError):  # one that is stuck says so itself, or never reports
                    for key in (f"{rank}/{n}" for n in range(ROUNDS)):
                        self.ask(f"clock-asked/{key}", max(0.1, deadline - time.monotonic()))
                        self.store.set(f"clock/{key}", repr(clock()))
            return 0.0, 0.0
        best = (0.0, float("inf"))
        for n in range(ROUNDS):
            key = f"{self.world.rank}/{n}"
            before = clock()
            self.store.set(f"clock-asked/{key}", "")
            answer = float(self.ask(f"clock/{key}", self.timeout_s))
            after = clock()
            half = (after - before) / 2
            if half < best[1]:
                best = (before + half - answer, half)
        return best


def missing_ranks(missing: Collection[int], timeout_s: float) -> Finding:
    """What is said of ranks that did not check in."""
    return Finding(
        "ranks",
        "error",
        f"{ranks_text(missing)} did not check in within {timeout_s:g} s",
        "look whether it was started and what it has printed; whether its machine reaches "
        "MASTER_ADDR and MASTER_PORT of rank 0 (firewall, NetworkPolicy); --timeout waits longer",
    )


def judge_clocks(offsets: Mapping[int, tuple[float, float]]) -> Iterator[Finding]:
    """Compare the clocks of all ranks with rank 0's; each with the error of its measurement."""
    others = {rank: pair for rank, pair in offsets.items() if rank > 0}
    if not others:
        return
    certain = {rank: max(0.0, abs(offset) - error) for rank, (offset, error) in others.items()}
    worst = max(certain, key=lambda rank: (certain[rank], abs(others[rank][0])))
    offset, error = others[worst]
    seen = f"at most {abs(offset):,.3f} s ± {error:.3f} apart from rank 0's (rank {worst})"
    if certain[worst] <= SKEW_WARNING_S:
        yield Finding("clocks", "ok", seen)
        return
    yield Finding(
        "clocks",
        "error" if certain[worst] > SKEW_ERROR_S else "warning",
        seen,
        "synchronize the clocks (chrony, NTP): torchrun takes a node for dead whose clock is "
        "behind, and times in logs and metrics do not match",
    )
