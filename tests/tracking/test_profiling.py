"""The profiler: which steps, which files, no other results; snapshots of CUDA's memory."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longspan
from longspan.config import Profile, Track
from longspan.device import resolve
from longspan.errors import UserError
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.tracking import profiling, read_metrics
from longspan.tracking.profiling import Profiler
from longspan.tracking.trace import FOLDER, Summary, read_summary
from longspan.training import train
from tests.harness import Ranks

SMALL = [
    "model.hidden=32",
    "model.heads=2",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.warmup_steps=1",
    "train.eval_samples=1",
    "train.device=cpu",
    "track.log_every=1",
    "track.prompt=",
]
PROFILED = ["track.profile.wait=1", "track.profile.active=2"]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / FOLDER).iterdir())


def profiled(run_dir: Path) -> Summary:
    summary = read_summary(run_dir)
    assert summary is not None
    return summary


def check_trace(path: Path) -> dict[str, Any]:
    """Check a trace against the Trace Event Format, as far as viewers need it."""
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    assert trace["schemaVersion"] == 1
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in "XMifs"
        assert {"pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] > 0
        assert event["ph"] != "X" or event["dur"] >= 0
    return trace


def operators(trace: dict[str, Any]) -> set[str]:
    """All of a trace: which ten take the most time differs from one machine to the next."""
    return {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}


def test_a_profiled_run_computes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(None, [*SMALL, "train.steps=6"])
    train(run, tmp_path / "plain")
    profile = load_run(None, [*SMALL, *PROFILED, "train.steps=6"])
    capsys.readouterr()
    train(profile, tmp_path / "profiled")
    losses = [
        [line.get("loss") for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("plain", "profiled")
    ]
    assert losses[0] == losses[1]
    for file in ("model-00000.safetensors", "optimizer-00000.safetensors"):
        path = Path("checkpoints", "step-00000006", file)
        assert (tmp_path / "plain" / path).read_bytes() == (
            tmp_path / "profiled" / path
        ).read_bytes()
    assert not (tmp_path / "plain" / FOLDER).exists()

    trace = "rank0.4.pt.trace.json.gz"
    assert names(tmp_path / "profiled") == [trace, "rank0.json", "summary.json"]
    summary = profiled(tmp_path / "profiled")
    (rank,) = summary.ranks
    assert [step.step for step in rank.steps] == [3, 4]
    for step in rank.steps:
        parts = (step.compute_s, step.exposed_communication_s, step.exposed_copy_s, step.idle_s)
        assert sum(parts) == pytest.approx(step.wall_s)
        assert step.compute_s > 0
    assert f"profile of steps 3 to 4 in {tmp_path / 'profiled' / FOLDER}" in capsys.readouterr().err

    from torch._inductor.analysis.profile_analysis import JsonProfile  # torch's own reader

    path = tmp_path / "profiled" / FOLDER / trace
    assert "aten::mm" in operators(check_trace(path))
    (tmp_path / "trace.json").write_bytes(gzip.decompress(path.read_bytes()))
    events = JsonProfile(str(tmp_path / "trace.json")).events
    assert sum(event["name"].startswith("ProfilerStep#") for event in events) == 2
    # TensorBoard's plugin takes a name for WORKER.NUMBER.pt.trace.json.gz, the number digits.
    assert trace.split(".", 2) == ["rank0", "4", "pt.trace.json.gz"]


def test_a_resumed_run_is_profiled_again(tmp_path: Path) -> None:
    profile = load_run(None, [*SMALL, *PROFILED, "train.steps=4"])
    train(profile, tmp_path / "run")
    train(load_run(None, [*SMALL, *PROFILED, "train.steps=9"]), tmp_path / "run", resume=True)
    (rank,) = profiled(tmp_path / "run").ranks
    assert [step.step for step in rank.steps] == [7, 8]
    assert {f"rank0.{step}.pt.trace.json.gz" for step in (4, 8)} < set(names(tmp_path / "run"))


def test_a_trainer_is_profiled(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)

    tables = {
        "train": {"steps": 3, "warmup_steps": 0, "device": "cpu"},
        "track": {"profile": {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}},
    }
    data = list(torch.randn(8, 4))
    longspan.Trainer(nn.Linear(4, 4), loss, data, run=tables, run_dir=tmp_path / "run").train()
    (rank,) = profiled(tmp_path / "run").ranks
    assert [step.step for step in rank.steps] == [2]
    (trace,) = (tmp_path / "run" / FOLDER).glob("*.pt.trace.json.gz")
    assert "aten::addmm" in operators(check_trace(trace))


def train_profiled(rank: int, world: int, run_dir: str) -> None:
    overrides = [*SMALL, *PROFILED, "train.steps=6", "train.global_batch=2", "layout.shard=2"]
    run = load_run(None, overrides, world=world)
    train(run, run_dir, world=World(rank, world, rank))


def test_two_ranks_write_traces_and_rank_0_joins_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(train_profiled, 2, str(tmp_path / "run"))
    summary = profiled(tmp_path / "run")
    assert [rank.rank for rank in summary.ranks] == [0, 1]
    for rank in summary.ranks:
        trace = check_trace(tmp_path / "run" / FOLDER / rank.traces[0])
        assert trace["distributedInfo"]["rank"] == rank.rank
        events = [
            event
            for event in trace["traceEvents"]
            if re.match("gloo:|c10d::|_c10d_functional::", event["name"])
        ]
        collectives = [event["dur"] * 1e-6 for event in events]
        total = sum(step.communication_s for step in rank.steps)
        # A start or end in float64 microseconds, for those that do not overlap with any other.
        rounding = 2e-6 * len(events) * math.ulp(max(event["ts"] for event in events))
        assert rounding < 1e-6, "too coarse to tell"
        assert max(collectives) - rounding <= total <= sum(collectives) + rounding
        for step in rank.steps:
            assert 0 <= step.exposed_communication_s <= step.communication_s <= step.wall_s
    assert summary.findings[0].startswith("A step takes ")
    assert "on 2 ranks" in summary.findings[0]
    assert summary.findings[1].startswith("Communication takes ")


def profiler(run_dir: Path, profile: Profile, **more: Any) -> Profiler:
    options = {"rank": 0, "world": 1, "show": lambda text: None, **more}
    return Profiler(run_dir, Track(profile=profile), torch.device("cpu"), **options)


def work() -> None:
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def test_cycles_repeat(tmp_path: Path) -> None:
    shown: list[str] = []
    schedule = Profile(wait=1, warmup=1, active=2, repeat=2)
    with profiler(tmp_path, schedule, show=shown.append) as found:
        for step in range(11, 21):
            work()
            found.step(step)
    (rank,) = profiled(tmp_path).ranks
    assert [step.step for step in rank.steps] == [13, 14, 17, 18]
    assert rank.traces == ["rank0.14.pt.trace.json.gz", "rank0.18.pt.trace.json.gz"]
    (mm,) = [operator for operator in rank.by_time if operator.name == "aten::mm"]
    assert mm.calls == 4
    assert len(shown) == 2


def test_a_run_that_ends_early_has_the_steps_that_it_completed(tmp_path: Path) -> None:
    with profiler(tmp_path, Profile(wait=0, warmup=0, active=5)) as found:
        for step in (1, 2):
            work()
            found.step(step)
        work()
    (rank,) = profiled(tmp_path).ranks
    assert [step.step for step in rank.steps] == [1, 2]
    (mm,) = [operator for operator in rank.by_time if operator.name == "aten::mm"]
    assert mm.calls == 2


def test_a_run_that_ends_before_the_cycle_says_so(tmp_path: Path) -> None:
    shown: list[str] = []
    with profiler(tmp_path, Profile(wait=3, active=2), show=shown.append) as found:
        found.step(1)
    assert shown == ["no step was profiled: the run has ended in the wait of track.profile"]


def test_a_run_that_fails_writes_no_trace(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank0.json").write_text("of an earlier start")

    def fail() -> None:
        with profiler(tmp_path, Profile(wait=0, warmup=0, active=5)) as found:
            work()
            found.step(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == []
    with profiler(tmp_path, Profile(wait=0, warmup=0, active=1)) as p:  # the profiler is free again
        p.step(1)
    assert read_summary(tmp_path) is not None


def test_a_disk_error_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    with profiler(tmp_path, Profile(wait=0, warmup=0, active=1)) as found:
        found.step(1)
        found.step(2)
    assert f"cannot write {tmp_path / FOLDER}: " in capsys.readouterr().err


def test_profiling_is_off_by_default(tmp_path: Path) -> None:
    with profiler(tmp_path, Profile()) as found:
        found.step(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("track.profile.wait=2", "track.profile.active  0 profiles no step"),
        ("track.profile.active=9", "takes 15 steps, (wait + warmup + active) × repeat"),
        ("track.profile.activ=2", "track.profile.activ  unknown key; did you mean active?"),
        ("track.profile.repeat=0", "track.profile.repeat  expected at least 1, got 0"),
        ("track.profile=3", "track.profile  expected a table [track.profile], got 3"),
    ],
)
def test_refusals(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_run(None, ["train.steps=14", "train.warmup_steps=1", override])


def test_a_memory_snapshot_on_a_cpu_is_refused_by_name() -> None:
    run = load_run(None, ["track.memory_snapshot=true"])
    with pytest.raises(UserError, match=r"track\.memory_snapshot = true needs a CUDA GPU"):
        resolve(run, torch.device("cpu"))


def test_when_memory_snapshots_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written when, without CUDA; the test below opens real snapshots."""
    calls: list[str] = []
    monkeypatch.setattr(
        profiling, "record_memory_history", lambda *, enabled: calls.append(enabled)
    )
    monkeypatch.setattr(profiling, "write_memory_snapshot", lambda path: calls.append(path.name))

    def run(profile: Profile, error: Exception | None) -> list[str]:
        calls.clear()
        track, device = Track(profile=profile, memory_snapshot=True), torch.device("cpu")
        options: Any = {"rank": 3, "world": 4, "show": lambda text: None}
        found = Profiler(tmp_path, track, device, **options).__enter__()
        found.step(1)
        found.step(2)
        found.__exit__(type(error) if error else None, error, None)
        return list(calls)

    after = "memory-rank3.pickle"
    assert run(Profile(), None) == [True, after, False]
    assert run(Profile(wait=0, warmup=0, active=1), None) == [True, after, False]
    assert run(Profile(), torch.OutOfMemoryError()) == [True, "out-of-memory-rank3.pickle", False]
    assert run(Profile(), RuntimeError()) == [True, False]


@pytest.mark.gpu
def test_memory_snapshots_open_in_torch(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    device = torch.device("cuda", 0)
    track = Track(profile=Profile(wait=0, warmup=0, active=1), memory_snapshot=True)
    options: Any = {"rank": 0, "world": 1, "show": lambda text: None}

    def run_out_of_memory() -> None:
        with Profiler(tmp_path, track, device, **options) as found:
            kept = torch.mm(*torch.ones(2, 512, 512, device=device))
            found.step(1)
            found.step(2)
            torch.empty(1 << 50, device=device)
            del kept

    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory()
    for name in ("memory-rank0.pickle", "out-of-memory-rank0.pickle"):
        snapshot = pickle.loads((tmp_path / FOLDER / name).read_bytes())  # noqa: S301
        assert "segments" in _memory_viz.segsum(snapshot)
        assert "<html>" in _memory_viz.trace_plot(snapshot, device=0)
        (events,) = (trace for trace in snapshot["device_traces"] if trace)
        frames = {frame["name"] for event in events for frame in event.get("frames", ())}
        assert "run_out_of_memory" in frames
        assert ("oom" in {event["action"] for event in events}) == name.startswith("out-of-memory")
    (rank,) = profiled(tmp_path).ranks
    assert rank.device == "cuda"
    assert rank.steps[0].compute_s > 0
    assert rank.steps[0].peak_bytes is not None
    assert "aten::mm" in [operator.name for operator in rank.by_time]
