"""`longspan bench exchange`: what ranks communicate under sequence (context) parallelism.

First counted: processes on this machine attend to a sequence that grows with their number, and the
bytes that each receives are counted at the all-to-all. Then planned: the sparse KV exchange of a
billion tokens on 1,024 ranks, without processes; every row of every rank is checked against the
definition of the pattern.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Heads,
    Pattern,
    Shards,
    attend_sharded,
    choose_shards,
    choose_strategy,
)
from longspan.attention.context_parallel import ring as ring_module
from longspan.attention.context_parallel.kv_exchange import remote_rows
from longspan.benchmarks.measure import Rows, open_console, write_result
from longspan.errors import UserError
from longspan.progress import waiting
from longspan.torch_internals import TorchDispatchMode

HEAD_DIM = 16
HEADS = Heads(4, 4)
PATTERNS: dict[str, Pattern] = {
    "dilated": Dilated((128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16)),
    "block-sparse": BlockSparse(64, local_window=256, global_tokens=64),
    "dense": Dense(),
}
TOKENS_PER_RANK = 512
FLOAT_BYTES = 4
TIMEOUT = timedelta(minutes=10)

PLANNED_TOKENS, PLANNED_RANKS = 1 << 30, 1024
LONGNET = Dilated(tuple(2048 << 2 * i for i in range(10)), tuple(1 << 2 * i for i in range(10)))
LONGNET_HEADS, LONGNET_ROW_BYTES = Heads(12, 12), 2 * 64 * 2
"""A row is a key and a value of 64 bf16 elements."""


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives from others by all-to-all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "ring_attention" in func.__name__:  # a custom operator, which hides its all-to-alls
            with self:
                return ring_module.forward_rounds(*args)
        if "all_to_all_single" in func.__name__:
            rows, receive_counts = args[0], args[1]
            from_others = sum(receive_counts) - receive_counts[dist.get_rank()]
            self.bytes += from_others * rows[0:0].new_empty(rows.shape[1:]).nbytes
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """Bytes received by the rank with the most traffic.

    `needed`: the remote keys and values that its queries see; no exchange of keys receives less.
    """

    pattern: str
    ranks: int
    strategy: str
    needed: int
    forward: int
    backward: int
    all_keys: int
    ulysses: int
    imbalance: float


@dataclass(frozen=True)
class Planned:
    """The exchange of many ranks, every row of which was checked."""

    tokens: int
    ranks: int
    seconds: float
    rows: int
    max_rows: int
    max_bytes: int
    mean_bytes: float
    max_peers: int
    imbalance: float


def bench_exchange(ranks: Sequence[int], json_file: Path | None) -> None:
    """Count, plan, print the tables and write the JSON file."""
    if min(ranks) < 2:
        raise UserError(f"--ranks must be at least 2 each, got {min(ranks)}")
    console, rows = open_console(json_file), list[Row]()
    console.print(
        f"{TOKENS_PER_RANK} tokens per rank, {HEADS.queries} heads × {HEAD_DIM}, float32, causal; "
        "KiB received by the rank with the most traffic"
    )
    table = Rows(console, COLUMNS)
    for count in ranks:
        with waiting(f"counting on {count} processes"):
            found = count_received(count)
        rows += found
        for row in found:
            table.add(*_cells(row))
    with waiting(f"planning {PLANNED_TOKENS:,} tokens on {PLANNED_RANKS:,} ranks"):
        planned = plan_all_ranks(LONGNET, Shards.even(PLANNED_TOKENS, PLANNED_RANKS), LONGNET_HEADS)
    console.print(_planned_text(planned))
    write_result(json_file, {"counted": [asdict(row) for row in rows], "planned": asdict(planned)})


def count_received(ranks: int) -> list[Row]:
    """Each pattern on `ranks` processes."""
    tokens = ranks * TOKENS_PER_RANK
    with tempfile.TemporaryDirectory(prefix="longspan-exchange-") as folder:
        spawn(_count_on_rank, (ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows, vector = [], HEAD_DIM * FLOAT_BYTES
    for name, pattern in PATTERNS.items():
        shards = choose_shards(pattern, tokens, ranks, HEADS)
        needed = [_count_remote_rows(pattern, shards, r, HEADS) for r in range(ranks)]
        q = torch.empty(1, TOKENS_PER_RANK, HEADS.queries, HEAD_DIM)
        strategy = choose_strategy(q, q, pattern, shards).name
        is_ulysses = strategy == "ulysses"
        row = Row(
            pattern=name,
            ranks=ranks,
            strategy=strategy,
            needed=2 * vector * max(needed),
            forward=max(by_pattern[name][0] for by_pattern in found),
            backward=max(by_pattern[name][1] for by_pattern in found),
            all_keys=2 * vector * HEADS.keys * (tokens - TOKENS_PER_RANK),
            ulysses=4 * vector * HEADS.queries * (TOKENS_PER_RANK - TOKENS_PER_RANK // ranks),
            imbalance=1.0 if is_ulysses else load_imbalance(pattern, shards, HEADS),
        )
        if not is_ulysses:
            received = [by_pattern[name][0] for by_pattern in found]
            assert received == [2 * vector * count for count in needed], (received, needed)
        rows.append(row)
    return rows


def _count_remote_rows(pattern: Pattern, shards: Shards, rank: int, heads: Heads) -> int:
    """Rows of all key heads that a rank's causal queries see on other ranks."""
    if shards.is_zigzag:
        assert isinstance(pattern, Dense)
        return heads.keys * (shards.chunks(rank)[-1].stop - shards.length(rank))
    return sum(map(len, remote_rows(pattern, shards, rank, heads, True)))


def _count_on_rank(rank: int, ranks: int, folder: str) -> None:
    """In a new process: each pattern forward and backward, and the bytes received."""
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, pattern in PATTERNS.items():
        shape = (1, TOKENS_PER_RANK, HEADS.queries, HEAD_DIM)
        q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
        shards = choose_shards(pattern, ranks * TOKENS_PER_RANK, ranks, HEADS)
        with ReceivedBytes() as forward:
            out = attend_sharded(q, k, v, pattern, group=group, shards=shards)
        with ReceivedBytes() as backward:
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        found[name] = (forward.bytes, backward.bytes)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def load_imbalance(pattern: Pattern, shards: Shards, heads: Heads) -> float:
    """The maximum over the mean work of a rank, in pairs of causal attention.

    What a query sees does not depend on later tokens, so the pairs of the queries [a, b) are those
    of a sequence of b tokens minus those of one of a tokens.
    """

    def pairs(tokens: int) -> int:
        return pattern.pairs(tokens, heads.queries, is_causal=True)

    work = [
        sum(pairs(chunk.stop) - pairs(chunk.start) for chunk in shards.chunks(rank))
        for rank in range(shards.ranks)
    ]
    return max(work) * len(work) / sum(work)


def plan_all_ranks(pattern: Dilated, shards: Shards, heads: Heads) -> Planned:
    """The causal exchange of all ranks, every row of which is checked."""
    start = time.monotonic()
    boundaries = torch.tensor(shards.boundaries)
    received, peers, sent = [], [], torch.zeros(shards.ranks, dtype=torch.int64)
    for rank in range(shards.ranks):
        local = shards.local_range(rank)
        sources = torch.zeros(shards.ranks, dtype=torch.int64)
        for head, rows in enumerate(remote_rows(pattern, shards, rank, heads, True)):
            _check_rows(rows, pattern, local, head)
            sources += torch.searchsorted(rows, boundaries).diff()
        assert sources[rank] == 0
        received.append(int(sources.sum()))
        peers.append(int((sources > 0).sum()))
        sent += sources
    assert int(sent.sum()) == sum(received)
    return Planned(
        tokens=shards.tokens,
        ranks=shards.ranks,
        seconds=time.monotonic() - start,
        rows=sum(received),
        max_rows=max(received),
        max_bytes=max(received) * LONGNET_ROW_BYTES,
        mean_bytes=sum(received) * LONGNET_ROW_BYTES / len(received),
        max_peers=max(peers),
        imbalance=load_imbalance(pattern, shards, heads),
    )


def _check_rows(rows: Tensor, pattern: Dilated, local: range, head: int) -> None:
    """Check the remote rows of one head for `local` queries: none missing, extra or repeated."""
    assert bool((rows.diff() > 0).all())
    needed = torch.zeros(len(rows), dtype=torch.bool)
    for w, r, begin in _open_segments(pattern, local, head):
        in_branch = (rows >= begin) & (rows < local.start) & (rows % r == head % r)
        first = begin + (head - begin) % r
        assert int(in_branch.sum()) == len(range(first, local.start, r)), (local, head, w, r)
        needed |= in_branch
    assert bool(needed.all()), (local, head)


def _open_segments(pattern: Dilated, local: range, head: int) -> Iterator[tuple[int, int, int]]:
    """Branches (w, r) with a `local` query in a segment that began earlier, and its begin."""
    for w, r in pattern.branches:
        begin = local.start // w * w
        first_query = local.start + (head - local.start) % r
        if begin < local.start and first_query < min(local.stop, begin + w):
            yield w, r, begin


def _planned_text(planned: Planned) -> str:
    all_keys = (planned.tokens - planned.tokens // planned.ranks) * LONGNET_HEADS.keys
    return (
        f"{planned.tokens:,} tokens on {planned.ranks:,} ranks, {len(LONGNET.branches)} branches "
        f"of 2,048 rows, {LONGNET_HEADS.queries} heads × 64, bf16: planned and checked in "
        f"{planned.seconds:.0f} s. {planned.rows:,} rows are communicated, each once. Per layer a "
        f"rank receives {planned.mean_bytes / 2**20:.1f} MiB on average and "
        f"{planned.max_bytes / 2**20:.1f} MiB at most, from at most {planned.max_peers} others; "
        f"all keys would be {all_keys * LONGNET_ROW_BYTES / 2**30:,.0f} GiB. Maximum over mean "
        f"work of a rank: {planned.imbalance:.4f}"
    )


COLUMNS = {
    "pattern": -12, "strategy": -9, "ranks": 5, "remote KV": 9, "received, forward": 9,
    "backward": 8, "all KV": 8, "Ulysses": 8, "work, max/mean": 9,
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    sizes = (row.needed, row.forward, row.backward, row.all_keys, row.ulysses)
    kib = [f"{size / 1024:,.0f}" for size in sizes]
    return row.pattern, row.strategy, str(row.ranks), *kib, f"{row.imbalance:.3f}"
