"""`longspan launch kubernetes`: manifests for an Indexed Job, a JobSet or a Kubeflow TrainJob.

A pod is a node: one container with torchrun, which starts a process per GPU. The pods meet at pod
0. Manifests are plain data that a serializer writes. Imports no torch.

Torchrun restarts workers in the pods that are left, and Kubernetes replaces pods. On a disruption
(drained node, preemption) the pod gets SIGTERM: all ranks save and stop, and go on when the pod is
replaced.
"""

from __future__ import annotations

import posixpath
from typing import Any

from longspan.errors import UserError
from longspan.launching.job import ENVIRONMENT, SAVE_S, Job, Target, as_path, shown, torchrun
from longspan.launching.manifest import dump
from longspan.wording import counted

KINDS = ("job", "jobset", "trainjob")
PORT = 29400
"""Of the rendezvous. A pod has its own address, so that no other job can use it."""
SHARED = "/shared"
"""Where the volume is mounted: run folders, data."""
RUN_FOLDER = "/etc/longspan"
"""Where the run file is mounted."""
USER = 1000
MAX_CONFIG_MAP = 1 << 20
DISCOVERY = {"jobset": "jobset.x-k8s.io/v1alpha2", "trainjob": "trainer.kubeflow.org/v1alpha1"}

WAIT = """\
import socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
while socket.gethostname() != host:  # pod 0 does not wait for itself
    try:
        socket.create_connection((host, port), 5).close()
        break
    except OSError:  # its name does not resolve yet, or nobody listens there
        time.sleep(2)
"""
"""Waits for the rendezvous. torchrun gives up after two minutes, and pod 0 may be pending for hours
or pull its image.
"""

Object = dict[str, Any]


def manifests(job: Job) -> str:
    """Return the objects of a job as YAML, each with a comment that says what it is for."""
    if job.max_nodes > job.nodes:
        raise UserError(
            f"--nodes {job.nodes}:{job.max_nodes} has hot spares, which kubernetes does not "
            f"support: it replaces a lost pod itself, so use --nodes {job.nodes}"
        )
    if not posixpath.normpath(job.run_dir).startswith(f"{SHARED}/"):
        raise UserError(
            f"the run folder must be below {SHARED}, where the volume is mounted, got "
            f"{shown(job.run_dir)}"
        )
    if len(job.run_text.encode()) > MAX_CONFIG_MAP - 1024:
        raise UserError("the run file must be smaller than 1 MiB, the limit of a ConfigMap")
    texts = [f"# {comment}\n{_explained(found)}" for comment, found in objects(job)]
    return "---\n".join(texts)


def objects(job: Job) -> list[tuple[str, Object]]:
    """The objects of a job, and what each is for."""
    found = [
        ("The run file.", _config_map(job)),
        ("Nobody but the job's own pods may connect to them.", _network_policy(job)),
    ]
    if job.is_multi_node:
        found.append(("The name of pod 0, where torchrun's rendezvous is.", _service(job)))
    pods = counted(job.nodes, "pod")
    processes = counted(job.processes_per_node, "process")
    train = f"{pods} with {processes} each. To resume after its end: delete it, and apply it again."
    if job.kind == "job":
        return [*found, (train, _object(job, "batch/v1", "Job", _job_spec(job)))]
    if job.kind == "jobset":
        version = DISCOVERY["jobset"]
        return [*found, (train, _object(job, version, "JobSet", _job_set_spec(job)))]
    runtime = ("How a TrainJob runs: what JobSet it creates.", _runtime(job))
    return [*found, runtime, (train, _train_job(job))]


WHY = {
    "podFailurePolicy:": "Exit code 2 is invalid input, no better the second time; a disruption "
    "(drained node, preemption) does not count.",
    "terminationGracePeriodSeconds:": "After SIGTERM all ranks save a checkpoint.",
    "initContainers:": "Exits with code 2 if the run is invalid; torchrun's code would be 1. With "
    "several pods, another one waits for the rendezvous, however long pod 0 is pending.",
    "failurePolicy:": "Any other failure restarts all pods, which resume.",
    "podReplacementPolicy:": "A pod is replaced once it has saved.",
    "- name: shm": "NCCL and data loaders share memory; without this there are 64 MB.",
    "- name: shared": "A claim that all pods can mount and write.",
}
"""Comments, by the line that they stand above."""


def _explained(found: Object) -> str:
    """Return an object as YAML with comments."""
    text = dump(found)
    if found["kind"] == "ConfigMap":  # a line of the run file is not one of ours
        return text
    lines, seen = [], set[str]()
    for line in text.removesuffix("\n").split("\n"):
        words = line.strip()
        key = words if words in WHY else words.split(" ")[0]
        if key in WHY and key not in seen:
            lines.append(f"{' ' * (len(line) - len(line.lstrip()))}# {WHY[key]}")
            seen.add(key)
        lines.append(line)
    return "\n".join([*lines, ""])


def _object(job: Job, version: str, kind: str, spec: Object | None = None) -> Object:
    metadata: Object = {"name": job.name, "labels": _labels(job)}
    if job.namespace:
        metadata["namespace"] = job.namespace
    found: Object = {"apiVersion": version, "kind": kind, "metadata": metadata}
    return found if spec is None else found | {"spec": spec}


def _labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "longspan", "app.kubernetes.io/instance": job.name}


def _config_map(job: Job) -> Object:
    return _object(job, "v1", "ConfigMap") | {"data": {job.run_name: job.run_text}}


def _network_policy(job: Job) -> Object:
    pods = {"podSelector": {"matchLabels": _labels(job)}}
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _host(job: Job) -> str:
    """The host name of pod 0."""
    return f"{job.name}-0" if job.kind == "job" else f"{job.name}-node-0-0"


def _service(job: Job) -> Object:
    """A headless Service whose name is the host name of pod 0, which knows itself by it."""
    first = {**_labels(job), "batch.kubernetes.io/job-completion-index": "0"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods find each other before they are ready
        "selector": first,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    service = _object(job, "v1", "Service", spec)
    service["metadata"]["name"] = _host(job)
    return service


def _job_spec(job: Job) -> Object:
    spec: Object = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        # The loss of pod 0, with the rendezvous, ends all pods, and each counts. A JobSet restarts
        # them together.
        "backoffLimit": job.restarts * job.nodes if job.kind == "job" else 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
    }
    if job.minutes and job.kind != "trainjob":
        spec["activeDeadlineSeconds"] = job.minutes * 60
    return spec | {"template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job)}}


def _job_set_spec(job: Job) -> Object:
    template: Object = {"spec": _job_spec(job)}
    if job.kind == "trainjob":  # by which the TrainJob finds the pods that train
        step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        template = {"metadata": {"labels": step}, **template}
    invalid = {
        "name": "InvalidInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [invalid]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _runtime(job: Job) -> Object:
    spec = {
        "mlPolicy": {"numNodes": job.nodes, "torch": {}},
        "template": {"spec": _job_set_spec(job)},
    }
    runtime = _object(job, DISCOVERY["trainjob"], "TrainingRuntime", spec)
    runtime["metadata"]["labels"] |= {"trainer.kubeflow.org/framework": "torch"}
    return runtime


def _train_job(job: Job) -> Object:
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    trainer = {"numNodes": job.nodes, "numProcPerNode": job.processes_per_node}
    spec: Object = {"runtimeRef": reference, "trainer": trainer}
    if job.minutes:
        spec["activeDeadlineSeconds"] = job.minutes * 60
    return _object(job, DISCOVERY["trainjob"], "TrainJob", spec)


def _pod(job: Job) -> Object:
    run_file = f"{RUN_FOLDER}/{job.run_name}"
    check = ["longspan", "config", "show", run_file, *job.overrides, "--nproc", str(job.world)]
    volumes: dict[str, tuple[str, Object]] = {
        "run": (RUN_FOLDER, {"configMap": {"name": job.name}}),
        "shared": (SHARED, {"persistentVolumeClaim": {"claimName": job.volume}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
    }
    mounts = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]

    def container(name: str, command: list[str], environment: list[Object], **more: Any) -> Object:
        return {
            "name": name,
            "image": job.image or "longspan",
            "command": command,
            "env": environment,
            **more,
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }

    command, environment = _command(job, run_file), _environment(job)
    first = [container("check", literal(check), [HOME])]
    if job.is_multi_node:
        first.append(container("wait", ["python", "-c", WAIT, _host(job), str(PORT)], []))
    return {
        "restartPolicy": "Never",  # the Job replaces pods
        "terminationGracePeriodSeconds": SAVE_S + 30,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": first,
        "containers": [container("node", command, environment, resources=_resources(job))],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


HOME = {"name": "HOME", "value": "/tmp"}
"""Where caches of compiled kernels can be written."""


def _environment(job: Job) -> list[Object]:
    values: list[Object] = [
        {"name": name, "value": value} for name, (value, _) in ENVIRONMENT.items()
    ]
    if job.is_multi_node:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        values.append({"name": "POD_IP", "valueFrom": address})
    return [*values, HOME]


def _command(job: Job, run_file: str) -> list[str]:
    groups = torchrun(job, f"{_host(job)}:{PORT}", run_file=run_file)
    words = literal([word for group in groups for word in group])
    if job.is_multi_node:  # Kubernetes expands it; not every pod has a name that the others find
        words[1:1] = ["--local-addr", "$(POD_IP)"]
    return words


def literal(words: list[str]) -> list[str]:
    """Escape arguments in which Kubernetes would expand $(NAME)."""
    return [word.replace("$", "$$") for word in words]


def _resources(job: Job) -> Object:
    if not job.gpus_per_node:
        return {"requests": {"cpu": str(job.processes_per_node)}}
    name = "amd.com/gpu" if job.hardware.startswith("mi") else "nvidia.com/gpu"
    return {"limits": {name: str(job.gpus_per_node)}}


KUBERNETES = Target(
    "kubernetes",
    "write manifests for an Indexed Job, a JobSet or a TrainJob",
    manifests,
    lambda job, file: ["kubectl", "apply", "-f", as_path(file) if file != "-" else file],
    options=("kind", "image", "volume", "namespace", "minutes"),
    file="job.yaml",
    root=SHARED,
)
