"""`longspan launch local`: a bash script that starts torchrun, on this machine or on each node."""

from __future__ import annotations

from longspan.launching.job import (
    Job,
    Shell,
    Target,
    agent,
    as_path,
    nodes_in_words,
    port_of,
    shell_environment,
    shell_lines,
    torchrun,
    training,
)
from longspan.wording import counted


def script(job: Job) -> str:
    """Return the script; with several nodes each runs the same one."""
    processes = counted(job.processes_per_node, "process")
    lines = [
        "#!/usr/bin/env bash",
        f"# The job {job.name}: {nodes_in_words(job)}, {processes} on each.",
    ]
    lines += ["set -euo pipefail", ""]
    if job.is_multi_node:
        lines += [*_meeting(job), ""]
    lines += [shell_environment(), ""]
    command = _node(job) if job.is_multi_node else torchrun(job)
    lines += [
        "# The same command starts the run, and resumes it from its newest checkpoint.",
        f"exec {shell_lines(command)}",
        "",
    ]
    return "\n".join(lines)


def _meeting(job: Job) -> list[str]:
    wait = f"; {counted(job.spares, 'node')} will wait as hot spare" if job.spares else ""
    return [
        f"# Run it on {job.max_nodes} nodes{wait}. They share the run folder, through which they",
        "# find each other. One of them hosts the rendezvous, and if it is lost, another one does:",
        f"# at port {port_of(job.name)}, or at another if that is not free.",
        "# LOCAL_ADDR=... is the address of this node, if the others cannot find its host name.",
    ]


def _node(job: Job) -> list[list[str]]:
    """The command of one node of several, which runs torchrun."""
    start = ["longspan", "node", "--run-dir", as_path(job.run_dir)]
    options = ["--port", str(port_of(job.name)), "--restarts", str(job.restarts)]
    options.append(Shell('${LOCAL_ADDR:+--address "$LOCAL_ADDR"}'))
    return [start, options, ["--", *agent(job)], *training(job)]


LOCAL = Target(
    "local",
    "write a script that starts torchrun, here or on each node",
    script,
    lambda job, file: ["bash", *([] if file == "-" else [file])],
    starts_all_nodes=False,
)
