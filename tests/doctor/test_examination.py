"""The frame of the doctor: two healthy ranks, time limits, one table, exit codes; NCCL's names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.cli import main
from longspan.config import AXES
from longspan.doctor import Finding, Report, devices, examine, step
from longspan.doctor.devices import check_health
from longspan.doctor.disk import checkpoints_kept
from longspan.doctor.examination import Examination
from longspan.doctor.finding import join_findings, ranks_text
from longspan.doctor.meeting import Meeting
from longspan.doctor.rates import best_time
from longspan.doctor.step import dry_run
from longspan.doctor.variables import (
    ADVICE,
    CURRENT,
    RENAMED,
    check_interfaces,
    check_variables,
)
from longspan.loopback import STORE, loopback_only
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.doctor.test_faults import SMALL
from tests.harness import Ranks
from tests.test_docs import ROOT

PAGE = ROOT / "docs" / "doctor.md"


def examine_rank(rank: int, world: int, folder: str, overrides: list[str]) -> dict[str, Any] | None:
    """What the command does on one of two ranks, which meet in a file."""
    dist.destroy_process_group()
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, STORE: f"{folder}/store"}
    environment = {name: str(value) for name, value in variables.items()}
    loopback_only(environment)
    with patch.dict(os.environ, environment):
        run = load_run(None, [*SMALL, "layout.shard=2", *overrides], world=world)
        report, has_hung = examine(run, Path(folder, "runs"), World(rank, world, rank))
    assert not has_hung
    store = dist.FileStore(f"{folder}/next", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)  # the harness's
    return report and report.as_dict()


def test_two_ranks_are_examined_together(ranks: Ranks, tmp_path: Path) -> None:
    report, nothing = ranks.run(examine_rank, 2, str(tmp_path), [])
    assert nothing is None
    found = {f["name"]: f for f in report["findings"]}
    errors = {name: f for name, f in found.items() if f["status"] == "error"}
    assert not errors
    assert found["ranks"]["seen"] == "all 2 ranks are here"
    assert found["device"]["ranks"] == [0, 1]  # one row
    assert found["all-reduce"]["seen"].endswith("GB/s bus bandwidth")
    assert re.match(r"loss \d\.\d+ after", found["one step"]["seen"])
    # Nothing is left, and what the docs show is what is printed, in its order.
    assert [path.name for path in tmp_path.iterdir() if "doctor" in path.name] == []
    assert not (tmp_path / "runs").exists()
    shown = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.S)
    assert shown
    lines = [line for line in shown[1].splitlines() if re.match(r"(ok|warning|error) ", line)]
    for line, finding in zip(lines, report["findings"], strict=True):
        assert line.split(None, 1)[1].startswith(finding["name"]), (line, finding)


def test_a_step_that_fails_is_a_finding(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def task(run):\n    raise MemoryError('no memory for the model')\n")
    run = load_run(None, ["model.factory=broken:task"])
    with patch.dict(os.environ, {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}):
        report, _ = examine(run, tmp_path / "runs", World())
    assert report
    (found,) = report.findings("one step")
    assert (found.status, "no memory for the model" in found.seen) == ("error", True)
    assert "not opened" in report.findings("data")[0].seen
    assert [path.name for path in tmp_path.iterdir() if "doctor" in path.name] == []


def test_a_signal_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *_: object) -> subprocess.Popen[bytes]:
        assert folder.parent == tmp_path
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        os.kill(os.getpid(), signal.SIGTERM)  # by a scheduler, or torchrun
        return started[0]

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(step, "_start", start)
    monkeypatch.setattr(os, "_exit", leave)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of pytest, if it is not caught
    try:
        assert main(["doctor", *SMALL, "--run-dir", str(tmp_path / "runs")]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "interrupted; nothing is left behind" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "GRACE_S", 0.0)
    meeting = Meeting(dist.HashStore(), World(1, 2, 0), 60.0)  # type: ignore[attr-defined]
    meeting.store.set("step/folder", json.dumps([str(tmp_path / "of rank 0"), {}]))
    (found,) = step.check_step(load_run(None, SMALL), tmp_path / "runs", meeting, {}, 60.0)
    assert (found.status, "is not on this machine" in found.seen) == ("error", True)
    assert meeting.store.check(["step/failed"])  # so that rank 0 does not wait for its limit


def test_the_dry_run_is_one_step_of_the_same_layout() -> None:
    overrides = ["train.global_batch=64", "train.schedule=wsd", "train.decay_steps=5"]
    overrides += ["track.profile.active=3", "layout.pipeline=2", "track.sinks=[]"]
    run = load_run(None, overrides, world=4)
    tried = dry_run(run, 4)
    assert tried.train.steps == 1
    assert tried.train.global_batch == 4  # two data-parallel ranks × two micro-batches
    assert {axis: getattr(tried.layout, axis) for axis in AXES} == run.layout.ranks()
    assert (tried.model, tried.data) == (run.model, run.data)


def test_no_check_hangs_or_raises(tmp_path: Path) -> None:
    exam = Examination(load_run(None, SMALL), tmp_path, World(), 0.05, print, torch.device("cpu"))
    release = threading.Event()

    def wait() -> list[Finding]:
        release.wait()
        return []

    def fail() -> list[Finding]:
        raise OSError("[/w/pytorch/pair.cc:152] the disk is on fire")

    exam.check("slow", wait)
    assert exam.has_hung
    exam.timeout_s = 60.0
    exam.check("broken", fail, advice="put it out")
    exam.check("fine", lambda: [Finding("fine", "ok", "well")])
    release.set()
    assert [(f.name, f.status) for f in exam.findings] == [
        ("slow", "error"),
        ("broken", "error"),
        ("fine", "ok"),
    ]
    assert "no answer within 0.05 s" in exam.findings[0].seen
    assert exam.findings[1].seen == "the check failed: the disk is on fire"
    assert exam.findings[1].advice == "put it out"


def test_findings_of_many_ranks_are_one_row() -> None:
    same, other = Finding("a", "ok", "same"), Finding("a", "error", "other", "repair it")
    found = {rank: [other if rank in (3, 4, 9) else same] for rank in range(16)}
    hosts = {rank: f"gpu{rank // 8}" for rank in range(16)}
    report = join_findings(found, hosts, 16)
    assert [row.where for row in report.rows] == [
        "ranks 3-4, 9 on gpu0, gpu1",
        "ranks 0-2, 5-8, 10-15 on gpu0, gpu1",
    ]
    assert (report.status, report.summary()) == ("error", "1 error found on 16 ranks")
    assert join_findings({0: [same], 1: [same]}, hosts, 2).rows[0].where == ""
    assert ranks_text([7]) == "rank 7"
    # Free space differs on every machine: one line in the table, all of it as JSON.
    found = {rank: [Finding("disk", "ok", f"{rank} GiB")] for rank in range(16)}
    report = join_findings(found, hosts, 16)
    assert len(report.as_dict()["findings"]) == 16
    table = report.as_table()
    assert table.row_count == 1
    (seen,) = table.columns[2].cells
    assert str(seen) == "rank 0 on gpu0: 0 GiB; 15 others differ, all ok"
    assert Report(()).summary() == "no problem found"


def test_the_command_prints_and_exits_by_what_it_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NCCL_RINGS", raising=False)
    command = ["doctor", *SMALL, "--no-step"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] in ("ok", "warning")
    assert "one step" not in {f["name"] for f in report["findings"]}
    monkeypatch.setenv("NCCL_RINGS", "0 1")
    assert main(command) == 0  # a warning
    out = capsys.readouterr().out
    assert "→ set NCCL_GRAPH_FILE instead" in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    assert main(command) == 1
    assert "GLOO_SOCKET_IFNAME is 'nowhere'" in capsys.readouterr().out
    for wrong in (["--timeout", "0"], ["train.stepz=1"], ["--nproc", "0"], ["no.toml"]):
        assert main([*command, *wrong]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_of_nccl_variables() -> None:
    def warned(**environment: str) -> list[str]:
        return [f.advice for f in check_variables(environment) if f.status == "warning"]

    assert warned(NCCL_DEBUG="INFO", NCCL_SOCKET_IFNAME="eth0", PATH="/bin") == []
    assert warned(NCCL_ASYNC_ERROR_HANDLING="1") == ["set TORCH_NCCL_ASYNC_ERROR_HANDLING instead"]
    assert warned(TORCH_NCCL_TRACE_BUFFER_SIZE="9") == ["set TORCH_FR_BUFFER_SIZE instead"]
    assert warned(NCCL_SOCKET_IFNMAE="eth0") == ["did you mean NCCL_SOCKET_IFNAME?"]
    assert warned(NCCL_FASTRAK_CTRL_DEV="eth0") == []  # of a plugin
    assert len(warned(NCCL_P2P_DISABLE="1")) == 1
    assert warned(NCCL_P2P_DISABLE="0") == []
    assert not RENAMED.keys() & CURRENT
    assert set(RENAMED.values()) | {variable.name for variable in ADVICE} <= CURRENT


def test_interfaces_that_are_not_there() -> None:
    def status(name: str, value: str) -> list[str]:
        return [f.status for f in check_interfaces({name: value}, ["lo", "eth0", "eth1"])]

    nccl, gloo = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
    for value in ("eth", "=eth1", "ib,eth", "lo"):
        assert status(nccl, value) == ["ok"]
    assert status(nccl, "^docker") == []
    for value in ("ib", "=eth", "ens1,ens2"):
        assert status(nccl, value) == ["error"]
    assert status(gloo, "eth0,eth1") == ["ok"]
    assert status(gloo, "eth") == ["error"]  # gloo takes whole names


def test_every_variable_of_the_docs_is_that_of_the_doctor() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE.read_text(), re.M)
    advised = [row for row in rows if row[0] in {variable.name for variable in ADVICE}]
    assert advised == [(variable.name, variable.when, variable.why) for variable in ADVICE]


class Nvml(SimpleNamespace):
    """A stand-in for NVML, which needs a GPU: functions by name, and its constants."""

    NVMLError = RuntimeError
    NVML_NVLINK_MAX_LINKS, NVML_CLOCK_SM = 2, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwSlowdown = 8


def test_what_nvml_says_of_a_gpu() -> None:
    def health(links: list[int], reasons: int, errors: int, rows: tuple[int, ...]) -> list[str]:
        nvml = Nvml(
            nvmlDeviceGetNvLinkState=lambda handle, link: links[link],
            nvmlDeviceGetCurrentClocksEventReasons=lambda handle: reasons,
            nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
            nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
            nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: errors,
            nvmlDeviceGetRemappedRows=lambda handle: rows,
        )
        return [finding.status for finding in check_health(nvml, object())]

    assert health([1, 1], 4, 0, (0, 0, 0, 0)) == ["ok", "ok", "ok"]  # 4: a power cap
    assert health([1, 0], 8, 1, (0, 0, 0, 0)) == ["warning", "warning", "error"]
    assert health([0, 0], 0, 0, (0, 0, 0, 0)) == ["ok", "ok", "ok"]  # a card without bridges
    assert health([1, 1], 0, 0, (1, 0, 1, 0)) == ["ok", "ok", "error"]
    assert [f.status for f in check_health(Nvml(), object())] == ["ok", "ok", "ok"]  # knows nothing
    pynvml = pytest.importorskip("pynvml")  # what is asked of it, it has
    names = re.findall(r"nvml\w+|NVML_\w+", Path(devices.__file__).read_text())
    names += [f"nvmlClocksThrottleReason{name}" for name in devices.SLOWDOWNS]
    assert [
        n for n in names if n not in ("nvmlClocksThrottleReason",) and not hasattr(pynvml, n)
    ] == []


def test_checkpoints_that_a_disk_must_take() -> None:
    run = load_run(None, ["checkpoint.keep=2", "checkpoint.keep_every=100", "train.steps=1000"])
    assert checkpoints_kept(run.checkpoint, run.train.steps) == 13


def test_the_best_time_is_of_several_calls() -> None:
    calls: list[int] = []
    assert best_time(lambda: calls.append(0), torch.device("cpu")) >= 0
    assert len(calls) > 2  # the first one warms up


@pytest.mark.gpu
def test_a_gpu_is_examined(tmp_path: Path) -> None:
    run = load_run(None, [*SMALL, "train.device=cuda", "train.compile=false"])
    report, has_hung = examine(run, tmp_path / "runs", World())
    assert report
    assert not has_hung
    assert report.status != "error", report.as_dict()
    assert torch.cuda.get_device_name() in report.findings("device")[0].seen
    assert "TFLOP/s" in report.findings("matrix product")[0].seen
    assert report.findings("one step")[0].status == "ok"
