"""`longspan bench exchange` counts what is communicated and checks every planned row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.attention import Dilated, Heads, Shards
from longspan.attention.context_parallel.kv_exchange import remote_rows
from longspan.benchmarks import exchange
from longspan.benchmarks.exchange import load_imbalance, plan_all_ranks
from longspan.cli import main
from tests.slow import slow


@slow("parity")
def test_two_processes_and_a_million_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PLANNED_TOKENS", 1 << 20)
    monkeypatch.setattr(exchange, "PLANNED_RANKS", 64)
    assert main(["bench", "exchange", "--ranks", "2", "--json", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    assert "1,048,576 tokens on 64 ranks" in printed
    result = json.loads((tmp_path / "a.json").read_text())
    dilated = next(row for row in result["counted"] if row["pattern"] == "dilated")
    assert 0 < dilated["needed"] == dilated["forward"] == dilated["backward"] < dilated["all_keys"]
    planned, local = result["planned"], (1 << 20) // 64
    # A rank's queries in segments longer than a shard see at most 2,048 rows per head and branch.
    longer = [w for w in exchange.LONGNET.segment_lengths if w > local]
    assert 0 < planned["max_rows"] <= 12 * 2048 * len(longer)
    assert planned["imbalance"] < 1.1


def test_remote_rows_on_64_ranks_equal_brute_force_over_the_mask() -> None:
    """16,384 tokens, of which each rank holds 256."""
    pattern = Dilated((512, 2048, 8192, 32768), (1, 4, 16, 64))
    shards, heads = Shards.even(1 << 14, 64), Heads(4, 2)
    keys = torch.arange(shards.tokens)
    for rank in (1, 37, 63):
        local = shards.local_range(rank)
        for key_head, rows in enumerate(remote_rows(pattern, shards, rank, heads, True)):
            counts = sum(
                pattern.counts(shards.positions(rank), keys, head)
                for head in heads.query_heads(key_head)
            )
            seen = (counts * (keys <= shards.positions(rank)[:, None])).any(0)  # type: ignore[union-attr]
            assert rows.tolist() == keys[seen & (keys < local.start)].tolist()


@pytest.mark.parametrize("fault", ["missing", "repeated", "extra"])
def test_a_wrong_exchange_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        first, *others = remote_rows(*arguments)  # type: ignore[arg-type]
        if len(first):
            changed = {
                "missing": first[1:],
                "repeated": torch.cat([first[:1], first]),
                "extra": torch.cat([first[:1] - 1, first]),
            }
            first = changed[fault]
        return (first, *others)

    case = Dilated((8, 64), (1, 4)), Shards.even(64, 4), Heads(4, 4)
    assert plan_all_ranks(*case).max_rows == 4 * 12
    monkeypatch.setattr(exchange, "remote_rows", wrong)
    with pytest.raises(AssertionError):
        plan_all_ranks(*case)


def test_load_imbalance_counts_the_pairs_of_each_rank() -> None:
    pattern, shards = Dilated((8, 64), (1, 4)), Shards.even(64, 4)
    work = []
    for rank in range(4):
        queries, keys = shards.positions(rank), torch.arange(64)
        counts = [
            pattern.counts(queries, keys, head) * (keys <= queries[:, None]) for head in range(4)
        ]
        work.append(int(torch.stack(counts).sum()))
    assert load_imbalance(pattern, shards, Heads(4, 4)) == max(work) / (sum(work) / 4)


def test_too_few_ranks_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", "--ranks", "1"]) == 2
    assert "--ranks must be at least 2 each, got 1" in capsys.readouterr().err
