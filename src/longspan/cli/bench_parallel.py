"""Benchmarks of several processes: collectives, and how training scales."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import DONE, split_items
from longspan.errors import UserError
from longspan.progress import loading

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add(actions: Commands) -> None:
    collectives = actions.add(
        "collectives",
        "measure latency and bus bandwidth between processes",
        "bench collectives --nproc 4 --json network.json",
        verb=bench_collectives,
    )
    collectives.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start on this machine; not needed under a launcher (default: "
        "one per GPU; on CPUs 2)",
    )
    collectives.add_argument(
        "--max-bytes",
        metavar="SIZE",
        help="largest size, as in 64M; the smallest is 1K (default: 1G, on CPUs 16M)",
    )
    collectives.add_argument(
        "--device", choices=["cpu", "cuda"], help="device of the tensors (default: GPUs if there)"
    )
    collectives.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")

    layouts = actions.add(
        "layouts",
        'compare the layout of layout = "auto" with others, tried by hand',
        "bench layouts --nproc 4 train.global_batch=8",
        verb=bench_layouts,
    )
    layouts.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and overrides (default: the built-in run)",
    )
    layouts.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="number of processes to train on"
    )
    layouts.add_argument(
        "--steps", type=int, default=10, metavar="N", help="number of steps to time"
    )

    scaling = actions.add(
        "scaling",
        "compare the step time of 1, 2, … processes",
        "bench scaling --nproc 1,2,4,8 --mode weak --csv scaling.csv",
        verb=bench_scaling,
    )
    scaling.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and overrides (default: the built-in run, grown to fit every layout)",
    )
    scaling.add_argument(
        "--nproc",
        metavar="1,N,…",
        help="numbers of processes, of which one is 1 (default: 1, 2, 4, … up to 8, as many as "
        "there are cores, or GPUs)",
    )
    scaling.add_argument(
        "--mode",
        choices=["strong", "weak"],
        default="strong",
        help="strong: the same work on all; weak: work that grows with the processes",
    )
    scaling.add_argument(
        "--layouts",
        default="ddp,fsdp,tensor,sequence",
        metavar="A,B,…",
        help="layouts to measure: ddp, fsdp, tensor, sequence",
    )
    scaling.add_argument(
        "--cores",
        type=int,
        metavar="K",
        help="cores of each process on CPUs (default: cores of the machine / most processes)",
    )
    scaling.add_argument(
        "--steps", type=int, default=10, metavar="N", help="number of steps to time"
    )
    scaling.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="device to train on (default: GPUs if there is one per process)",
    )
    scaling.add_argument("--csv", type=Path, metavar="FILE", help="write the figures as CSV")
    scaling.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")


def bench_collectives(args: argparse.Namespace) -> None:
    from longspan.launching.local import join_launcher, run_processes
    from longspan.parallel.world import world_of_environment

    join_launcher()
    max_bytes = None if args.max_bytes is None else parse_bytes(args.max_bytes)
    world = world_of_environment()
    if world.size > 1 and args.nproc is not None:
        raise UserError(f"--nproc cannot be used by one of {world.size} processes: remove it")
    with loading(quiet=not world.is_main):
        import torch

        from longspan.benchmarks.collectives import bench_collectives, sizes_up_to
        from longspan.benchmarks.measure import unwritable

    gpus = torch.cuda.device_count()
    if world.size == 1:
        processes = max(2, gpus) if args.nproc is None else args.nproc
        if processes < 2:
            raise UserError(f"--nproc must be at least 2, got {args.nproc}")
        if max_bytes is not None:
            sizes_up_to(max_bytes)
        files = [file for file in (args.json, args.plot) if file is not None]
        if problem := unwritable(files):
            raise UserError(problem)
        device = args.device or ("cuda" if gpus >= processes else "cpu")
        if device == "cuda" and gpus < processes:
            raise UserError(f"--device cuda needs a GPU per process: {processes} and {gpus} GPUs")
        options = ["--device", device]
        for name in ("max_bytes", "json", "plot"):
            if (value := getattr(args, name)) is not None:
                options += [f"--{name.replace('_', '-')}", str(value)]
        command = [sys.executable, "-m", "longspan", "bench", "collectives", *options]
        with tempfile.TemporaryDirectory(prefix="longspan-collectives-") as folder:
            code = run_processes(command, processes, Path(folder) / "logs")
        if code != DONE:
            raise SystemExit(code)
        return
    device = args.device or ("cuda" if gpus > world.local_rank else "cpu")
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    bench_collectives(
        world,
        torch.device(device, world.local_rank) if device == "cuda" else torch.device(device),
        max_bytes,
        args.json,
        args.plot,
    )


def parse_bytes(text: str) -> int:
    """A size in bytes, as 1024, 64K, 16M or 1G (powers of 1024)."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UserError(f"--max-bytes must be a size such as 64M or 1G, got {text!r}")
    return int(found[1]) * UNITS[found[2].upper()]


def bench_layouts(args: argparse.Namespace) -> None:
    file, overrides = split_items(args.items)
    with loading():
        from longspan.benchmarks.layouts import bench_layouts

    bench_layouts(file, overrides, args.nproc, args.steps, args.json)


def bench_scaling(args: argparse.Namespace) -> None:
    file, overrides = split_items(args.items)
    with loading():
        import torch

        from longspan.benchmarks.scaling import LAYOUTS, Setting, bench_scaling, default_cores
        from longspan.launching.pinning import CAN_PIN, available_cores

    gpus = torch.cuda.device_count()
    here = gpus if args.device == "cuda" or (args.device is None and gpus > 1) else 0
    most = min(8, here or len(available_cores()))
    processes = tuple(n for n in (1, 2, 4, 8) if n <= most)
    if args.nproc is not None:
        if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", args.nproc):
            raise UserError(f"--nproc must be numbers such as 1,2,4, got {args.nproc!r}")
        processes = tuple(sorted({int(text) for text in args.nproc.split(",")}))
    if processes[0] != 1:
        raise UserError(
            f"--nproc must have 1, which the others are compared with, got {args.nproc}"
        )
    layouts = tuple(dict.fromkeys(args.layouts.split(",")))
    if unknown := [name for name in layouts if name not in LAYOUTS]:
        raise UserError(f"--layouts must be among {', '.join(LAYOUTS)}, got {unknown[0]!r}")
    for option in ("steps", "cores"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise UserError(f"--{option} must be at least 1, got {value}")
    device = args.device or ("cuda" if gpus >= processes[-1] else "cpu")
    if device == "cuda" and gpus < processes[-1]:
        raise UserError(
            f"--device cuda needs a GPU per process: {processes[-1]} processes, {gpus} GPUs"
        )
    cores = (args.cores or default_cores(processes)) if device == "cpu" else None
    if args.cores and (device == "cuda" or not CAN_PIN):
        raise UserError("--cores has no effect: processes are pinned to cores on Linux, on CPUs")
    setting = Setting(args.mode, layouts, processes, device, cores, args.steps)
    bench_scaling(file, overrides, setting, args.json, args.csv, args.plot)
