"""What ranks measure of themselves, gathered: the statistics, and the slowest rank."""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from longspan.config import Layout, Run
from longspan.data import Prefetcher
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.tracking import nvml, read_metrics
from longspan.tracking.console import format_metrics
from longspan.tracking.nvml import Clocks, ClockSampler, GpuSensors
from longspan.training import rank_stats, train
from longspan.training.rank_stats import NAMES, RankStats, combine
from tests.harness import Ranks
from tests.training.test_loop import SMALL

CPU = torch.device("cpu")


def values(**given: float) -> list[float]:
    return [given.get(name, math.nan) for name in NAMES]


def test_the_statistics_of_two_ranks_are_right_and_the_slow_one_is_named() -> None:
    line = combine(
        [
            values(step_time_s=1.0, data_wait_s=0.1, memory_bytes=5.0, gpu_power_w=300.0),
            values(step_time_s=1.2, data_wait_s=0.7, memory_bytes=9.0),
        ]
    )
    assert line == {
        "step_time_s": 1.1,
        "step_time_s_min": 1.0,
        "step_time_s_max": 1.2,
        "data_wait_s": pytest.approx(0.4),
        "data_wait_s_min": 0.1,
        "data_wait_s_max": 0.7,
        "memory_bytes": 9,
        "memory_bytes_min": 5,
        "memory_bytes_max": 9,
        "gpu_power_w": 300.0,
        "gpu_power_w_min": 300.0,
        "gpu_power_w_max": 300.0,
        "slowest_rank": 1,
        "slowest_in": "data",
    }
    row = format_metrics({**line, "loss": 1.0, "tokens_per_s": 2.0})
    assert row.endswith("rank 1 is slow (data)")


def test_one_process_has_neither_extremes_nor_a_slowest_rank() -> None:
    line = combine([values(step_time_s=1.0, data_wait_s=0.9)])
    assert line == {"step_time_s": 1.0, "data_wait_s": 0.9}


@pytest.mark.parametrize(
    ("name", "times", "slowest"),
    [
        ("data_wait_s", (0.0, 0.1, 0.0), None),  # 10% of a step is not worth a word
        ("data_wait_s", (0.3, 0.3, 0.3), None),  # all alike
        ("forward_time_s", (0.3, 0.3, 0.5), (2, "forward pass")),
        ("matmul_time_s", (0.002, 0.001, 0.001), (0, "device")),  # twice the others': a step more
        ("matmul_time_s", (0.0011, 0.001, 0.001), None),
    ],
)
def test_a_rank_is_named_if_it_makes_steps_much_longer(
    name: str, times: tuple[float, ...], slowest: tuple[int, str] | None
) -> None:
    line = combine([values(step_time_s=1.0, **{name: x}) for x in times])
    found = (line["slowest_rank"], line["slowest_in"]) if "slowest_rank" in line else None
    assert found == slowest


def gather_different(rank: int, world: int, layout: dict[str, int]) -> dict[str, Any]:
    now = 0.0
    with (
        open_mesh(Layout(**layout), World(rank, world, rank), CPU) as mesh,
        patch.object(rank_stats, "time_matmul", lambda device: 0.001),
        patch.object(rank_stats, "time", SimpleNamespace(perf_counter=lambda: now)),
    ):
        stats = RankStats(mesh, CPU)
        for _ in range(2):
            with stats.forward_context(nullcontext)():
                now += 0.25 * rank
        first = stats.gather(2, 4.0 + rank, 1.0 + 2 * rank, {"memory_parameters_bytes": 7 + rank})
        second = stats.gather(1, 2.0, 1.0 + 2 * rank, {})
        assert (second["data_wait_s"], second["step_time_s"]) == (0.0, 2.0)  # it starts anew
        return first


def test_two_processes_gather_what_each_has_measured(ranks: Ranks) -> None:
    first, second = ranks.run(gather_different, 2, {"replicate": 2})
    assert first == second
    assert (first["step_time_s"], first["step_time_s_min"], first["step_time_s_max"]) == (
        2.25,
        2.0,
        2.5,
    )
    assert (first["data_wait_s"], first["data_wait_s_max"]) == (1.0, 1.5)
    assert (first["memory_parameters_bytes"], first["memory_parameters_bytes_min"]) == (8, 7)
    assert (first["slowest_rank"], first["slowest_in"]) == (1, "data")
    assert (first["forward_time_s_min"], first["forward_time_s_max"]) == (0.0, 0.25)
    assert first["matmul_time_s"] == 0.001
    # Under FSDP a forward pass has collectives in it, and tells nothing of one rank.
    assert "forward_time_s" not in ranks.run(gather_different, 2, {"shard": 2})[0]


class SlowPrefetcher(Prefetcher):
    """Says that it took an hour for each sample."""

    def _await(self, *arguments: Any) -> Any:
        self.waited_s += 3600.0
        return super()._await(*arguments)


def train_with_slow_data(rank: int, world: int, run: Run, folder: str) -> None:
    slow = patch("longspan.training.decoder_task.Prefetcher", SlowPrefetcher)
    with slow if rank == 1 else nullcontext():
        train(run, folder, world=World(rank, world, rank))


@pytest.mark.parametrize("layout", ["layout.replicate=2", "layout.shard=2"])
def test_a_run_names_the_rank_whose_data_is_slow(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    options = ["train.steps=4", "train.global_batch=2", "track.log_every=2", layout]
    options.append("track.per_layer_norms=true")
    run = load_run(None, [*SMALL, *options], world=2)
    ranks.run(train_with_slow_data, 2, run, str(tmp_path / "run"))
    lines = [x for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in x]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[-1]["data_wait_s_max"] >= 3600 > lines[-1]["data_wait_s_min"]
    assert (lines[-1]["slowest_rank"], lines[-1]["slowest_in"]) == (1, "data")
    assert lines[-1]["memory_parameters_bytes"] > 0
    for name in ("grad_norms", "param_norms"):
        assert {"embedding", "blocks.0", "blocks.1"} < lines[-1][name].keys()
    squares = sum(norm**2 for norm in lines[-1]["grad_norms"].values())
    assert squares**0.5 == pytest.approx(lines[-1]["grad_norm"], rel=1e-5)


def test_nvml_is_read_where_it_is_and_absent_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_power(*_: object) -> int:
        raise RuntimeError("not supported")

    asked = []
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or "handle",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97),
        nvmlDeviceGetTemperature=lambda handle, sensor: 61 + sensor,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetPowerUsage=lambda handle: 350_500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    expected = {"gpu_utilization": 97, "gpu_temperature_c": 61, "gpu_power_w": 350.5}
    assert GpuSensors("12ab").read() == expected
    assert asked == ["GPU-12ab"]
    fake.nvmlDeviceGetPowerUsage = no_power
    assert GpuSensors("12ab").read().keys() == expected.keys() - {"gpu_power_w"}
    fake.nvmlInit = no_power
    assert GpuSensors("12ab").read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert GpuSensors("12ab").read() == {}
    assert GpuSensors(None).read() == {}


def test_clocks_are_sampled_while_the_power_limit_slows_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([(7, 0), (1980, 0), *[(1500, 4 | 32)] * 10_000])
    now, asked = [0, 0], list[object]()

    def clock(_handle: object, _kind: int) -> int:
        now[:] = next(readings)
        if len(asked) == 1:
            raise RuntimeError("not now")  # which is left out
        return now[0]

    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: asked.append(handle) or 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 690_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: now[1],
        nvmlClocksThrottleReasonSwPowerCap=4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "SAMPLE_S", 0.001)
    sampler = ClockSampler("12ab")
    deadline = time.monotonic() + 30
    while len(sampler._samples) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    sampler.stop()
    second = sampler._samples[1][0]
    assert sampler.since(second) == Clocks(1500, 1980, 690, 1.0)
    found = sampler.since(0.0)
    assert found is not None
    assert found.limited < 1
    assert sampler.since(second + 1e6) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    sampler = ClockSampler("12ab")
    sampler.stop()
    assert sampler.since(0.0) is None
