"""The doctor finds each planted fault, and does not find it where it is not.

Ports, disks, limits, files and processes are real. Injected are: the clock of a rank, the version
of torch on a rank, and the rates of a slow rank.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.config import Run
from longspan.data.build import build
from longspan.data.shards import read_index
from longspan.device import resolve
from longspan.doctor import examine
from longspan.doctor.data import check_data
from longspan.doctor.devices import judge_rates
from longspan.doctor.disk import check_disk
from longspan.doctor.examination import judge_fingerprints, judge_versions
from longspan.doctor.finding import Finding
from longspan.doctor.machine import check_limits, check_shared_memory
from longspan.doctor.meeting import Meeting, judge_clocks, missing_ranks, open_store
from longspan.doctor.memory import available_memory, check_memory
from longspan.doctor.network import check_rendezvous, gloo_address, judge_addresses
from longspan.doctor.software import versions
from longspan.loopback import STORE
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.disk import small_disk
from tests.harness import Ranks

SMALL = ["model.hidden=32", "model.heads=2", "data.context=64", "train.global_batch=2"]


def statuses(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


def rendezvous(host: str, port: int) -> list[Finding]:
    environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return list(check_rendezvous(World(0, 2, 0), environment))


def test_a_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = rendezvous("127.0.0.1", port)
        assert statuses(found) == {"MASTER_ADDR": "ok", "MASTER_PORT": "error"}
        assert f"port {port} cannot be used: another process listens there" in found[1].seen
    assert statuses(rendezvous("127.0.0.1", port))["MASTER_PORT"] != "error"


def test_a_wrong_master_addr() -> None:
    assert statuses(rendezvous("127.0.0.1", 20_001))["MASTER_ADDR"] == "ok"
    wrong = rendezvous("192.0.2.1", 20_001)[0]  # of a network for documentation
    assert (wrong.name, wrong.status) == ("MASTER_ADDR", "warning")
    assert "192.0.2.1 is no address of rank 0's machine" in wrong.seen
    unknown = rendezvous("no such host", 20_001)[0]
    assert (unknown.name, unknown.status) == ("MASTER_ADDR", "error")
    (missing,) = check_rendezvous(World(1, 2, 0), {"MASTER_ADDR": "127.0.0.1"})
    assert missing.status == "error"
    several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20001", "LOCAL_WORLD_SIZE": "1"}
    assert "there are several" in next(check_rendezvous(World(1, 2, 0), several)).seen


def test_a_machine_whose_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, one, two = {0: "10.0.0.1", 1: "127.0.1.1"}, {0: "a", 1: "a"}, {0: "a", 1: "b"}
    assert list(judge_addresses(addresses, one)) == []
    assert list(judge_addresses({0: "10.0.0.1", 1: "10.0.0.2"}, two)) == []
    (found,) = judge_addresses(addresses, two)
    assert "b is 127.0.1.1 on rank 1" in found.seen
    assert "GLOO_SOCKET_IFNAME" in found.advice
    assert gloo_address({"GLOO_SOCKET_IFNAME": "eth0"}) == "as GLOO_SOCKET_IFNAME says"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert gloo_address({}).startswith("127.")


def test_a_full_disk(tmp_path: Path) -> None:
    run = load_run(None, SMALL)
    with small_disk(tmp_path / "disk", "64m") as disk:
        run_dir = disk.path / "runs" / "new"
        assert set(statuses(check_disk(run, run_dir)).values()) == {"ok"}
        disk.fill()
        found = list(check_disk(run, run_dir))
        assert statuses(found) == {"disk space": "error", "disk writes": "error"}
        assert "0 B free" in found[0].seen
        assert "3 checkpoints of" in found[0].seen  # checkpoint.keep and the one being written
    assert not run_dir.exists()


def test_no_write_access(tmp_path: Path) -> None:
    run = load_run(None, SMALL)
    with small_disk(tmp_path / "disk", "64m") as disk:  # root may write anywhere else
        assert statuses(check_disk(run, disk.path))["disk writes"] == "ok"
        disk.remount("ro")
        found = list(check_disk(run, disk.path))
    assert statuses(found) == {"disk space": "ok", "disk writes": "error"}
    assert "Read-only file system" in found[1].seen


def test_a_small_shared_memory(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as small, small_disk(tmp_path / "big", "256m") as big:
        for on_gpu, status in ((True, "error"), (False, "warning")):
            (found,) = check_shared_memory(2, on_gpu=on_gpu, shm=small.path)
            assert (found.status, "--shm-size" in found.advice) == (status, True)
            assert "1.0 MiB free" in found.seen
            (found,) = check_shared_memory(2, on_gpu=on_gpu, shm=big.path)
            assert found.status == "ok"


def test_too_little_memory(tmp_path: Path) -> None:
    """A step is not tried on CPUs that cannot hold it: Linux would kill processes of others."""
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(meminfo, limit) == 5000 * 1024
    limit.write_text("max\n")
    assert available_memory(meminfo, limit) == 5000 * 1024
    limit.write_text("1000000\n")
    assert available_memory(meminfo, limit) == 1_000_000
    assert available_memory(tmp_path / "none", limit) is None
    large = ["model.layers=2", "model.hidden=1048576", "model.heads=8192"]  # some 10¹³ parameters
    report, _ = examine(load_run(None, [*SMALL, *large]), tmp_path / "runs", World())
    assert report
    assert report.findings("memory")[0].status == "error"
    assert "not tried" in report.findings("one step")[0].seen
    small = resolve(load_run(None, SMALL), torch.device("cpu"))
    (found,) = check_memory(small, 1, 1)
    assert (found.status, "of 1 process" in found.seen) == ("ok", True)


def test_a_low_ulimit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
    try:
        assert statuses(check_limits(2))["open files"] == "ok"
        found = next(check_limits(64))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found.name, found.status) == ("open files", "error")
    assert "600 open files" in found.seen
    assert "64 ranks need about 1,536" in found.seen
    assert "ulimit -n 1536" in found.advice or before[1] < 1536


def test_locked_memory_matters_where_there_is_infiniband(tmp_path: Path) -> None:
    assert "locked memory" not in statuses(check_limits(2, tmp_path / "none"))
    (tmp_path / "mlx5_0").mkdir()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    expected = "ok" if soft == resource.RLIM_INFINITY else "error"
    assert statuses(check_limits(2, tmp_path))["locked memory"] == expected


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text of a document " * 99)
    build([tmp_path / "a.txt"], tmp_path / "shards", validation=0.0)
    return tmp_path / "shards"


def examine_data(folder: Path) -> tuple[Finding, dict[str, object]]:
    facts: dict[str, object] = {}
    run: Run = load_run(None, [*SMALL, f"data.source={folder}"])
    (found,) = check_data(run, facts, 60.0)
    return found, facts


def test_a_wrong_data_hash(data: Path) -> None:
    found, facts = examine_data(data)
    assert (found.status, len(str(facts["fingerprint"]))) == ("ok", 64)
    shard = data / read_index(data).shards[0].file
    changed = bytearray(shard.read_bytes())
    changed[10] ^= 1
    shard.write_bytes(changed)
    found, _ = examine_data(data)
    assert found.status == "error"
    assert "its SHA-256 is not the index's" in found.seen


def test_unreadable_data(data: Path) -> None:
    shard = data / read_index(data).shards[0].file
    kept = shard.rename(data.parent / "kept")
    shard.mkdir()  # root reads whatever is a file
    found, _ = examine_data(data)
    assert (found.status, "cannot read the shard" in found.seen) == ("error", True)
    shard.rmdir()
    kept.rename(shard)
    assert examine_data(data)[0].status == "ok"


def test_ranks_with_other_data() -> None:
    assert list(judge_fingerprints({0: "a" * 64, 1: "a" * 64})) == []
    (found,) = judge_fingerprints({0: "a" * 64, 1: "b" * 64, 2: "b" * 64})
    assert (found.name, found.status) == ("data", "error")
    assert "aaaaaaaaaaaa on rank 0, bbbbbbbbbbbb on ranks 1-2" in found.seen


def test_a_slow_rank() -> None:
    names = dict.fromkeys(range(4), "NVIDIA H200")
    healthy = {rank: {"matmul": 7e14, "copy": 4e12} for rank in range(4)}
    assert set(statuses(judge_rates(healthy, names)).values()) == {"ok"}
    slow = {**healthy, 2: {"matmul": 4e14, "copy": 4e12}}
    product, copy = judge_rates(slow, names)
    assert (product.status, copy.status) == ("warning", "ok")
    assert "rank 2 below 70% of the median 700.0" in product.seen
    # All alike, but far from the data sheet; a device that is not in the table is only measured.
    weak = {rank: {"matmul": 1e14, "copy": 4e12} for rank in range(4)}
    assert next(judge_rates(weak, names)).status == "warning"
    assert next(judge_rates(weak, dict.fromkeys(range(4), "CPU"))).status == "ok"


def meet(rank: int, world: int, folder: str, fault: bool) -> tuple[list[int], Any, Any]:
    """Two of three ranks, or two of two; with a clock and a version that may be wrong on rank 1."""
    size = world + fault
    with patch.dict(os.environ, {STORE: f"{folder}/store-{fault}"}):
        store = open_store(World(rank, size, rank), 60.0)
    meeting = Meeting(store, World(rank, size, rank), 0.2 if fault and rank == 0 else 60.0)
    if rank > 0:
        store.set(f"here/{rank}", '""')
    dist.barrier()  # so that rank 0 waits for none but the one that never comes
    missing = meeting.check_in()
    meeting.timeout_s = 60.0
    is_wrong = fault and rank == 1
    offset = meeting.measure_clocks(lambda: time.time() + 100 * is_wrong)
    with patch.object(torch, "__version__", "2.11.0" if is_wrong else torch.__version__):
        found = versions()
    return missing, meeting.gather("clock", offset), meeting.gather("versions", found)


def test_a_missing_rank_a_skewed_clock_and_another_torch(ranks: Ranks, tmp_path: Path) -> None:
    for fault in (False, True):
        (missing, offsets, found), (other, _, _) = ranks.run(meet, 2, str(tmp_path), fault)
        assert missing == other == ([2] if fault else [])
        (clocks,) = judge_clocks(offsets)
        assert clocks.status == ("error" if fault else "ok"), clocks
        judged = list(judge_versions(found))
        assert [finding.status for finding in judged] == (["error"] if fault else []) + ["ok"]
        assert ("torch" in judged[-1].seen) is not fault
    offset, error = offsets[1]
    assert abs(offset - 100) <= error + 1e-6  # what was measured is as exact as it says
    assert "(rank 1)" in clocks.seen
    text = f"torch differs: {torch.__version__} on rank 0, 2.11.0 on rank 1"
    assert judged[0].seen == text
    assert "rank 2 did not check in within 0.2 s" in missing_ranks([2], 0.2).seen


@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare command")
def test_many_faults_at_once(tmp_path: Path, data: Path) -> None:
    """The command itself, in a mount namespace with a small /dev/shm, with few files and a disk
    that is full, at a port that is in use."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    (data / read_index(data).shards[0].file).unlink()
    run = [*SMALL, f"data.source={data}", "layout.shard=2", "--json", "--timeout", "20"]
    script = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t tmpfs -o size=1m tmpfs disk && "
        'ulimit -n 300 && exec "$@"'
    )
    (tmp_path / "disk").mkdir()
    program = [sys.executable, "-m", "longspan", "doctor", *run, "--run-dir", "disk"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", *program],
            cwd=tmp_path,
            env={
                **os.environ,
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                "NCCL_ASYNC_ERROR_HANDLING": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine forbids it: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    wrong = {
        (f["name"], f["status"]) for f in report["findings"] if f["status"] != "ok" and f["seen"]
    }
    assert (report["status"], report["world"]) == ("error", 2)
    assert wrong >= {
        ("MASTER_PORT", "error"),
        ("ranks", "error"),
        ("shared memory", "warning"),
        ("open files", "error"),
        ("disk space", "error"),
        ("data", "error"),
        ("NCCL variables", "warning"),
        ("one step", "warning"),  # not tried
    }
    assert ("versions", "error") not in wrong
