"""`longspan bench exchange`: what ranks that share a sequence send one another.

First counted: real processes on this machine attend to a sequence that grows with them, and the
bytes that each receives from the others are counted where they are handed to torch.distributed.
Then planned: a billion tokens on 1,024 ranks, without any process; every row of every rank's plan
is checked against the definition of the pattern.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Heads,
    Pattern,
    Shards,
    attend_sharded,
    best_shards,
    choose_way,
)
from longspan.attention.context_parallel import ring as ring_module
from longspan.attention.context_parallel.kv_exchange import outer_rows, rows_seen_elsewhere
from longspan.errors import UserError

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

BILLION, MANY = 1 << 30, 1024
LONGNET = Dilated(tuple(2048 << 2 * i for i in range(10)), tuple(1 << 2 * i for i in range(10)))
LONGNET_HEADS, LONGNET_ROW_BYTES = Heads(12, 12), 2 * 64 * 2
"""A row: a key and a value of 64 bf16."""


class Received(TorchDispatchMode):
    """Counts the bytes that this rank takes from others through our exchange."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "ring_attention" in func.__name__:  # an operator that hides what is within
            with self:
                return ring_module._forward(*args)
        if "all_to_all_single" in func.__name__:
            rows, taken = args[0], args[1]
            from_others = sum(taken) - taken[dist.get_rank()]
            self.bytes += from_others * rows[0:0].new_empty(rows.shape[1:]).nbytes
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """Bytes that the rank with most receives; `balance` is most over mean work of a rank."""

    pattern: str
    ranks: int
    way: str
    seen: int
    forward: int
    backward: int
    all_keys: int
    for_heads: int
    balance: float


@dataclass(frozen=True)
class Planned:
    """A plan of many ranks, of which every row was checked."""

    tokens: int
    ranks: int
    seconds: float
    rows: int
    most_rows: int
    most_bytes: int
    mean_bytes: float
    most_peers: int
    balance: float


def bench_exchange(ranks: Sequence[int], json_file: Path | None) -> None:
    """Count, plan, print the tables, and write what is asked for."""
    if min(ranks) < 2:
        raise UserError(f"--ranks must be at least 2 each, got {min(ranks)}")
    console = Console() if Console().is_terminal else Console(width=120)
    rows = [row for count in ranks for row in counted(count)]
    console.print(
        f"{TOKENS_PER_RANK} tokens a rank, {HEADS.queries} heads × {HEAD_DIM}, float32, causal; "
        "KiB received by the rank with most"
    )
    console.print(_table(rows))
    planned = plan_everywhere(LONGNET, Shards.even(BILLION, MANY), LONGNET_HEADS)
    console.print(_planned_text(planned), soft_wrap=True)
    if json_file is not None:
        result = {"counted": [asdict(row) for row in rows], "planned": asdict(planned)}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def counted(ranks: int) -> list[Row]:
    """Each pattern on `ranks` processes."""
    tokens = ranks * TOKENS_PER_RANK
    with tempfile.TemporaryDirectory(prefix="longspan-exchange-") as folder:
        spawn(_count, (ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows, vector = [], HEAD_DIM * FLOAT_BYTES
    for name, pattern in PATTERNS.items():
        shards = best_shards(pattern, tokens, ranks, HEADS)
        seen = [rows_seen_elsewhere(pattern, shards, r, HEADS, True) for r in range(ranks)]
        q = torch.empty(1, TOKENS_PER_RANK, HEADS.queries, HEAD_DIM)
        way = choose_way(q, q, pattern, shards).name
        row = Row(
            pattern=name,
            ranks=ranks,
            way=way,
            seen=2 * vector * max(seen),
            forward=max(of_rank[name][0] for of_rank in found),
            backward=max(of_rank[name][1] for of_rank in found),
            all_keys=2 * vector * HEADS.keys * (tokens - TOKENS_PER_RANK),
            for_heads=4 * vector * HEADS.queries * (TOKENS_PER_RANK - TOKENS_PER_RANK // ranks),
            balance=1.0 if way == "heads" else balance(pattern, shards, HEADS),
        )
        if way != "heads":
            taken = [of_rank[name][0] for of_rank in found]
            assert taken == [2 * vector * count for count in seen], (taken, seen)
        rows.append(row)
    return rows


def _count(rank: int, ranks: int, folder: str) -> None:
    """In a process of its own: each pattern forward and backward, and what came in."""
    torch.set_num_threads(1)
    init = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, pattern in PATTERNS.items():
        shape = (1, TOKENS_PER_RANK, HEADS.queries, HEAD_DIM)
        q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
        shards = best_shards(pattern, ranks * TOKENS_PER_RANK, ranks, HEADS)
        with Received() as forward:
            out = attend_sharded(q, k, v, pattern, group=group, shards=shards)
        with Received() as backward:
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        found[name] = (forward.bytes, backward.bytes)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def balance(pattern: Pattern, shards: Shards, heads: Heads) -> float:
    """The most work of a rank over the mean: pairs of causal attention.

    What a query sees does not depend on what follows it, so the pairs of the queries [a, b) are
    those of a sequence of b tokens less those of one of a.
    """

    def before(tokens: int) -> int:
        return pattern.pairs(tokens, heads.queries, is_causal=True)

    work = [
        sum(before(piece.stop) - before(piece.start) for piece in shards.pieces(rank))
        for rank in range(shards.ranks)
    ]
    return max(work) * len(work) / sum(work)


def plan_everywhere(pattern: Dilated, shards: Shards, heads: Heads) -> Planned:
    """The causal exchange of all ranks, each row of it checked."""
    start = time.monotonic()
    borders = torch.tensor(shards.borders)
    received, peers, sent = [], [], torch.zeros(shards.ranks, dtype=torch.int64)
    for rank in range(shards.ranks):
        own = shards.of(rank)
        sources = torch.zeros(shards.ranks, dtype=torch.int64)
        for head, rows in enumerate(outer_rows(pattern, shards, rank, heads, True)):
            _check_rows(rows, pattern, own, head)
            sources += torch.searchsorted(rows, borders).diff()
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
        most_rows=max(received),
        most_bytes=max(received) * LONGNET_ROW_BYTES,
        mean_bytes=sum(received) * LONGNET_ROW_BYTES / len(received),
        most_peers=max(peers),
        balance=balance(pattern, shards, heads),
    )


def _check_rows(rows: Tensor, pattern: Dilated, own: range, head: int) -> None:
    """Each row once, none needless and none missing, for one head of the queries `own`."""
    assert bool((rows.diff() > 0).all())
    needed = torch.zeros(len(rows), dtype=torch.bool)
    for w, r, begin in _begun(pattern, own, head):
        of_branch = (rows >= begin) & (rows < own.start) & (rows % r == head % r)
        first = begin + (head - begin) % r
        assert int(of_branch.sum()) == len(range(first, own.start, r)), (own, head, w, r)
        needed |= of_branch
    assert bool(needed.all()), (own, head)


def _begun(pattern: Dilated, own: range, head: int) -> Iterator[tuple[int, int, int]]:
    """Branches (w, r) with a query among `own` in a segment that began before, and its begin."""
    for w, r in pattern.branches:
        begin = own.start // w * w
        first_query = own.start + (head - own.start) % r
        if begin < own.start and first_query < min(own.stop, begin + w):
            yield w, r, begin


def _planned_text(planned: Planned) -> str:
    all_keys = (planned.tokens - planned.tokens // planned.ranks) * LONGNET_HEADS.keys
    return (
        f"{planned.tokens:,} tokens on {planned.ranks:,} ranks, {len(LONGNET.branches)} branches "
        f"of 2,048 rows, {LONGNET_HEADS.queries} heads × 64, bf16: planned and checked in "
        f"{planned.seconds:.0f} s. {planned.rows:,} rows travel, each once. For a layer a rank "
        f"receives {planned.mean_bytes / 2**20:.1f} MiB in the mean and "
        f"{planned.most_bytes / 2**20:.1f} MiB at most, from at most {planned.most_peers} others; "
        f"all keys would be {all_keys * LONGNET_ROW_BYTES / 2**30:,.0f} GiB. Most over mean work "
        f"of a rank: {planned.balance:.4f}"
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("pattern", "way"):
        table.add_column(column)
    for column in (
        "ranks", "keys seen elsewhere", "counted", "and backward", "all keys (ring, all-gather)",
        "for heads", "work, most/mean",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (list(PATTERNS).index(row.pattern), row.ranks)):
        sizes = (row.seen, row.forward, row.backward, row.all_keys, row.for_heads)
        kib = [f"{size / 1024:,.0f}" for size in sizes]
        table.add_row(row.pattern, row.way, str(row.ranks), *kib, f"{row.balance:.3f}")
    return table
