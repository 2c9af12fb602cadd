"""`longspan plan`: what a run needs and takes, and which layout is best, before it runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.parser import Commands
from longspan.cli.shared import FAILED, add_run_arguments, builtin_name, split_items
from longspan.errors import UserError
from longspan.hardware import Device, device_of
from longspan.progress import loading, waiting

if TYPE_CHECKING:
    from longspan.config import Run
    from longspan.planning import Plan

MAX_GPUS = 1 << 20


def add(commands: Commands) -> None:
    parser = commands.add(
        "plan",
        "predict memory, time and cost of a run, and find its layout",
        "plan run.toml --gpu h100 --gpus 64",
        "plan run.toml --gpu h100 --gpus 64 --search",
        verb=plan,
        group="training",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs (default: as many devices of this machine as the layout needs)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU, such as h100, or a TOML file that describes one (default: time and cost are "
        "not predicted)",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="number of tokens to train for, such as 3e11 (default: those of the run)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare shards and collectives with those of the training code, for the first, "
        "middle and last ranks, in a process group without other processes",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with the memory of each device, time, scaling and ranked layouts "
        "(default: no page)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--search",
        action="store_true",
        help="rank layouts, micro-batches and what saves memory by predicted tokens/s",
    )
    what.add_argument(
        "--largest",
        choices=["context", "micro-batch"],
        metavar="WHAT",
        help="find what just fits: the longest context, with any layout, or the largest "
        "micro-batch, with that of the run (context or micro-batch; default: neither)",
    )
    what.add_argument(
        "--fewest-gpus", action="store_true", help="find the fewest GPUs that the run fits"
    )


def plan(args: argparse.Namespace) -> None:
    from longspan.runfile import load_run

    for option, value, most in (("gpus", args.gpus, MAX_GPUS), ("tokens", args.tokens, 1e18)):
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{option} must be from 1 to {most:,.0f}, got {value:,}")
    if args.html and args.html.suffix not in (".html", ".htm"):
        raise UserError(f"--html must name a file that ends in .html, got {args.html}")
    file, overrides = split_items(args.items)
    device = device_of(args.gpu) if args.gpu else None
    for_gpus = args.gpus is not None or device is not None
    builtin = "cpu" if file else "cuda" if for_gpus else builtin_name()
    given = load_run(file, overrides, builtin=builtin, world=None)
    if given.model.factory:
        raise UserError(
            "plan needs the decoder that a run file describes, but this run has model.factory = "
            f'"{given.model.factory}": its model is known to train, verify and drill'
        )
    if for_gpus and given.train.precision == "auto":
        has_bf16 = device is None or device.peak("bf16")
        overrides.append(f"train.precision={'bf16' if has_bf16 else 'fp16'}")
    gpus = args.gpus or given.layout.min_world_size
    if device is None and args.gpus and (given.layout.is_unresolved or _searches(args)):
        raise UserError(
            "to compare layouts, plan must know the GPU: give --gpu, such as --gpu h100"
        )
    if _searches(args):
        if args.check or args.html:
            option = "--check" if args.check else "--html"
            raise UserError(
                f"{option} is of one layout: give it without --search, --largest and --fewest-gpus"
            )
        _search(args, file, overrides, builtin, gpus, device)
        return
    run = load_run(file, overrides, builtin=builtin, world=gpus, hardware=args.gpu)
    with loading():
        import torch

        from longspan.device import choose_device, resolve
        from longspan.planning import plan

    where = torch.device("cuda") if for_gpus else choose_device(run)
    tokens = None if args.tokens is None else int(args.tokens)
    with waiting(f"planning for {gpus:,} processes"):
        run = resolve(run, where)
        found = plan(run, gpus, device, tokens)
    check = None
    if args.check:
        with loading():
            from longspan.planning.check import check_plan

        with waiting(f"checking ranks of {gpus:,}"):
            check = check_plan(run, gpus)
    if args.json:
        checked = {} if check is None else {"check": asdict(check)}
        print(json.dumps({**found.as_dict(), **checked}))
    else:
        print(found if check is None else f"{found}\n\n{check}")
    if args.html:
        with waiting("comparing layouts"):
            content = page_content(run, gpus, found, device)
        _write_page(args.html, content)
        if not args.json:
            print(f"\nwritten to {args.html}")
    if check is not None and check.differences:
        raise SystemExit(FAILED)


def page_content(run: Run, gpus: int, found: Plan, device: Device | None) -> dict[str, Any]:
    """What the page of a plan shows: the plan and, if the device is known, scaling and layouts."""
    from longspan.planning.search import search

    content: dict[str, Any] = json.loads(json.dumps(found.as_dict()))
    if device is None:
        return content
    scaling = []
    for count in _counts(gpus):
        ranked = search(run, count, device, shown=1).ranked
        scaling += [{"gpus": count, "tokens_per_s": x.time.tokens_per_s} for x in ranked[:1]]
    return {
        **content,
        "device_bytes": device.memory,
        "device_title": device.title,
        "scaling": scaling,
        "search": search(run, gpus, device).as_dict(),
    }


def _counts(gpus: int) -> list[int]:
    """Numbers of GPUs around `gpus` by factors of two, from an eighth to eight times as many."""
    return [max(1, gpus * 2**i // 8) for i in range(7) if gpus * 2**i >= 8]


def _write_page(file: Path, content: dict[str, Any]) -> None:
    from longspan.files import atomic_write_text
    from longspan.reporting import render
    from longspan.reporting.data import ResultData

    try:
        atomic_write_text(file, render([ResultData(file, "plan", content)]))
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _searches(args: argparse.Namespace) -> bool:
    return bool(args.search or args.largest or args.fewest_gpus)


def _search(
    args: argparse.Namespace,
    file: Path | None,
    overrides: list[str],
    builtin: str,
    gpus: int,
    device: Device | None,
) -> None:
    """Print the ranked layouts, or what just fits."""
    from longspan.runfile import load_run

    with loading():
        from longspan.planning import limits
        from longspan.planning.auto import this_device
        from longspan.planning.search import search

    def load(*more: str, own_layout: bool = False) -> Run:
        # A built-in run follows the number of processes; of a run file any layout is replaced.
        world = gpus if file is None or own_layout else None
        options = [*overrides, *more]
        return load_run(file, options, builtin=builtin, world=world, hardware=args.gpu)

    run = load(own_layout=args.largest == "micro-batch")
    device = device or this_device(run, gpus)
    if run.engine.name != "native":
        raise UserError(
            f"longspan plan supports only engine.name = 'native', got {run.engine.name!r}: "
            "use engine.name=native"
        )
    with waiting(f"comparing layouts of {gpus:,} devices"):
        if args.search:
            found = search(run, gpus, device)
            print(json.dumps(found.as_dict()) if args.json else found)
            return
        if args.largest == "context":
            best = limits.largest_context(
                lambda context: load(f"data.context={context}"), run.data.context, gpus, device
            )
            what = "longest context"
        elif args.largest == "micro-batch":
            best, what = limits.largest_micro_batch(run, gpus, device), "largest micro-batch"
        else:
            best, what = limits.fewest_devices(run, device), "fewest GPUs"
    if args.json:
        print(json.dumps(None if best is None else best.as_dict()))
        return
    if best is None:
        print(f"{what}: nothing fits; see longspan plan --search")
        return
    figure = {
        "longest context": f"{best.run.data.context:,} tokens",
        "largest micro-batch": f"{best.run.train.micro_batch:,}",
        "fewest GPUs": f"{best.time.gpus:,}",
    }[what]
    print(
        f"{what} on {best.time.gpus:,} × {device.title}: {figure}\n"
        f"  {best.text}\n"
        f"  {best.needed / 2**30:,.1f} GiB per device, {best.time.tokens_per_s:,.0f} tokens/s "
        f"predicted, MFU {best.time.mfu:.1%}"
    )
