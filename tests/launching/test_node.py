"""Nodes that meet through the run folder: who hosts, who joins, and what happens when one is lost.

`make elastic` also cuts nodes off, in network namespaces where it may create them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.faults import FAULT, FAULT_LOG
from longspan.launching import node as node_module
from longspan.launching.node import FILE, Meeting, Node
from longspan.runfile import dump_run
from tests.launching.test_elastic import (
    ENDLESS,
    RUN,
    assert_same_as_uninterrupted,
    has_started,
    starts,
    workers_of,
)
from tests.launching.test_local import SMALL, is_alive, last_step, wait_until
from tests.parallel.test_apply import run_of
from tests.slow import slow

Start = Callable[[Meeting, bool], int]


def node_of(run_dir: Path, start: Start, restarts: int = 3) -> Node:
    """A node whose torchrun is a function of the meeting and of whether the node hosts it."""
    node = Node(run_dir, "10.0.0.1", 0, restarts, ["-m", "longspan"])

    def run(meeting: Meeting, lock: int | None) -> int:
        return start(meeting, lock is not None)

    node._start = run  # type: ignore[method-assign]
    return node


def contents(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / FILE).read_text())
    return found


@pytest.mark.parametrize("code", [0, 1])
def test_the_first_node_hosts_and_the_others_join_and_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The other's torchrun fails when the host's ends, and is not started again."""
    monkeypatch.setattr(node_module, "POLL_S", 0.0)
    seen: list[tuple[Meeting, bool]] = []

    def join(meeting: Meeting, hosts: bool) -> int:
        seen.append((meeting, hosts))
        return 1

    def host(meeting: Meeting, hosts: bool) -> int:
        seen.append((meeting, hosts))
        other = node_of(tmp_path, join)
        met = other._meet("")
        assert not isinstance(met, int)
        assert met == (meeting, None)
        assert contents(tmp_path)["ended"] is None
        return code

    assert node_of(tmp_path, host).run() == code
    assert contents(tmp_path)["ended"] == code
    assert [hosts for _, hosts in seen] == [True]
    assert node_of(tmp_path, join)._meet(seen[0][0].id) == code
    # One that starts later is of another job, and hosts.
    assert node_of(tmp_path, join).run() == 1
    assert seen[1][1] is True
    assert seen[1][0].id != seen[0][0].id


def test_when_the_host_is_lost_another_node_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "POLL_S", 0.0)
    lock, _ = node_module._lock(tmp_path / FILE)
    assert lock is not None
    first = Meeting("10.0.0.9:29400", "longspan-0")
    node_module._write(lock, first)
    seen: list[tuple[Meeting, bool]] = []

    def start(meeting: Meeting, hosts: bool) -> int:
        seen.append((meeting, hosts))
        if not hosts:
            os.close(lock)  # as if the process of the host had ended
            return 1
        return 0

    assert node_of(tmp_path, start).run() == 0
    assert seen[0] == (first, False)
    assert seen[1][1] is True
    assert seen[1][0].endpoint.startswith("10.0.0.1:")


def test_a_killed_torchrun_is_started_again_so_many_times(tmp_path: Path) -> None:
    codes = iter([-9, -9, -9, 0])
    assert node_of(tmp_path, lambda *_: next(codes), restarts=2).run() == 1
    assert contents(tmp_path)["ended"] is None  # the others may go on
    assert list(codes) == [0]


def test_a_node_that_fails_by_itself_joins_again_so_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", -1.0)
    lock, _ = node_module._lock(tmp_path / FILE)
    assert lock is not None
    node_module._write(lock, Meeting("h:1", "longspan-0"))
    seen = []

    def start(meeting: Meeting, hosts: bool) -> int:
        seen.append(hosts)
        return 1

    assert node_of(tmp_path, start, restarts=2).run() == 1
    assert seen == [False] * 3
    os.close(lock)


def test_a_signal_stops_a_host_and_the_others_can_go_on(tmp_path: Path) -> None:
    def start(meeting: Meeting, hosts: bool) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1

    before = signal.getsignal(signal.SIGTERM)
    assert node_of(tmp_path, start).run() == 1
    assert contents(tmp_path)["ended"] is None
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"endpoint": "h:1"}', '{"endpoint": "$(x):1", "id": "a"}', '{"x": 1}']
)
def test_what_no_node_has_written_is_ignored(text: str) -> None:
    assert node_module._parse(text.encode()) is None


def test_without_locks_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match="choose one on a file system that has locks"):
        node_of(tmp_path, lambda *_: 0).run()


def test_a_busy_port_is_replaced() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        busy = listener.getsockname()[1]
        assert node_module._free_port(busy) not in (0, busy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needs the arguments of torchrun, after --"),
        ("-- --rdzv_endpoint h:1 -m longspan", "remove --rdzv_endpoint"),
        ("--port 0 -- -m longspan", "--port must be from 1 to 65535"),
        ("--restarts -1 -- -m longspan", "--restarts at least 0"),
    ],
)
def test_invalid_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["node", "--run-dir", str(tmp_path / "a"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


# Real nodes, started by the generated script


class Cluster:
    """Nodes on this machine that run one script; all are killed at the end."""

    def __init__(self, folder: Path, nodes: str, *overrides: str) -> None:
        self.run_dir, self._folder = folder / "run", folder
        file, self._script = folder / "run.toml", folder / "job.sh"
        file.write_text(dump_run(run_of(1, *SMALL)))
        size = ["--nodes", nodes, "--gpus-per-node", "0", "--run-dir", str(self.run_dir)]
        out = ["-o", str(self._script)]
        assert main(["launch", "local", str(file), *RUN, *overrides, *size, *out]) == 0
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str, prefix: list[str], **environment: str) -> None:
        """Run the script as the node of this address."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "OMP_NUM_THREADS": "1", "LOCAL_ADDR": address, **environment}
        with (self._folder / f"{address}.log").open("ab") as log:
            self.nodes[address] = subprocess.Popen(
                [*prefix, "bash", str(self._script)],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    def kill(self, address: str) -> None:
        """Kill the process of a node; torchrun and its workers end with it."""
        self.nodes[address].kill()
        self.nodes.pop(address).wait()

    def log(self, address: str) -> str:
        return (self._folder / f"{address}.log").read_text()

    @property
    def host(self) -> str:
        """The address of the node that hosts the rendezvous."""
        return str(contents(self.run_dir)["endpoint"]).rpartition(":")[0]

    def progress(self, steps: int) -> None:
        at = last_step(self.run_dir)
        wait_until(lambda: last_step(self.run_dir) >= at + steps)

    def stop(self) -> None:
        """Stop the run by a file; all nodes end with 0."""
        (self.run_dir / "STOP").touch()
        for address, process in self.nodes.items():
            assert process.wait(120) == 0, self.log(address)


@pytest.fixture
def clusters() -> Iterator[list[Cluster]]:
    started: list[Cluster] = []
    yield started
    for cluster in started:
        for process in cluster.nodes.values():
            process.kill()
            process.wait()


@slow("elastic")
def test_a_lost_worker_is_replaced_and_without_the_rendezvous_host_the_other_node_resumes(
    tmp_path: Path, clusters: list[Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both nodes are on this machine. Rank 1 is killed in the third step of every start.

    Then the node that hosts the rendezvous is killed. Its worker dies with it. The layout fits one
    node or two, so the other one resumes alone, until it is told to stop.
    """
    cluster = Cluster(tmp_path, "1:2", ENDLESS)
    assert "run it on every node" in capsys.readouterr().out
    clusters.append(cluster)
    fault = {FAULT: "kill@step:1:3", FAULT_LOG: str(tmp_path / "fault")}
    for address in ("127.0.0.1", "127.0.0.2"):
        cluster.start(address, [], **fault)

    def of_both() -> list[int]:
        """Steps at which both nodes have started; one may have trained alone before."""
        return [start["step"] for start in starts(cluster.run_dir) if start["ranks"] == 2]

    wait_until(lambda: len(of_both()) >= 2)
    first, second = of_both()[:2]
    assert second == (first + 2) // 2 * 2  # of the newest checkpoint, which every second step has
    lost, met = cluster.host, contents(cluster.run_dir)["id"]
    (torchrun,) = workers_of(cluster.nodes[lost].pid)
    workers = workers_of(torchrun)
    cluster.kill(lost)
    wait_until(lambda: starts(cluster.run_dir)[-1]["ranks"] == 1)
    assert not any(map(is_alive, [torchrun, *workers]))
    assert cluster.host != lost
    cluster.progress(3)
    started = len(starts(cluster.run_dir))
    cluster.stop()
    assert len(starts(cluster.run_dir)) == started  # not restarted
    ended = contents(cluster.run_dir)
    assert ended["ended"] == 0
    assert ended["id"] != met
    assert_same_as_uninterrupted(cluster.run_dir)


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class Network:
    """Namespaces on a bridge, each with one address."""

    def __init__(self, size: int) -> None:
        self._bridge, self._size = f"lsb{os.getpid()}", size
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")
        for number in range(1, size + 1):
            name = self.name(number)
            ip("netns", "add", name)
            peer = ["type", "veth", "peer", "name", "eth0", "netns", name]
            ip("link", "add", self.link(number), *peer)
            ip("link", "set", self.link(number), "master", self._bridge, "up")
            ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def name(self, number: int) -> str:
        return f"ls{os.getpid()}-{number}"

    def link(self, number: int) -> str:
        return f"lsv{number}-{os.getpid()}"[:15]

    def address(self, number: int) -> str:
        return f"10.231.77.{number}"

    def prefix(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.name(number)]

    def cut(self, number: int) -> None:
        """As if the power failed: the others hear nothing any more, not even of a closed socket."""
        ip("link", "set", self.link(number), "down")
        for pid in ip("netns", "pids", self.name(number)).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def repair(self, number: int) -> None:
        ip("link", "set", self.link(number), "up")

    def trains(self, number: int) -> bool:
        """Whether a node has workers."""
        for pid in ip("netns", "pids", self.name(number)).stdout.split():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if b"train" in command and b"\0LOCAL_RANK=" in environment:
                    return True
        return False

    def close(self) -> None:
        for number in range(1, self._size + 1):
            ip("netns", "delete", self.name(number), check=False)
            ip("link", "delete", self.link(number), check=False)
        ip("link", "delete", self._bridge, check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    """Three nodes; skips where it may not create them."""
    try:
        found = Network(3)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot create network namespaces here: {error}")
    yield found
    found.close()


@slow("elastic")
def test_a_hot_spare_takes_the_place_of_a_lost_node_and_then_the_host_is_lost(
    tmp_path: Path, clusters: list[Cluster], network: Network
) -> None:
    """Three nodes, of which two train; each is cut off from the network without a word."""
    cluster = Cluster(
        tmp_path, "2:3", ENDLESS, "layout.shard=2", "train.hang_timeout_s=15", "checkpoint.every=5"
    )
    clusters.append(cluster)

    def start(number: int) -> None:
        prefix = network.prefix(number)
        cluster.start(network.address(number), prefix, GLOO_SOCKET_IFNAME="eth0")

    def lose(number: int) -> None:
        count = len(starts(cluster.run_dir))
        network.cut(number)
        cluster.nodes.pop(network.address(number)).wait()
        wait_until(lambda: has_started(cluster.run_dir, 2, count + 1), 300)
        cluster.progress(7)

    for number in (1, 2, 3):
        start(number)
    wait_until(lambda: has_started(cluster.run_dir, 2, 1))
    cluster.progress(7)
    host = next(n for n in (1, 2, 3) if network.address(n) == cluster.host)
    (spare,) = [n for n in (1, 2, 3) if not network.trains(n)]
    other = 6 - host - spare
    # The node that trains beside the host; the host itself may be the spare.
    lost = other if spare != host else next(n for n in (1, 2, 3) if n != host)
    lose(lost)
    assert network.trains(spare)
    network.repair(lost)
    start(lost)  # it waits as the spare from now on
    wait_until(lambda: cluster.log(network.address(lost)).count("joins the rendezvous") == 2)
    lose(host)
    assert cluster.host != network.address(host)
    assert network.trains(lost)
    cluster.stop()
    assert_same_as_uninterrupted(cluster.run_dir)
