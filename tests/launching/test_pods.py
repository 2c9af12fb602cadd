"""The command of the manifests, in network namespaces in the place of pods (`make elastic`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.launching.job import Job
from longspan.launching.kubernetes import manifests
from longspan.runfile import dump_run
from longspan.tracking.history import STOP_REQUESTED
from tests.launching.test_elastic import (
    ENDLESS,
    RUN,
    assert_same_as_uninterrupted,
    has_started,
    starts,
)
from tests.launching.test_kubernetes import pod_of, read
from tests.launching.test_local import SMALL, last_step, wait_until
from tests.launching.test_node import Network, network  # noqa: F401  the fixture
from tests.parallel.test_apply import run_of
from tests.slow import slow


class Pods:
    """Pods of a manifest: a network and a host name of their own, the names that DNS would have."""

    def __init__(self, text: str, folder: Path, nodes: Network) -> None:
        found = read(text)
        self._service = found["Service"]["metadata"]["name"]
        self._job, (self._container,) = found["Job"], pod_of(found)[1]["containers"]
        self._folder, self._network = folder, nodes
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "run.toml").write_text(found["ConfigMap"]["data"]["run.toml"])

    def start(self, index: int) -> None:
        """Start a pod; its number in the network is one more, as that begins with 1."""
        number, name = index + 1, f"{self._job['metadata']['name']}-{index}"
        hosts = Path("/etc/netns") / self._network.name(number) / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        names = {"localhost": "127.0.0.1", self._service: self._network.address(1)}
        names[name] = self._network.address(number)
        hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        mounted = {"/etc/longspan": str(self._folder), "/shared": str(self._folder)}
        mounted |= {"$(POD_IP)": self._network.address(number)}
        pattern = "|".join(map(re.escape, mounted))
        command = [
            re.sub(pattern, lambda found: mounted[found[0]], word)
            for word in self._container["command"]
        ]
        values = {item["name"]: item.get("value", "") for item in self._container["env"]}
        enter = [*self._network.prefix(number), "unshare", "--uts", "bash", "-c"]
        enter += ['hostname "$0" && exec "$@"', name]
        with (self._folder / f"pod-{index}.log").open("ab") as log:
            self.running[index] = subprocess.Popen(
                [*enter, *command],
                env={**os.environ, **values, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        for index, pod in self.running.items():
            pod.kill()
            pod.wait()
            shutil.rmtree(Path("/etc/netns") / self._network.name(index + 1))


@pytest.fixture
def pods(tmp_path: Path, network: Network) -> Iterator[Pods]:  # noqa: F811
    run_text = dump_run(run_of(1, *SMALL, *RUN, ENDLESS, "checkpoint.every=1000000"))
    job = Job("first", "run.toml", "/shared/run", run_text=run_text, nodes=2, max_nodes=2)
    pods = Pods(manifests(job), tmp_path, network)
    yield pods
    pods.close()


@slow("elastic")
def test_a_pod_that_is_disrupted_saves_and_its_replacement_goes_on(
    pods: Pods, tmp_path: Path
) -> None:
    """Pod 1 gets SIGTERM, as of a drained node. Pod 0 waits, and no step is lost."""
    run_dir = tmp_path / "run"
    pods.start(1)  # which waits for pod 0, where the rendezvous is
    pods.start(0)
    wait_until(lambda: has_started(run_dir, 2, 1) and last_step(run_dir) >= 3)
    pods.running[1].terminate()
    assert pods.running[1].wait(120) != 0
    pods.start(1)
    wait_until(lambda: has_started(run_dir, 2, 2))
    again = starts(run_dir)[-1]
    assert again["step"] >= 3
    assert (again["lost_steps"], again["cause"]) == (0, STOP_REQUESTED)
    wait_until(lambda: last_step(run_dir) >= again["step"] + 3)
    (run_dir / "STOP").touch()
    assert [pods.running[index].wait(120) for index in (0, 1)] == [0, 0]
    assert_same_as_uninterrupted(run_dir)
