"""`longspan launch`: a run as a script or manifest for a scheduler."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from longspan.cli.launch_options import OPTIONS, add_size
from longspan.cli.parser import Commands
from longspan.cli.shared import split_items
from longspan.errors import UserError
from longspan.files import write_new
from longspan.hardware import devices
from longspan.launching.docker import CONTEXT, DOCKER
from longspan.launching.job import MAX_NAME, Job, Target, parse_minutes, parse_nodes
from longspan.launching.kubernetes import KUBERNETES
from longspan.launching.node_script import LOCAL
from longspan.launching.skypilot import SKYPILOT
from longspan.launching.slurm import SLURM
from longspan.progress import loading, stderr_console
from longspan.vocabulary import is_folder
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.config import Run
    from longspan.config.data import MixedSource

TARGETS: tuple[Target, ...] = (LOCAL, SLURM, KUBERNETES, SKYPILOT, DOCKER)


def add(commands: Commands) -> None:
    parser = commands.add(
        "launch",
        "write a job script or manifest for a run, and submit it",
        f"launch local run.toml --gpus-per-node 8 -o {LOCAL.file}",
        group="training",
    )
    targets = parser.add_commands()
    for target in TARGETS:
        _add_target(targets, target)


def _add_target(commands: Commands, target: Target) -> None:
    parser = commands.add(
        target.name,
        target.summary,
        f"launch {target.name} run.toml --nodes 2 --gpus-per-node 8 -o {target.file}",
        verb=partial(launch, target=target),
    )
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="the run file, and any number of overrides, such as train.steps=100",
    )
    add_size(parser)
    for field in target.options:
        option, settings = OPTIONS[field]
        parser.add_argument(option, dest=field, **settings)
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="new file for the result, or - for stdout (default: -)"
    )
    parser.add_argument("--submit", action="store_true", help="submit the job, or start it")


def launch(args: argparse.Namespace, target: Target) -> None:
    """Print, write or submit a job. Nothing is started without --submit."""
    if args.out == "-":
        args.out = None
    job = _job(args, target)
    text = target.text(job)
    if args.submit:
        _check_submission(job, target, args.out)
    if args.out:
        write_new(text, Path(args.out))
    if args.submit:
        _submit(target.submit(job, args.out or "-"), None if args.out else text)
    how = "submit it" if target.starts_all_nodes else "run it"
    if job.is_multi_node and not target.starts_all_nodes:
        how += " on every node"
    command = shlex.join(target.submit(job, args.out or "FILE"))
    if args.out:
        print(f"{args.out}: {how} with\n  {command}")
    else:
        print(text, end="")
        note = f"longspan: nothing was started; write it with -o FILE, and {how} with {command}"
        stderr_console().print(note, markup=False)


def _check_submission(job: Job, target: Target, out: str | None) -> None:
    command = target.submit(job, out or "FILE")
    if job.is_multi_node and not target.starts_all_nodes:
        raise UserError(
            f"{target.name} cannot start {job.max_nodes} nodes from one: write the file with -o, "
            f"and on each of them run `{shlex.join(command)}`"
        )
    if not out and not target.reads_stdin:
        raise UserError(f"--submit needs -o FILE: {command[0]} reads a file only")
    if not shutil.which(command[0]):
        raise UserError(
            f"--submit needs the program {command[0]}, which is not on the PATH of this machine: "
            "write the file with -o, and submit it where the program is"
        )


def _submit(command: list[str], text: str | None) -> NoReturn:
    """Become the command, which reads `text` as its stdin, so that signals and the exit code are
    its own.
    """
    if text is not None:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
    sys.stdout.flush()
    os.execvp(command[0], command)


def _job(args: argparse.Namespace, target: Target) -> Job:
    file, overrides = split_items(args.items)
    if file is None:
        raise UserError(
            "launch needs a run file, since the built-in run depends on the machine: write one "
            "with `longspan init -o run.toml`"
        )
    if args.model_size:
        overrides.append(f"model.preset={args.model_size}")
    nodes, max_nodes, gpus = _size(args)
    name = _name_of(file) if args.name is None else args.name
    base = target.root or os.getcwd()
    processes = args.processes_per_node
    chosen = {key: getattr(args, key) for key in target.options if getattr(args, key) is not None}
    if "minutes" in chosen:
        chosen["minutes"] = parse_minutes(chosen["minutes"])
    if "source" in target.options and not (target is SKYPILOT and args.image):
        chosen["source"] = _source(args.source)
    job = Job(
        name=name,
        run_file=os.path.abspath(file),
        run_dir=os.path.normpath(os.path.join(base, args.run_dir or f"runs/{name}")),
        overrides=tuple(overrides),
        nodes=nodes,
        max_nodes=max_nodes,
        gpus_per_node=gpus,
        processes_per_node=(gpus or 1) if processes is None else processes,
        restarts=args.restarts,
        hardware=args.hardware or "",
        **chosen,
    )
    return _checked(job, file, args.epochs, base)


def _source(given: str | None) -> str:
    """The folder of longspan's source: by default the one that this process runs."""
    folder = Path(__file__).parents[3] if given is None else Path(given)
    missing = [name for name in CONTEXT if not (folder / name).exists()]
    if missing:
        text = f"{folder} is not the source of longspan: it has no {missing[0]}"
        raise UserError(f"{text}; give another folder with --source")
    return os.path.abspath(folder)


def _size(args: argparse.Namespace) -> tuple[int, int, int]:
    """Nodes that train, nodes to start, and GPUs of each."""
    usual = devices()[args.hardware].gpus_per_node if args.hardware else None
    per_node, gpus = args.gpus_per_node, args.gpus
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}; --gpus-per-node 0 trains on CPUs")
    if args.nodes is not None:
        nodes, max_nodes = parse_nodes(args.nodes)
    elif gpus is not None and (each := per_node or usual):
        nodes = max_nodes = -(-gpus // each)
    else:
        nodes = max_nodes = 1
    if gpus is not None and per_node is None and nodes > 0:
        per_node = gpus // nodes
    if per_node is None:
        per_node = usual
    if per_node is None:
        raise UserError(
            "the GPUs of a node are not known: give --gpus-per-node M (0 for CPUs), or --gpus, or "
            "--hardware"
        )
    if gpus is not None and gpus != nodes * per_node:
        raise UserError(
            f"--gpus {gpus} is not {counted(nodes, 'node')} with {counted(per_node, 'GPU')} each: "
            "change --gpus, --nodes or --gpus-per-node"
        )
    return nodes, max_nodes, per_node


def _name_of(file: Path) -> str:
    """A valid name of a job, made from that of its run file; Job refuses it if none can be."""
    name = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")
    return (
        name[:MAX_NAME].rstrip("-") if name[:1].isalpha() else f"run-{name}"[:MAX_NAME].rstrip("-")
    )


PATHS = (
    "data.source",
    "model.from",
    "train.init_from",
    "checkpoint.key_file",
    "engine.accelerate_config",
    "engine.deepspeed_config",
    "engine.nvme_path",
)
"""Keys of a run file whose value is a path."""


def _checked(job: Job, file: Path, epochs: float | None, base: str) -> Job:
    """Return the job with the text of its run file, once that is known to be valid.

    `base`: the folder that relative paths of the run are relative to.
    """
    if epochs is not None:
        job = replace(job, overrides=(*job.overrides, f"train.epochs={epochs:g}"))
    run = _loaded(file, job, job.world)
    wanted = "cuda" if job.gpus_per_node else "cpu"
    if run.train.device not in ("auto", wanted):
        raise UserError(
            f"the job has {counted(job.gpus_per_node, 'GPU')} per node, but the run sets "
            f'train.device = "{run.train.device}": add train.device={wanted}, or change '
            "--gpus-per-node"
        )
    if run.train.device == "auto" and wanted == "cpu":  # also on a node that has GPUs
        job = replace(job, overrides=(*job.overrides, "train.device=cpu"))
    if job.hardware and job.gpus_per_node:
        _warn_if_too_large(run, job)
    if job.max_nodes > job.nodes:
        job = replace(job, is_elastic=_fits_any_size(job, file))
    values = {key: getattr(getattr(run, key.split(".")[0]), key.split(".")[1]) for key in PATHS}
    found = {key: value for key, value in values.items() if value not in ("", "builtin", "recall")}
    absolute = tuple(
        f"{key}={os.path.normpath(os.path.join(base, value))}"
        for key, value in found.items()
        if not os.path.isabs(value)
    )
    if run.data.mix is not None:
        absolute = (*absolute, _absolute_mix(run.data.mix, base))
    job = replace(job, overrides=(*job.overrides, *absolute))
    return replace(job, run_text=file.read_text(encoding="utf-8-sig"))


def _absolute_mix(mix: Sequence[MixedSource], base: str) -> str:
    """The override of a mixture whose folders have absolute paths."""
    tables = []
    for part in mix:
        path = part.source
        if is_folder(path):
            path = os.path.normpath(os.path.join(base, path))
        quoted = json.dumps(path, ensure_ascii=False)
        tables.append(f"{{source = {quoted}, weight = {part.weight!r}}}")
    return f"data.mix=[{', '.join(tables)}]"


def _loaded(file: Path, job: Job, world: int) -> Run:
    """The run, checked for `world` processes.

    `layout = "auto"` is resolved where the job runs, and here only to see whether it can be, if the
    GPUs are known.
    """
    from longspan.runfile import load_run

    given = load_run(file, job.overrides, world=None)
    if given.layout.is_unresolved and job.gpus_per_node and not job.hardware:
        return given
    return load_run(file, job.overrides, world=world, hardware=job.hardware or None)


def _fits_any_size(job: Job, file: Path) -> bool:
    """Whether the run fits every number of nodes of the job, as with a layout axis of -1."""
    try:
        for nodes in range(job.nodes + 1, job.max_nodes + 1):
            run = _loaded(file, job, nodes * job.processes_per_node)
            if run.layout.is_unresolved:  # nobody knows
                return False
    except UserError:
        return False
    return True


def _warn_if_too_large(run: Run, job: Job) -> None:
    """Say so if a step needs more than the memory of a GPU."""
    if run.model.factory or run.engine.name != "native":
        return  # which the planner does not support
    if run.train.precision == "auto":
        run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16"})})
    with loading():
        from longspan.planning import memory_per_rank
    gib = max(memory.on_device for memory in memory_per_rank(run, job.world)) / 2**30
    if gib > (size := devices()[job.hardware].memory // 2**30):
        print(
            f"longspan: warning: a step needs {gib:,.0f} GiB per GPU, and a "
            f"{job.hardware} has {size}: use more GPUs (layout.shard); see `longspan plan`",
            file=sys.stderr,
        )
