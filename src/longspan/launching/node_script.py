"""`longspan launch local`: a bash script that starts torchrun, on this machine or on each node."""

from __future__ import annotations

from longspan.launching.job import (
    Job,
    Shell,
    Target,
    port_of,
    shell_environment,
    shell_lines,
    torchrun,
)
from longspan.wording import counted


def script(job: Job) -> str:
    """Return the script; with several nodes each runs the same one, given the rendezvous host."""
    processes = counted(job.processes_per_node, "process")
    lines = [
        "#!/usr/bin/env bash",
        f"# The job {job.name}: {counted(job.nodes, 'node')}, {processes} on each.",
    ]
    lines += ["set -euo pipefail", ""]
    if job.is_multi_node:
        lines += [*_rendezvous(job), ""]
    lines += [shell_environment(), ""]
    lines += [
        "# The same command starts the run, and resumes it from its newest checkpoint.",
        f"exec {shell_lines(_command(job))}",
        "",
    ]
    return "\n".join(lines)


def _rendezvous(job: Job) -> list[str]:
    spares, port = job.max_nodes - job.nodes, port_of(job.name)
    more = f", {counted(spares, 'node')} of them as hot spare" if spares else ""
    return [
        f"# Run it on {job.max_nodes} nodes{more}: bash FILE HOST, where HOST is the",
        f"# name or address of one of them. They meet at its port {port}; HOST:PORT is another.",
        "# LOCAL_ADDR=... is the address of this node, if the others cannot find its host name.",
        'host=${1:?"give the host where the nodes meet: bash $0 HOST"}',
        f"[[ $host == *:* ]] || host+=:{port}",
    ]


def _command(job: Job) -> list[list[str]]:
    start, *rest = torchrun(job, Shell('"$host"'))
    if job.is_multi_node:
        start.append(Shell('${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"}'))
    return [start, *rest]


LOCAL = Target(
    "local",
    "write a script that starts torchrun, here or on each node",
    script,
    lambda job, file: ["bash", "-s" if file == "-" else file, *["HOST"] * job.is_multi_node],
    starts_all_nodes=False,
)
