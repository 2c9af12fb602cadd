"""What `longspan bench exchange` counts and checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.attention import Dilated, Heads, Shards
from longspan.attention.context_parallel.kv_exchange import outer_rows
from longspan.benchmarks import exchange
from longspan.benchmarks.exchange import balance, plan_everywhere
from longspan.cli import main


def test_a_billion_tokens_and_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "exchange", "--ranks", "2", "--json", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    assert "1,073,741,824 tokens on 1,024 ranks" in printed
    result = json.loads((tmp_path / "a.json").read_text())
    dilated = next(row for row in result["counted"] if row["pattern"] == "dilated")
    assert 0 < dilated["seen"] == dilated["forward"] == dilated["backward"] < dilated["all_keys"]
    planned = result["planned"]
    assert planned["seconds"] < 60
    assert planned["balance"] < 1.1
    crossing = [w for w in exchange.LONGNET.segment_lengths if w > exchange.BILLION // 1024]
    assert 0 < planned["most_rows"] <= 12 * 2048 * len(crossing)


@pytest.mark.parametrize("fault", ["missing", "twice", "needless"])
def test_a_wrong_plan_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> tuple[torch.Tensor, ...]:
        first, *others = outer_rows(*arguments)  # type: ignore[arg-type]
        if len(first):
            changed = {
                "missing": first[1:],
                "twice": torch.cat([first[:1], first]),
                "needless": torch.cat([first[:1] - 1, first]),
            }
            first = changed[fault]
        return (first, *others)

    case = Dilated((8, 64), (1, 4)), Shards.even(64, 4), Heads(4, 4)
    assert plan_everywhere(*case).most_rows == 4 * 12
    monkeypatch.setattr(exchange, "outer_rows", wrong)
    with pytest.raises(AssertionError):
        plan_everywhere(*case)


def test_balance_counts_the_pairs_of_each_rank() -> None:
    pattern, shards = Dilated((8, 64), (1, 4)), Shards.even(64, 4)
    work = []
    for rank in range(4):
        queries, keys = shards.positions(rank), torch.arange(64)
        counts = [
            pattern.counts(queries, keys, head) * (keys <= queries[:, None]) for head in range(4)
        ]
        work.append(int(torch.stack(counts).sum()))
    assert balance(pattern, shards, Heads(4, 4)) == max(work) / (sum(work) / 4)


def test_too_few_ranks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", "--ranks", "1"]) == 2
    assert "--ranks must be at least 2 each, got 1" in capsys.readouterr().err
