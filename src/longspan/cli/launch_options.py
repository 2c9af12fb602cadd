"""The options of `longspan launch`."""

from __future__ import annotations

from typing import Any

from longspan.cli.parser import Parser
from longspan.hardware import devices
from longspan.launching.job import Job
from longspan.launching.kubernetes import KINDS
from longspan.presets import MODELS

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "minutes": (
        "--time",
        {
            "metavar": "TIME",
            "help": "time limit: minutes, HOURS:MM:SS or DAYS-HH:MM:SS (default: the scheduler's)",
        },
    ),
    "partition": (
        "--partition",
        {"metavar": "NAME", "help": "partition of Slurm (default: the cluster's)"},
    ),
    "account": (
        "--account",
        {"metavar": "NAME", "help": "account to charge (default: the user's)"},
    ),
    "kind": (
        "--kind",
        {"choices": KINDS, "default": Job.kind, "help": "the object that runs the pods"},
    ),
    "namespace": (
        "--namespace",
        {"metavar": "NAME", "help": "namespace of the objects (default: that of kubectl)"},
    ),
    "volume": (
        "--volume",
        {
            "metavar": "CLAIM",
            "default": Job.volume,
            "help": "claim of a volume for runs and data, mounted at /shared",
        },
    ),
    "cpus_per_node": (
        "--cpus-per-node",
        {
            "type": int,
            "metavar": "N",
            "help": "number of CPUs of a node that the job gets (default: all, and no other job)",
        },
    ),
    "image": (
        "--image",
        {"metavar": "IMAGE", "help": "container image with longspan (default: longspan)"},
    ),
    "source": (
        "--source",
        {
            "metavar": "FOLDER",
            "help": "folder of longspan's source, to install it from (default: that of this "
            "longspan)",
        },
    ),
}
"""Options of some targets, by the fields of `Job`."""


def add_size(parser: Parser) -> None:
    """Add the options of all targets: how large the job is, and what it is called."""
    parser.add_argument(
        "--nodes",
        metavar="N[:MAX]",
        help="number of nodes that train; MAX starts more, which train too if the layout fits any "
        "number of them (an axis of -1), and else wait as hot spares (default: 1, "
        "or as many of the --hardware as --gpus need)",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="M",
        help="number of GPUs of a node, 0 for CPUs (default: --gpus / --nodes, or that of the "
        "--hardware)",
    )
    parser.add_argument(
        "--processes-per-node",
        type=int,
        metavar="M",
        help="number of processes of a node (default: one per GPU, or one)",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs of all nodes (default: see --gpus-per-node)",
    )
    parser.add_argument(
        "--hardware",
        choices=list(devices()),
        metavar="GPU",
        help=f"{', '.join(devices())}: checks that model and optimizer fit (default: not checked)",
    )
    parser.add_argument(
        "--model-size",
        choices=list(MODELS),
        metavar="SIZE",
        help=f"{', '.join(MODELS)}: the same as model.preset=SIZE (default: the run file's)",
    )
    parser.add_argument(
        "--epochs",
        type=float,
        metavar="E",
        help="the same as train.epochs=E: passes over the data (default: the run file's steps)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=Job.restarts,
        metavar="N",
        help="how often to resume the run after a process has failed",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="run folder, which every node sees; resumed if it exists (default: runs/NAME)",
    )
    parser.add_argument("--name", help="name of the job (default: made from the run file's name)")
