"""`longspan launch docker`: a Dockerfile that builds longspan's wheel, and runs a job by default.

The image holds longspan and what it needs, not the run: the run file and the run folder are
mounted, so that one image serves many runs and every scheduler. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from longspan.errors import UserError
from longspan.launching.job import ENVIRONMENT, Job, Target, as_path, torchrun

SHARED = "/shared"
RUN_FOLDER = "/etc/longspan"
CONTEXT = ("constraints.txt", "pyproject.toml", "README.md", "src")
"""What is sent to Docker: .dockerignore leaves out the rest."""

DOCKERFILE = """\
{header}
# A digest pins the base image: --build-arg BASE=python@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${{BASE}} AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md ./
COPY src ./src
# setuptools comes first and builds without isolation, so that the constraints hold for it too.
RUN python -m venv /opt/longspan \\
    && /opt/longspan/bin/pip install --no-cache-dir -c constraints.txt setuptools \\
    && /opt/longspan/bin/pip wheel --no-deps --no-build-isolation -w /dist . \\
    && /opt/longspan/bin/pip install --no-cache-dir -c constraints.txt /dist/*.whl

FROM ${{BASE}}
# Triton compiles the launchers of its kernels with a C compiler.
RUN apt-get update \\
    && apt-get install -y --no-install-recommends gcc libc6-dev \\
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home longspan \\
    && install -d -o longspan -g longspan {shared}
COPY --from=build /opt/longspan /opt/longspan
ENV PATH=/opt/longspan/bin:$PATH \\
    PYTHONUNBUFFERED=1 \\
    NVIDIA_DRIVER_CAPABILITIES=compute,utility{environment}
USER 1000
WORKDIR {shared}
CMD {command}
"""


def dockerfile(command: Sequence[str] = ("longspan", "--help"), header: str = "") -> str:
    """Return a Dockerfile with this default command, in the form that no shell reads."""
    variables = {} if command[0] == "longspan" else ENVIRONMENT
    return DOCKERFILE.format(
        header=header or "# Builds longspan's wheel and installs it: docker build -t longspan .",
        shared=SHARED,
        environment="".join(f" \\\n    {name}={value}" for name, (value, _) in variables.items()),
        command=json.dumps(list(command)),
    )


def _dockerfile(job: Job) -> str:
    if job.is_multi_node:
        raise UserError(
            f"docker runs one node, but --nodes asks for {job.max_nodes}: use kubernetes or "
            "skypilot, or run the script of `longspan launch local` in a container of each node"
        )
    run_file = f"{RUN_FOLDER}/{job.run_name}"
    groups = torchrun(job, run_file=run_file)
    gpus = " --gpus all" if job.gpus_per_node else ""
    header = (
        f"# The job {job.name}. It expects its run file and a folder for runs and data:\n"
        f"#   docker run{gpus} --shm-size 8g -v FILE:{run_file}:ro"
        f" -v FOLDER:{SHARED} {job.image or 'longspan'}\n"
        "# FOLDER must be writable for the user 1000; docker stop -t 300 leaves time to save."
    )
    return dockerfile([word for group in groups for word in group], header)


def _build(job: Job, file: str) -> list[str]:
    file = "-" if file == "-" else as_path(file)
    return ["docker", "build", "-f", file, "-t", job.image or "longspan", as_path(job.source)]


DOCKER = Target(
    "docker",
    "write a Dockerfile for longspan and this job; --submit builds it",
    _dockerfile,
    _build,
    options=("image", "source"),
    file="Dockerfile",
    root=SHARED,
)
