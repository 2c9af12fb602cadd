"""Summaries of traces: intervals, hand-made traces with known answers, torch's own figures."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from longspan.errors import UserError
from longspan.tracking import trace
from longspan.tracking.trace import Interval, RankSummary, StepTimes, summarise

MAIN, BACKGROUND, STREAM = 1, 2, 7


def span(name: str, start: float, end: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    tid = more.pop("tid", MAIN)
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, **times, "args": more}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return span(f"ProfilerStep#{number}", start, end, "user_annotation")


def kernel(name: str, start: float, end: float, id: int | None = None) -> dict[str, Any]:
    return span(name, start, end, "kernel", tid=STREAM, **{"External id": id})


def memory(at: float, count: int, total: int, device: int) -> dict[str, Any]:
    args = {"Bytes": count, "Total Allocated": total, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "pid": 9, "tid": MAIN, "ts": at, "args": args}


def random_intervals(generator: random.Random) -> list[Interval]:
    starts = [generator.randrange(30) for _ in range(generator.randrange(8))]
    return [(start, start + generator.randrange(6)) for start in starts]


def covered(intervals: list[Interval]) -> set[int]:
    return {at for start, end in intervals for at in range(int(start), int(end))}


def test_intervals_are_those_of_sets_of_points() -> None:
    generator = random.Random(0)
    for _ in range(500):
        a, b = random_intervals(generator), random_intervals(generator)
        joined, rest = trace.union(a), trace.difference(trace.union(a), trace.union(b))
        assert covered(joined) == covered(a)
        assert covered(rest) == covered(a) - covered(b)
        for found in (joined, rest):
            assert sum(end - start for start, end in found) == len(covered(found))
            assert found == sorted(found)
        window = (5.0, 17.0)
        assert trace.length(joined, window) == len(covered(a) & set(range(5, 17)))


GPU = [
    step(5, 0, 100),
    # two streams compute from 10 to 50; NCCL until 70 has 20 of its 30 after that; a copy follows
    kernel("gemm", 10, 40, 11),
    kernel("void (anonymous namespace)::add<float>(float*)", 30, 50),
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 40, 70, 12),
    span("Memcpy DtoH", 60, 80, "gpu_memcpy", tid=STREAM, **{"External id": 13}),
    span("aten::mm", 1, 3, **{"External id": 11}),
    span("record_param_comms", 3, 5, **{"External id": 12}),
    span("aten::copy_", 5, 9, **{"External id": 13}),
    span("aten::empty", 6, 8, **{"External id": 14}),
    memory(7, 512, 1512, 1),
    memory(7.5, 4096, 9999, 0),  # of the CPU
    memory(85, -512, 1000, 1),
    step(6, 100, 160),
    span("triton_poi_fused_add_0", 101, 102, **{"External id": 20}),
    kernel("triton_poi_fused_add_0", 120, 125, 20),
    kernel("gemm", 90, 130, 15),  # which the step of the CPU began before: 30 fall into step 6
    span("aten::mm", 88, 89, **{"External id": 15}),
    step(7, 160, 200),  # incomplete
    kernel("gemm", 160, 190, 16),
]


def test_a_gpu_trace_with_known_answers() -> None:
    found = summarise(GPU, [31, 32])
    assert found.device == "cuda"
    first, second = found.steps
    us = 1e-6
    assert first == StepTimes(
        31,
        *(pytest.approx(x * us) for x in (100, 50, 30, 20, 10, 20)),  # type: ignore[arg-type]
        peak_bytes=1512,
    )
    assert second == StepTimes(
        32,
        *(pytest.approx(x * us) for x in (60, 30, 0, 0, 0, 30)),  # type: ignore[arg-type]
        peak_bytes=None,
    )
    operators = found.operators
    assert operators["aten::mm"].self_s == pytest.approx((30 + 40) * us)
    assert operators["aten::mm"].calls == 2
    assert operators["void add<float>"].self_s == pytest.approx(20 * us)  # of no operator
    collective = operators["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
    assert (collective.calls, collective.self_s) == (1, pytest.approx(30 * us))
    assert operators["void add<float>"].calls == 1
    assert "gemm" not in operators  # of the incomplete step
    triton = operators["triton_poi_fused_add_0"]  # an operator and its kernel
    assert (triton.calls, triton.self_s) == (1, pytest.approx(5 * us))
    assert operators["aten::copy_"].bytes == 512  # allocated by aten::empty within it
    assert operators["aten::empty"].bytes == 0


CPU = [
    step(0, 0, 100),
    span("aten::linear", 10, 40),
    span("aten::addmm", 15, 35),
    memory(20, 100, 100, 0),
    memory(38, -30, 70, 0),
    memory(5, 7, 77, 0),  # outside of operators
    span("gloo:all_reduce", 30, 60, "user_annotation", tid=BACKGROUND),
    # autograd's node waits for the collective; only the operator in it computes
    span("autograd::engine::evaluate_function: SumBackward0", 40, 80),
    span("aten::add_", 70, 75),
    # a blocking collective within an operator computes before and after it
    span("longspan::exchange", 80, 96),
    span("_c10d_functional::wait_tensor", 84, 90),
]


def test_a_cpu_trace_with_known_answers() -> None:
    (found,) = summarise(CPU, [1]).steps
    us = 1e-6
    assert found.compute_s == pytest.approx((30 + 5 + 10) * us)
    assert found.communication_s == pytest.approx((30 + 6) * us)
    assert found.exposed_communication_s == pytest.approx((20 + 6) * us)
    assert found.idle_s == pytest.approx((10 + 10 + 5 + 4) * us)
    assert found.peak_bytes is None
    operators = summarise(CPU, [1]).operators
    assert operators["aten::linear"].self_s == pytest.approx(10 * us)
    assert operators["aten::linear"].bytes == -30
    assert operators["aten::addmm"].bytes == 100
    assert operators["gloo:all_reduce"].self_s == pytest.approx(30 * us)
    assert operators["longspan::exchange"].self_s == pytest.approx(10 * us)


def test_a_step_of_graphs_has_no_peak_and_is_named() -> None:
    launch = span("cudaGraphLaunch", 3, 5, "cuda_runtime")
    events = [step(0, 0, 100), launch, kernel("gemm", 10, 60), memory(5, 4, 4, 1)]
    events += [step(1, 100, 200), kernel("gemm", 110, 160), memory(105, 4, 8, 1)]
    found = summarise(events, [1, 2])
    assert [each.peak_bytes for each in found.steps] == [None, 8]
    summary = trace.summarise_run([trace.summarise_rank(0, {"t": found})], 1)
    assert any(said.startswith("CUDA graphs were launched") for said in summary.findings)
    launched = summarise([event for event in events if event is not launch], [1, 2])
    summary = trace.summarise_run([trace.summarise_rank(0, {"t": launched})], 1)
    assert not any("CUDA graphs" in said for said in summary.findings)


def test_operators_have_the_times_and_bytes_of_torch(tmp_path: Path) -> None:
    # key_averages is torch's own reading of the same events
    weight = torch.randn(64, 64, requires_grad=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(tmp_path / "trace.json")),
        profile_memory=True,
    ) as profiler:
        for _ in range(3):
            (torch.randn(32, 64) @ weight).softmax(-1).square().sum().backward()
            profiler.step()
    found = summarise(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], [2, 3])
    expected = {average.key: average for average in profiler.key_averages()}
    assert {"aten::mm", "aten::_softmax", "aten::normal_"} <= found.operators.keys()
    for name, operator in found.operators.items():
        assert operator.calls == expected[name].count
        assert operator.self_s == pytest.approx(expected[name].self_cpu_time_total * 1e-6, abs=2e-6)
    # An operator that calls an allocator has what that allocates, so only their sum is torch's.
    total = sum(expected[name].self_cpu_memory_usage for name in found.operators)
    assert sum(operator.bytes for operator in found.operators.values()) == total > 0
    assert found.operators["aten::mm"].bytes == expected["aten::mm"].self_cpu_memory_usage


def rank_of(rank: int, *steps: StepTimes) -> RankSummary:
    parts = summarise(CPU, [1])
    return trace.summarise_rank(rank, {f"rank{rank}": replace(parts, steps=list(steps))})


def test_the_summary_says_what_stands_out() -> None:
    fast = StepTimes(1, 1.0, 0.5, 0.4, 0.3, 0.0, 0.2, None)
    slow = StepTimes(1, 1.0, 0.8, 0.2, 0.0, 0.0, 0.2, None)
    late = replace(fast, step=2, wall_s=2.0, compute_s=0.2, idle_s=1.5)
    even = trace.summarise_run([rank_of(0, fast), rank_of(1, fast)], 2)
    assert even.findings[:2] == [
        "A step takes 1.00 s (mean of 1 step on 2 ranks): 50.0% compute, 30.0% exposed "
        "communication, 20.0% idle.",
        "Communication takes 400 ms of a step, waiting for other ranks included; 25% of it "
        "overlaps with compute.",
    ]
    assert even.findings[2].startswith(
        "Compute waits for communication in 30% of a step (on rank 0 longest in gloo:all_reduce): "
    )
    uneven = str(trace.summarise_run([rank_of(0, fast), rank_of(1, slow)], 3))
    assert "Rank 1 computes longest, 800 ms of a step; rank 0 computes 500 ms" in uneven
    assert "Only 2 of 3 ranks have written a profile." in uneven
    assert "operators by time, rank 1" in uneven
    assert "gloo:all_reduce" in uneven
    varying = str(trace.summarise_run([rank_of(0, fast, late)], 1))
    assert "Step 2 took 2.00 s, the others at most 1.00 s" in varying
    assert "no operator runs: that is time of Python, data and files" in varying


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert trace.read_summary(tmp_path) is None
    summary = trace.summarise_run([rank_of(0, *summarise(GPU, [3, 4]).steps)], 1)
    path = tmp_path / trace.FOLDER / trace.SUMMARY
    path.parent.mkdir()
    path.write_text(json.dumps(summary.as_dict()))
    assert trace.read_summary(tmp_path) == summary
    path.write_text('{"version": 1, "device": "cpu", "findings": [], "ranks": [{"rank": "a"}]}')
    with pytest.raises(UserError, match=r"ranks\.0\.rank"):
        trace.read_summary(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.345, "12.3 s"), (1.0, "1.00 s"), (0.12, "120 ms"), (0.00305, "3.05 ms"), (3e-4, "300 µs")],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert trace.seconds(value) == text
