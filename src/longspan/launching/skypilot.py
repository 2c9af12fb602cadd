"""`longspan launch skypilot`: a task of SkyPilot, which finds machines in many clouds.

Imports no torch.
"""

from __future__ import annotations

from typing import Any

from longspan.errors import UserError
from longspan.launching.job import (
    TIMEOUTS,
    Job,
    Shell,
    Target,
    as_path,
    port_of,
    shell_environment,
    shell_lines,
    torchrun,
)
from longspan.launching.manifest import dump

SHARED = "/shared"
ACCELERATORS = {
    "v100": "V100-32GB",
    "a100-40gb": "A100",
    "a100": "A100-80GB",
    "h100-pcie": "H100",
    "h100": "H100",
    "h200": "H200",
    "gb200": "GB200",
    "b200": "B200",
    "l4": "L4",
    "l40s": "L40S",
    "a10": "A10",
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "rtx5090": "RTX5090",
    "mi300x": "MI300X",
}
"""SkyPilot's names of the hardware in `hardware.devices()`."""


def task(job: Job) -> str:
    """Return the task as YAML."""
    if job.max_nodes > job.nodes:
        raise UserError(
            f"--nodes {job.nodes}:{job.max_nodes} has hot spares, which skypilot does not "
            f"support: `sky jobs launch` replaces lost nodes, so use --nodes {job.nodes}"
        )
    if job.gpus_per_node and not job.hardware:
        raise UserError("skypilot needs the kind of GPU: give --hardware, for example h100")
    run_file = f"/tmp/longspan-{job.name}/{job.run_name}"
    found: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": _resources(job)}
    if not job.image:
        found["workdir"] = job.source
    found["file_mounts"] = {run_file: job.run_file}
    found["volumes"] = {SHARED: job.volume}
    if not job.image:
        found["setup"] = "python3 -m pip install -c constraints.txt .\n"
    found["run"] = _script(job, run_file)
    header = [
        "# `sky launch` starts it once; `sky jobs launch` also restarts it after a preemption.",
        f"# Runs and data are on the volume at {SHARED}: see `sky volumes`.",
    ]
    return "\n".join([*header, dump(found)])


def _resources(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.gpus_per_node:
        found["accelerators"] = {ACCELERATORS[job.hardware]: job.gpus_per_node}
    else:
        found["cpus"] = f"{job.processes_per_node}+"
    if job.image:
        found["image_id"] = f"docker:{job.image}"
    return found | {"job_recovery": {"max_restarts_on_errors": job.restarts}}


def _script(job: Job, run_file: str) -> str:
    """The script of each node. SkyPilot gives it the rank of the node and the addresses of all."""
    lines = ["set -euo pipefail", shell_environment()]
    endpoint = ""
    if job.is_multi_node:
        endpoint = Shell(f'"$host:{port_of(job.name)}"')
        lines += [
            "# The nodes meet at the first one, which has to know that it is it.",
            'host=$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")',
            'address=$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<< "$SKYPILOT_NODE_IPS")',
            f"conf={TIMEOUTS},is_host=$((SKYPILOT_NODE_RANK == 0))",
        ]
    groups = torchrun(job, endpoint, run_file=run_file)
    if job.is_multi_node:
        groups[0] += ["--local-addr", Shell('"$address"')]
        groups = [[Shell('"$conf"') if word == TIMEOUTS else word for word in g] for g in groups]
    return "\n".join([*lines, f"exec {shell_lines(groups)}", ""])


def _launch(job: Job, file: str) -> list[str]:
    return ["sky", "launch", "-c", job.name, as_path(file)]


SKYPILOT = Target(
    "skypilot",
    "write a task for SkyPilot, which rents machines of many clouds",
    task,
    _launch,
    options=("image", "source", "volume"),
    file="job.yaml",
    root=SHARED,
    reads_stdin=False,
)
