"""`longspan bench collectives`: what each call computes, on real processes, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

from longspan.benchmarks import collectives
from longspan.benchmarks.collectives import Row, Unsupported, call_of, measure_all, sizes_up_to
from longspan.cli import main
from longspan.cli.bench_parallel import parse_bytes
from longspan.planning.network import BUS_FACTORS, read_network
from tests.harness import Ranks
from tests.slow import slow

CPU = torch.device("cpu")


def results(rank: int, world: int) -> dict[str, list[float]]:
    return {name: call_of(name, 2 * world, CPU)().tolist() for name in BUS_FACTORS}


def test_each_call_is_the_collective_of_its_name(ranks: Ranks) -> None:
    """Three ranks hold 1, 2 and 3; of an all-to-all the receiver's number is in the hundreds."""
    found = ranks.run(results, 3)
    assert [each["send_recv"] for each in found] == [[3.0] * 6, [1.0] * 6, [2.0] * 6]
    assert [each["broadcast"] for each in found] == [[1.0] * 6] * 3
    assert [each["all_gather"] for each in found] == [[1, 1, 2, 2, 3, 3]] * 3
    assert [each["reduce_scatter"] for each in found] == [[6.0, 6.0]] * 3
    assert [each["all_reduce"] for each in found] == [[6.0] * 6] * 3
    assert found[1]["all_to_all"] == [101, 101, 102, 102, 103, 103]


def measured(rank: int, world: int) -> list[Row | Unsupported]:
    def lacks(*_: object) -> None:
        raise RuntimeError("ProcessGroup does not support reduce_scatter\nstack")

    with patch.multiple(collectives, BLOCK_S=0.0, _reduce_scatter=lacks):
        return list(measure_all([1024, 4096], CPU))


def test_rates_follow_from_times_and_what_a_backend_lacks_is_said(ranks: Ranks) -> None:
    first, second = ranks.run(measured, 2)
    assert first == second  # the time of the slowest rank, on both
    assert Unsupported("reduce_scatter", "ProcessGroup does not support reduce_scatter") in first
    rows = [row for row in first if isinstance(row, Row)]
    assert {row.collective for row in rows} == BUS_FACTORS.keys() - {"reduce_scatter"}
    assert [row.bytes for row in rows] == [1024, 4096] * 5
    link = max(row.busbw_gb_s for row in rows if row.collective == "send_recv")
    for row in rows:
        assert row.algbw_gb_s == pytest.approx(row.bytes / row.time_ms / 1e6)
        half = row.collective in ("all_gather", "all_to_all")  # of 2 ranks: 1/2, and else 1
        assert row.busbw_gb_s == pytest.approx(row.algbw_gb_s / (2 if half else 1))
        if row.collective == "all_reduce":
            assert row.ring_bound_ms == pytest.approx(row.bytes / link / 1e6)
        else:
            assert row.ring_bound_ms is None


@slow("parity")
def test_two_processes_measure_and_the_planner_reads_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    options = ["--nproc", "2", "--max-bytes", "64K", "--device", "cpu", *files]
    assert main(["bench", "collectives", *options]) == 0
    printed = capfd.readouterr().out
    assert "2 ranks, gloo" in printed
    content: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    assert len(content["rows"]) == 4 * len(BUS_FACTORS)
    assert content["unsupported"] == []
    network = read_network(tmp_path / "a.json")
    assert (network.backend, network.ranks) == ("gloo", 2)
    assert len(network.fits) == len(content["fits"])
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


def test_sizes() -> None:
    assert sizes_up_to(16 << 10) == [1024, 4096, 16384]
    assert sizes_up_to(5000) == [1024, 4096, 5000]
    assert len(sizes_up_to(1 << 30)) == 11
    assert [parse_bytes(text) for text in ("4096", "64K", "16m", "1GiB")] == [
        4096, 65536, 16 << 20, 1 << 30,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "1"], "--nproc must be at least 2, got 1"),
        (["--nproc", "0"], "--nproc must be at least 2, got 0"),
        (["--max-bytes", "lots"], "--max-bytes must be a size such as 64M or 1G, got 'lots'"),
        (["--max-bytes", "1"], "--max-bytes must be at least 1024, got 1"),
        (["--json", "none/a.json"], "cannot write none/a.json"),
        (["--plot", "none/a.svg"], "cannot write none/a.svg"),
    ],
)
def test_invalid_arguments_are_refused_before_processes_start(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "collectives", *options]) == 2
    assert message in capsys.readouterr().err
