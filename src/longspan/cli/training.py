"""Commands that train: init, train, verify, drill; `plan` has a module of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli import plan
from longspan.cli.parser import Commands
from longspan.cli.shared import (
    DONE,
    FAILED,
    add_backend,
    add_run_arguments,
    builtin_name,
    check_nproc,
    split_items,
)
from longspan.errors import Diverged, UserError
from longspan.presets import MODELS
from longspan.progress import loading
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.config import Run
    from longspan.training import Result

GROUP = "training"
"""Where `longspan --help` lists them."""


def add(commands: Commands) -> None:
    for each in (_add_init, _add_train, plan.add, _add_verify, _add_drill):
        each(commands)


def _add_init(commands: Commands) -> None:
    parser = commands.add(
        "init",
        "write a commented run file for this machine",
        "init --preset 125m -o run.toml",
        verb=init,
        group=GROUP,
    )
    parser.add_argument(
        "--preset",
        choices=list(MODELS),
        metavar="PRESET",
        help=f"{', '.join(MODELS)} (default: tiny on a CPU, 125m on a GPU)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="folder of token shards (default: builtin)"
    )
    parser.add_argument(
        "-o",
        "--out",
        default="run.toml",
        metavar="FILE",
        help="new run file, or - for stdout",
    )


def init(args: argparse.Namespace) -> None:
    from longspan.init import next_steps, render, starter_run, this_machine, write

    with loading() if (has_gpu := builtin_name() == "cuda") else nullcontext():
        machine = this_machine(has_gpu=has_gpu)
    run = starter_run(args.preset, args.data, machine)
    text = render(run, machine)
    if args.out == "-":
        print(text, end="")
        return
    write(text, Path(args.out))
    print(next_steps(run, Path(args.out), machine))


def _add_train(commands: Commands) -> None:
    parser = commands.add(
        "train",
        "train a model, on one process or many",
        "train run.toml train.steps=2000 --nproc 4",
        "train --resume runs/first",
        verb=train,
        group=GROUP,
    )
    add_run_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder for a new run (default: runs/ and the file's name and time)",
    )
    where.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="resume the run in DIR from its newest checkpoint, or start it if there is none; uses "
        "the run file in DIR unless RUN.toml is given",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start on this machine; not needed under torchrun (default: 1)",
    )
    add_backend(parser)
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --nproc, how often to resume the run after a process has failed, or to replace "
        "that process while the others go on (layout.replicate > 1 on CPUs)",
    )


def train(args: argparse.Namespace) -> None:
    from longspan.launching.local import join_launcher
    from longspan.launching.spares import SPARE, wait_as_spare
    from longspan.parallel.world import world_of_environment
    from longspan.runfile import load_run, new_run_dir, saved_run_file

    join_launcher()
    if SPARE in os.environ:
        import longspan.training  # noqa: F401  which takes seconds

        wait_as_spare()
    world = world_of_environment()
    check_nproc(args.nproc, world.size)
    if args.restarts < 0 or (args.restarts and (args.nproc or 1) < 2):
        raise UserError(
            f"--restarts must be at least 0 and needs --nproc of at least 2, got {args.restarts}; "
            "with torchrun use --max-restarts"
        )
    file, overrides = split_items(args.items)
    if file is None and args.resume:
        file = saved_run_file(args.resume)
    processes = args.nproc or world.size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    builtin = "cpu" if file else builtin_name(here)
    run = load_run(file, overrides, builtin=builtin, world=processes)
    if world.size > 1 and not (args.resume or args.run_dir):
        raise UserError(f"{world.size} processes need one run folder: give --run-dir or --resume")
    run_dir = args.resume or args.run_dir or new_run_dir(Path("runs"), file)
    if args.nproc is not None and args.nproc > 1:
        _train_in_processes(args, run, run_dir)
        return

    with loading(quiet=not world.is_main):
        from longspan.training import train

    result = train(run, run_dir, resume=args.resume is not None, world=world)
    if not world.is_main:
        return
    try:
        _print_result(result, as_json=args.json)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads it, but the run is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_result(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)))
        return
    if result.sample is not None:
        print(f"\nsample:\n{result.sample}\n")
    if result.validation_loss is not None and result.baseline is not None:
        print(
            f"validation loss {result.validation_loss:.4f} nats per token; "
            f"{result.baseline} {result.baseline_loss:.4f} on the same tokens"
        )
    elif result.validation_loss is not None:
        print(f"validation loss {result.validation_loss:.6g}")
    print(f"run folder: {result.run_dir}")


def _train_in_processes(args: argparse.Namespace, run: Run, run_dir: Path) -> None:
    from longspan.locking import owned
    from longspan.runfile import check_run_folder

    check_run_folder(run_dir, resume=args.resume is not None)
    with owned(run_dir) as lock:
        code = _train_with_restarts(args, run, run_dir, lock)
    if code != DONE:
        raise SystemExit(code)


def _train_with_restarts(args: argparse.Namespace, run: Run, run_dir: Path, lock: int) -> int:
    import signal

    from longspan.launching.local import run_processes
    from longspan.launching.spares import Spares
    from longspan.stop_signals import stop_signals
    from longspan.tracking import HISTORY, History, exit_reason

    program = [sys.executable, "-m", "longspan", "train", *args.items]
    options = ["--json"] if args.json else []
    restarts_left, received = args.restarts, list[int]()
    if restarts_left:
        for number in stop_signals():  # also between two starts
            signal.signal(number, lambda number, _: received.append(number))

    def may_replace(lost: Mapping[int, str]) -> bool:
        """Whether to replace lost ranks, for one of the restarts."""
        nonlocal restarts_left
        if restarts_left == 0 or not run_dir.exists():
            return False
        restarts_left -= 1
        for rank, reason in lost.items():
            print(f"longspan: rank {rank} {reason}", file=sys.stderr)
        ranks = ", ".join(map(str, lost))
        left = counted(restarts_left, "restart")
        print(f"longspan: replacing rank {ranks}; {left} left", file=sys.stderr)
        return True

    replaces = restarts_left > 0 and run.replaces_lost_ranks(args.nproc)
    spare = [*program, "--resume", str(run_dir), *options]
    with Spares(spare, is_wanted=lambda: restarts_left > 0) as spares:
        while True:
            resumes = args.resume or (run_dir / "run.toml").exists()
            command = [*program, "--resume" if resumes else "--run-dir", str(run_dir), *options]
            code = run_processes(
                command,
                args.nproc,
                run_dir / "logs",
                received=received,
                lock=lock,
                spares=spares if args.restarts else None,
                on_lost=may_replace if replaces else None,
            )
            if code != FAILED or restarts_left == 0 or received or not run_dir.exists():
                return code  # who removes a run's folder wants no other run in it
            cause = exit_reason(History(run_dir / HISTORY).events()) or ""
            if cause.startswith(Diverged.__name__):  # it would diverge again
                return code
            restarts_left -= 1
            print(
                f"longspan: restarting; {counted(restarts_left, 'restart')} left", file=sys.stderr
            )


def _add_verify(commands: Commands) -> None:
    parser = commands.add(
        "verify",
        "check that a layout computes the same as one process",
        "verify run.toml layout.shard=2",
        verb=verify,
        group=GROUP,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes (default: product of the layout's axes)",
    )
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="number of optimizer steps to compare"
    )


def verify(args: argparse.Namespace) -> None:
    from longspan.runfile import load_run
    from longspan.verification import verify

    file, overrides = split_items(args.items)
    builtin = "cpu"
    if file is None:
        layout = load_run(None, overrides, world=None).layout
        builtin = builtin_name(args.nproc or layout.min_world_size)
    report = verify(file, overrides, builtin=builtin, nproc=args.nproc, steps=args.steps)
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.agrees:
        raise SystemExit(FAILED)


def _add_drill(commands: Commands) -> None:
    parser = commands.add(
        "drill",
        "inject faults into a run and check that nothing is lost",
        "drill run.toml --nproc 2 --faults 20 --seed 7",
        verb=drill,
        group=GROUP,
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start (default: the product of the axes, at least 2)",
    )
    parser.add_argument(
        "--faults", type=int, default=20, metavar="N", help="number of faults to inject"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that selects the faults"
    )


def drill(args: argparse.Namespace) -> None:
    from longspan.drill import drill

    file, overrides = split_items(args.items)
    report = drill(
        file,
        overrides,
        nproc=args.nproc,
        faults=args.faults,
        seed=args.seed,
    )
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.passed:
        raise SystemExit(FAILED)
