"""Latency and bandwidth of collectives: the definitions, the fit, and the file that holds it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from longspan.errors import UserError
from longspan.planning.network import BUS_FACTORS, fit_collective, read_network, ring_bound_s

SIZES = [1024 * 4**n for n in range(11)]


def test_bus_factors_are_those_of_nccl_tests() -> None:
    """By hand for 4 ranks: an all-reduce sends 2·3/4 of the data over each link of a ring."""
    assert {name: factor(4) for name, factor in BUS_FACTORS.items()} == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
        "send_recv": 1.0,
    }


def test_the_bound_of_a_ring() -> None:
    """1 GB over 8 ranks at 50 GB/s: 2 · 7 / 8 / 50 s."""
    assert ring_bound_s(10**9, 8, 50e9) == pytest.approx(0.035)


@pytest.mark.parametrize(("alpha", "bandwidth"), [(20e-6, 200e9), (5e-3, 1e9), (0.0, 1e10)])
def test_the_fit_finds_latency_and_bandwidth(alpha: float, bandwidth: float) -> None:
    """Times with 2% of noise, and two sizes of eleven disturbed by a factor of five."""
    rng = random.Random(1)
    times = [(alpha + 1.5 * size / bandwidth) * rng.uniform(0.98, 1.02) for size in SIZES]
    times[2] *= 5
    times[7] *= 5
    fit = fit_collective("all_reduce", 4, SIZES, times)
    assert fit is not None
    assert fit.bandwidth == pytest.approx(bandwidth, rel=0.03)
    assert fit.alpha_s == pytest.approx(alpha, rel=0.03, abs=1e-8)
    assert fit.seconds(SIZES[5]) == pytest.approx(alpha + 1.5 * SIZES[5] / bandwidth, rel=0.03)
    assert fit.error < 0.03


def test_what_does_not_determine_both_gives_no_fit() -> None:
    assert fit_collective("broadcast", 2, [1024], [1e-3]) is None
    assert fit_collective("broadcast", 2, [1024, 4096], [2e-3, 1e-3]) is None  # falls with the size


def result(**changes: Any) -> dict[str, Any]:
    fit = {"collective": "all_reduce", "ranks": 4, "alpha_s": 2e-5, "bus_gb_s": 200.0, "error": 0.1}
    return {
        "machine": "m",
        "setting": {"ranks": 4, "backend": "nccl"},
        "fits": [fit | changes.pop("fit", {})],
    } | changes


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    file.write_text(json.dumps(result()))
    network = read_network(file)
    assert (network.machine, network.backend, network.ranks) == ("m", "nccl", 4)
    # 1 GB: 1.5 of it over a link of 200 GB/s, and 20 us
    assert network.fits["all_reduce"].seconds(10**9) == pytest.approx(0.0075 + 2e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        (json.dumps({"rows": []}), "expected setting.backend"),
        (json.dumps(result(setting={"backend": "gloo", "ranks": 1})), "setting.ranks of at least"),
        (json.dumps(result(fits={})), "expected fits, a list"),
        (json.dumps(result(fit={"collective": "scan"})), "expected a fit of one of send_recv"),
        (json.dumps(result(fit={"ranks": 8})), "one fit of all_reduce on 4 ranks"),
        (json.dumps(result(fit={"bus_gb_s": 0})), "bus_gb_s above 0"),
        (json.dumps(result(fit={"alpha_s": -1})), "bus_gb_s above 0"),
        (json.dumps(result(fit={"alpha_s": float("nan")})), "bus_gb_s above 0"),
        (json.dumps(result(fit={"error": "low"})), "bus_gb_s above 0"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "network.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_network(file)
    with pytest.raises(UserError, match="cannot read"):
        read_network(tmp_path / "none.json")
