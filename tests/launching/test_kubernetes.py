"""Manifests of Kubernetes: read by the models that the projects publish, and by their rules."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models
from kubernetes import client

from longspan.cli import main
from longspan.errors import UserError
from longspan.launching.job import TIMEOUTS, Job
from longspan.launching.kubernetes import KINDS, WAIT, manifests
from longspan.runfile import dump_run, load_run

MODELS = {
    "Service": client.V1Service,
    "ConfigMap": client.V1ConfigMap,
    "NetworkPolicy": client.V1NetworkPolicy,
    "Job": client.V1Job,
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
"""By kind: from the packages `kubernetes` and `kubeflow_trainer_api`."""


def job_of(kind: str = "job", **values: Any) -> Job:
    base = {"name": "first", "run_file": "run.toml", "run_dir": "/shared/runs/first"}
    base |= {"run_text": "[train]\nsteps = 2\n", "kind": kind, "nodes": 2, "max_nodes": 2}
    return Job(**{**base, "gpus_per_node": 8, "processes_per_node": 8, **values})


def read(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest, by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def round_trip(found: dict[str, Any]) -> Any:
    """What a published model keeps of an object: a field that it does not have is lost."""
    model = MODELS[found["kind"]]
    if model.__module__.startswith("kubeflow"):
        return json.loads(model.from_dict(found).to_json())  # type: ignore[attr-defined]
    api = client.ApiClient()
    parsed = api._ApiClient__deserialize(found, model)  # type: ignore[attr-defined]
    return api.sanitize_for_serialization(parsed)


def check(found: dict[str, Any]) -> None:
    assert round_trip(found) == found
    if found["kind"] == "Job":  # the pydantic models also check the types of values
        spec = models.IoK8sApiBatchV1JobSpec.from_dict(found["spec"])
        assert spec is not None
        assert json.loads(spec.to_json()) == found["spec"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [{}, {"nodes": 1, "max_nodes": 1}], ids=["nodes", "one-node"])
def test_manifests_are_valid_for_the_published_models(kind: str, values: dict[str, Any]) -> None:
    text = manifests(job_of(kind, namespace="team", minutes=90, **values))
    found = read(text)
    expected = {"job": {"Job"}, "jobset": {"JobSet"}, "trainjob": {"TrainingRuntime", "TrainJob"}}
    common = {"ConfigMap", "NetworkPolicy", *(set() if values else {"Service"})}
    assert found.keys() == expected[kind] | common
    for each in found.values():
        check(each)
        assert each["metadata"]["namespace"] == "team"
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "first"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a field could be added: every object that is not a map of names."""
    if isinstance(value, dict):
        if not path or path[-1] not in {"labels", "matchLabels", "selector", "data", "limits"}:
            yield path
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_anywhere_is_found(kind: str) -> None:
    """The test above would notice it."""
    for found in read(manifests(job_of(kind))).values():
        for path in places(found):
            changed = copy.deepcopy(found)
            inner: Any = changed
            for step in path:
                inner = inner[step]
            inner["unknownField"] = "x"
            with pytest.raises((AssertionError, ValueError)):
                check(changed)


def pod_of(found: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of the Job, and of its pods."""
    if "Job" in found:
        spec = found["Job"]["spec"]
    else:
        outer = found.get("JobSet") or found["TrainingRuntime"]["spec"]["template"]
        (replicated,) = outer["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
    return spec, spec["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_train_find_each_other_and_are_private(kind: str) -> None:
    found = read(manifests(job_of(kind, overrides=("train.steps=7",))))
    spec, pod = pod_of(found)
    host = "first-0" if kind == "job" else "first-node-0-0"
    (node,), (check_run, wait) = pod["containers"], pod["initContainers"]
    assert wait["command"] == ["python", "-c", WAIT, host, "29400"]
    expected = f"""torchrun --local-addr $(POD_IP) --nnodes 2 --nproc-per-node 8 --max-restarts 10
        --rdzv-backend c10d --rdzv-endpoint {host}:29400 --rdzv-id first --rdzv-conf {TIMEOUTS}
        -m longspan train /etc/longspan/run.toml train.steps=7 --resume /shared/runs/first"""
    assert node["command"] == expected.split()
    variables = {item["name"]: item.get("value") for item in node["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert node["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert check_run["command"][:4] == ["longspan", "config", "show", "/etc/longspan/run.toml"]
    # Every mount has a volume; shared memory is memory; the run file is the one that was given.
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shm"] == "/dev/shm"
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory"}}
    assert volumes["shared"] == {"persistentVolumeClaim": {"claimName": "longspan"}}
    assert volumes["run"] == {"configMap": {"name": found["ConfigMap"]["metadata"]["name"]}}
    assert found["ConfigMap"]["data"] == {"run.toml": "[train]\nsteps = 2\n"}
    # The Service resolves the host to pod 0 only, and only the job's pods may connect.
    labels = spec["template"]["metadata"]["labels"]
    service = found["Service"]
    assert service["metadata"]["name"] == host
    assert service["spec"]["clusterIP"] == "None"
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    assert service["spec"]["selector"] == {**labels, **index}
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == {"matchLabels": labels}
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    # Nobody is root, and nothing but the mounts can be written.
    assert pod["securityContext"]["runAsNonRoot"]
    for container in (node, check_run, wait):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_retried_disruptions_do_not_count_and_invalid_input_ends_the_job(
    kind: str,
) -> None:
    found = read(manifests(job_of(kind, restarts=5)))
    spec, pod = pod_of(found)
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    assert pod["terminationGracePeriodSeconds"] > 300  # of torchrun, for its workers to save
    invalid, disrupted = spec["podFailurePolicy"]["rules"]
    assert (invalid["action"], invalid["onExitCodes"]["values"]) == ("FailJob", [2])
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    if kind == "job":
        assert spec["backoffLimit"] == 10
        return
    assert spec["backoffLimit"] == 0
    outer = found.get("JobSet") or found["TrainingRuntime"]["spec"]["template"]
    policy = outer["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])


def test_a_time_limit_is_set_once() -> None:
    for kind in KINDS:
        found = read(manifests(job_of(kind, minutes=90)))
        spec, _ = pod_of(found)
        outer = found["TrainJob"]["spec"] if kind == "trainjob" else spec
        assert outer["activeDeadlineSeconds"] == 5400
        assert ("activeDeadlineSeconds" in spec) == (kind != "trainjob")


def test_other_pods_wait_for_the_rendezvous_and_pod_0_does_not() -> None:
    def waiting(host: str, port: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WAIT, host, str(port)])

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert waiting(socket.gethostname(), port).wait(60) == 0
        other = waiting("127.0.0.1", port)
        with pytest.raises(subprocess.TimeoutExpired):  # nobody listens yet
            other.wait(0.5)
        listener.listen()
        assert other.wait(60) == 0


def test_a_train_job_names_its_runtime() -> None:
    found = read(manifests(job_of("trainjob")))
    runtime = found["TrainingRuntime"]
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["metadata"]["labels"] == step
    assert [c["name"] for c in pod_of(found)[1]["containers"]] == ["node"]


def test_comments_do_not_change_a_manifest() -> None:
    """Not even in a run file, or an override, that has lines like those of a manifest."""
    text = "podFailurePolicy:\n  - name: shm\n# x\n\ttab\n---\ninitContainers: \n"
    values = ("a.b=" + " podFailurePolicy:" * 200, "a.b=- name: shm", "a.b=: # '\"|")
    found = read(manifests(job_of(run_text=text, overrides=values)))
    assert found["ConfigMap"]["data"] == {"run.toml": text}
    assert pod_of(found)[1]["containers"][0]["command"][-5:-2] == list(values)
    assert "# After SIGTERM all ranks save" in manifests(job_of())


def test_what_kubernetes_does_not_support_is_refused() -> None:
    for values, message in (
        ({"max_nodes": 3}, "--nodes 2:3 has hot spares, which kubernetes does not support"),
        ({"run_dir": "/home/me"}, "the run folder must be below /shared"),
        ({"run_dir": "/shared/../etc"}, "the run folder must be below /shared"),
        ({"run_text": "#" * (1 << 20)}, "must be smaller than 1 MiB"),
        ({"namespace": "Team"}, 'the namespace must be a DNS label, got "Team"'),
        ({"volume": "a b"}, 'the volume must be the name of a PersistentVolumeClaim, got "a b"'),
        ({"image": "a b"}, 'the image must be the name of a container image, got "a b"'),
    ):
        with pytest.raises(UserError) as raised:
            manifests(job_of(**values))
        assert message in str(raised.value)


def test_launch_kubernetes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "A run.toml", tmp_path / "job.yaml"
    file.write_text(dump_run(load_run(None, ["train.device=auto"])))
    words = ["launch", "kubernetes", str(file), "--gpus", "1", "--hardware", "mi300x"]
    words += ["--kind", "jobset", "--time", "1:00:00", "--image", "team/longspan:1"]
    assert main([*words, "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: submit it with\n  kubectl apply -f {out}\n"
    found = read(out.read_text())
    spec, pod = pod_of(found)
    assert spec["activeDeadlineSeconds"] == 3600
    (node,) = pod["containers"]
    assert node["image"] == "team/longspan:1"
    assert node["resources"] == {"limits": {"amd.com/gpu": "1"}}
    assert node["command"][-2:] == ["--resume", "/shared/runs/a-run"]
    assert found["ConfigMap"]["data"]["run.toml"] == file.read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    assert main([*words, "--submit"]) == 2
    assert "--submit needs the program kubectl" in capsys.readouterr().err
