"""longspan doctor: look for what would keep a run from training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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
from longspan.errors import UserError
from longspan.progress import loading, waiting

if TYPE_CHECKING:
    from longspan.doctor import Report


def add(commands: Commands) -> None:
    parser = commands.add(
        "doctor",
        "check machine, ranks, data and one step of a run",
        "doctor",
        "doctor run.toml --nproc 4",
        verb=doctor,
        group="training",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start on this machine; not needed under torchrun, mpirun or "
        "srun (default: 1)",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where the run will write: the disk that is checked",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds that one check may take"
    )
    parser.add_argument("--no-step", action="store_true", help="do not train one step")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's device instead, and write it as a table that plan --gpu and "
        "bench planner --hardware read",
    )
    parser.add_argument(
        "--network",
        type=Path,
        metavar="FILE",
        help="with --calibrate: what bench collectives --json FILE measured between devices "
        "(default: links are assumed)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("-"),
        metavar="FILE",
        help="with --calibrate: the table, a file that ends in .toml, or - for stdout",
    )
    add_backend(parser)


def _calibrate(args: argparse.Namespace) -> None:
    from longspan.files import atomic_write_text
    from longspan.planning.network import read_network
    from longspan.runfile import load_run

    to_stdout = args.out == Path("-")
    if not to_stdout and args.out.suffix != ".toml":
        raise UserError(f"-o must name a file that ends in .toml, got {args.out}")
    network = read_network(args.network) if args.network else None
    file, overrides = split_items(args.items)
    run = load_run(file, overrides, builtin="cpu" if file else builtin_name(), world=None)
    with loading():
        from longspan.device import choose_device
        from longspan.doctor import calibration

    device = choose_device(run)
    with waiting("measuring"):
        found = calibration.measure(device)
    text = calibration.device_table(found, calibration.processes_of(device, args.nproc), network)
    if to_stdout:
        print(text, end="")
        return
    try:
        atomic_write_text(args.out, text)
    except OSError as error:
        raise UserError(f"cannot write {args.out}: {error.strerror}") from error
    print(f"written to {args.out}: longspan plan --gpu {args.out} reads it")


def doctor(args: argparse.Namespace) -> None:
    if args.calibrate:
        _calibrate(args)
        return
    if args.network or args.out != Path("-"):
        raise UserError("--network and -o are for --calibrate: add it")
    from longspan.launching.local import join_launcher
    from longspan.parallel.world import world_of_environment
    from longspan.runfile import load_run
    from longspan.stop_signals import interrupted_by_signals

    join_launcher()
    world = world_of_environment()
    check_nproc(args.nproc, world.size)
    if not 0 < args.timeout < 86_400:
        raise UserError(f"--timeout must be more than 0 and less than 86,400, got {args.timeout:g}")
    file, overrides = split_items(args.items)
    processes = args.nproc or world.size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    builtin = "cpu" if file else builtin_name(here)
    run = load_run(file, overrides, builtin=builtin, world=processes)
    if args.nproc is not None and args.nproc > 1:
        _start_processes(args)
        return
    if world.size > 1:  # the report says in a line what torch logs of a rank out of reach
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    with loading(quiet=not world.is_main):
        from longspan.doctor import examine

    try:
        with interrupted_by_signals(), waiting("examining", quiet=not world.is_main) as status:
            report, has_hung = examine(
                run,
                args.run_dir,
                world,
                timeout_s=args.timeout,
                step=not args.no_step,
                show=lambda text: status.update(f"checking: {text}"),
            )
    except KeyboardInterrupt:
        if world.is_main:
            print("longspan: interrupted; nothing is left behind", file=sys.stderr)
        os._exit(FAILED)  # a check may still run in a thread
    code = DONE
    if report is not None:
        _print(report, as_json=args.json, is_main=world.is_main)
        code = FAILED if report.status == "error" else DONE
    if has_hung:  # in a thread that would keep the interpreter from ending
        sys.stdout.flush()
        os._exit(code)
    if code != DONE:
        raise SystemExit(code)


def _print(report: Report, *, as_json: bool, is_main: bool) -> None:
    """Print the report; one of a rank that did not reach rank 0 goes to stderr."""
    from rich.console import Console

    if as_json and is_main:
        print(json.dumps(report.as_dict()))
        return
    stream = sys.stdout if is_main else sys.stderr
    width = None if stream.isatty() else 10_000  # in a pipe, lines are as long as they are
    console = Console(file=stream, highlight=False, width=width)
    with console.capture() as captured:
        console.print(report.as_table())
    for line in captured.get().splitlines():  # a table fills its lines with spaces
        print(line.rstrip(), file=stream)
    print(report.summary(), file=stream)


def _start_processes(args: argparse.Namespace) -> None:
    from longspan.launching.local import run_processes

    program = [sys.executable, "-m", "longspan", "doctor", *args.items]
    options = ["--run-dir", str(args.run_dir), "--timeout", str(args.timeout)]
    options += [name for name in ("--json", "--no-step", "--quiet") if _is_given(args, name)]
    code = run_processes([*program, *options], args.nproc, Path(os.devnull, "logs"))
    if code != DONE:
        raise SystemExit(code)


def _is_given(args: argparse.Namespace, option: str) -> bool:
    return bool(getattr(args, option.removeprefix("--").replace("-", "_")))
