"""Benchmarks of several processes: collectives, and how training scales."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import DONE
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
