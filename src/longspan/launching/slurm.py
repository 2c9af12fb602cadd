"""`longspan launch slurm`: a batch script that starts torchrun on every node."""

from __future__ import annotations

import shlex

from longspan.errors import UserError
from longspan.launching.job import (
    SAVE_S,
    Job,
    Shell,
    Target,
    as_path,
    nodes_in_words,
    shell_environment,
    shell_lines,
    shown,
    torchrun,
)
from longspan.wording import counted

BODY = """
set -uo pipefail
run_dir={run_dir}
mkdir -p -- "$run_dir/logs" || exit 1
rm -f -- "$run_dir/STOP"  # of a job that has ended before its first step

{meet}{environment}

# USR1 arrives {signal_s} seconds before the time limit (or by `scancel --batch --signal=USR1`): the
# run finishes its step and saves; the job is requeued, and resumes when it starts again.
is_stopping=
# shellcheck disable=SC2317  # the trap calls it
save_and_stop() {{
  is_stopping=1
  touch -- "$run_dir/STOP"
}}
trap save_and_stop USR1

# One task, which is one torchrun, per node; a log for each.
{command} &
code=138
while ((code == 138)); do  # 128 + USR1, when `wait` was interrupted
  wait "$!"
  code=$?
done
if [[ $is_stopping ]]; then
  # Where that is forbidden, the next job of the same name, if there is one, goes on.
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
"""

MEET = """\
# The nodes meet at the first one. The job's number chooses the port, so that jobs do not collide.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
endpoint=${hosts%%$'\\n'*}:$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 12000))

"""
"""Where the rendezvous of several nodes is."""


def script(job: Job) -> str:
    """Return the batch script of a job."""
    for character in "%\\":
        if character in job.run_dir:
            raise UserError(
                f"the run folder must not have {character}, which has a meaning in Slurm's names "
                f"of log files, got {shown(job.run_dir)}"
            )
    body = BODY.format(
        run_dir=shlex.quote(job.run_dir),
        meet=MEET if job.is_multi_node else "",
        environment=shell_environment(),
        signal_s=SAVE_S,
        command=shell_lines([*_srun(job), *torchrun(job, Shell('"$endpoint"'))]),
    )
    return "\n".join([*_directives(job), body.strip("\n"), ""])


def _directives(job: Job) -> list[str]:
    options = {
        "--job-name": job.name,
        "--partition": job.partition,
        "--account": job.account,
        "--time": str(job.minutes or ""),
        "--nodes": str(job.max_nodes),
        "--ntasks-per-node": "1",
        "--gpus-per-node": str(job.gpus_per_node or ""),
        "--cpus-per-task": str(job.cpus_per_node or ""),
        "--output": "%x-%j.log",
        "--open-mode": "append",
        "--signal": f"B:USR1@{SAVE_S}",
        "--dependency": "singleton",
    }
    flags = ["--requeue"]
    if not job.cpus_per_node:
        flags.append("--exclusive")
        options["--mem"] = "0"  # all
    if job.max_nodes > job.nodes:
        flags.append("--no-kill")
    return [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {name}={value}" for name, value in options.items() if value),
        *(f"#SBATCH {flag}" for flag in flags),
        "",
        f"# The job {job.name}: {nodes_in_words(job)}, "
        f"{counted(job.processes_per_node, 'process')} on each"
        + (f", and {counted(job.spares, 'node')} as hot spare." if job.spares else "."),
        "# Jobs of the same name run one after another (singleton). Where jobs cannot be requeued,",
        "# submit it several times: each resumes the run, or ends at once if that is finished.",
    ]


def _srun(job: Job) -> list[list[str]]:
    """Start of the command. Options with =, since the value of some is optional."""
    has_spares = job.max_nodes > job.nodes
    words = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--open-mode=append"]
    words += [f"--cpus-per-task={job.cpus_per_node}"] * bool(job.cpus_per_node)
    words += ["--no-kill"] * has_spares
    words += [f"--kill-on-bad-exit={int(not has_spares)}"]
    return [words, [f"--output={job.run_dir}/logs/%x-%j-node-%n.log"]]


SLURM = Target(
    "slurm",
    "write a batch script for Slurm",
    script,
    lambda job, file: ["sbatch"] if file == "-" else ["sbatch", as_path(file)],
    options=("minutes", "partition", "account", "cpus_per_node"),
    file="job.sbatch",
)
