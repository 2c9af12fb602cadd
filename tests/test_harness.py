"""The harness: real processes, results by rank, and failures with tracebacks."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import Ranks, RanksFailed


def sum_of_ranks(rank: int, world: int, scale: int) -> tuple[int, int]:
    total = torch.tensor(rank * scale)
    dist.all_reduce(total)
    return int(total), os.getpid()


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise RuntimeError("rank one raised this")
    dist.barrier()


def sleep_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def exit_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_results_are_ordered_by_rank_and_processes_are_reused(ranks: Ranks) -> None:
    first = ranks.run(sum_of_ranks, 3, 10)
    second = ranks.run(sum_of_ranks, 2, 1)
    assert [total for total, _ in first] == [30, 30, 30]
    assert [total for total, _ in second] == [1, 1]
    pids = [pid for _, pid in first]
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    assert [pid for _, pid in second] == pids[:2]


def test_a_failing_rank_is_named_first_and_the_pool_recovers(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks.run(fail_on_one, 2)
    text = str(failure.value)
    assert text.index("rank 1 raised") < text.index("rank 0")
    assert "rank one raised this" in text
    assert ranks.run(sum_of_ranks, 2, 1)[0][0] == 1


def test_a_timeout_fails_with_the_stacks_of_all_ranks(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks.run(sleep_on_one, 2, timeout=3)
    text = str(failure.value)
    assert "rank 1 still running" in text
    assert "sleep_on_one" in text
    assert "rank 0" in text


def test_a_rank_that_dies_is_reported_with_its_exit_code(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="rank 1 raised\nthe process ended with exit code 7"):
        ranks.run(exit_on_one, 2)
