"""Commands for trained runs: sketch, export, checkpoint."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import FAILED, JSON, add_ema, add_run_dir
from longspan.errors import UserError
from longspan.progress import loading, waiting
from longspan.wording import counted

GROUP = "trained runs"
"""Where `longspan --help` lists them."""


def add(commands: Commands) -> None:
    for each in (_add_sketch, _add_export, _add_checkpoint):
        each(commands)


def _add_sketch(commands: Commands) -> None:
    parser = commands.add(
        "sketch",
        "compress the linear layers of a trained run",
        "sketch runs/first runs/half --keep 0.5",
        verb=sketch,
        group=GROUP,
    )
    add_run_dir(parser)
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="new folder for the compressed run; without it the loss is only reported",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="F",
        help="fraction of the layers' parameters to keep",
    )
    parser.add_argument(
        "--method",
        choices=["svd", "least_squares", "sketch"],
        default="svd",
        help="low-rank layers by SVD, or sketched layers by least squares or by the raw sketch",
    )
    parser.add_argument(
        "--layers",
        default="*",
        metavar="PATTERN",
        help="glob of layer names to compress, such as blocks.*.mlp.*",
    )
    parser.add_argument(
        "--terms", type=int, default=1, metavar="N", help="number of terms per sketched layer"
    )
    parser.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="N",
        help="number of training samples to fit the layers to",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="search for a rank per layer, with --keep of the parameters in total; continues from "
        "earlier measurements in RUN_DIR/sketch-METHOD",
    )
    parser.add_argument(
        "--swaps",
        type=int,
        default=20,
        metavar="N",
        help="with --search, number of rank swaps to try at the end of the search",
    )
    parser.add_argument("--json", action="store_true", help=JSON)


def sketch(args: argparse.Namespace) -> None:
    from longspan.runfile import check_run_folder

    if not 0 < args.keep <= 1:
        raise UserError(f"--keep must be greater than 0 and at most 1, got {args.keep}")
    for name in ("terms", "calibrate", "swaps"):
        minimum = int(name == "terms")
        if (value := getattr(args, name)) < minimum:
            raise UserError(f"--{name} must be at least {minimum}, got {value}")
    if args.method == "svd" and args.terms > 1:
        raise UserError("--terms > 1 is not supported with --method svd: use least_squares")
    if args.method == "sketch" and args.calibrate:
        raise UserError("--calibrate has no effect with --method sketch: use svd or least_squares")
    how = {"method": args.method, "layers": args.layers, "terms": args.terms}
    how["calibrate"] = args.calibrate
    if args.out is not None:
        check_run_folder(args.out, resume=False)
    with loading():
        from longspan.sketch_run import convert, open_trained, search

    with waiting(f"loading {args.run_dir}"):
        trained, found = open_trained(args.run_dir, args.key_file), None
    if args.search:
        found = search(trained, keep=args.keep, swaps=args.swaps, **how)
    ranks = found.ranks if found else None
    with waiting("converting layers and measuring the validation loss"):
        result = convert(trained, args.out, keep=args.keep, ranks=ranks, **how)
    if args.json:
        searched = {"search": found.as_dict()} if found else {}
        print(json.dumps({**result.as_dict(), **searched}))
        return
    print("\n".join(str(part) for part in (found, result) if part))


def _add_export(commands: Commands) -> None:
    parser = commands.add(
        "export",
        "export a run's weights to a Hugging Face folder",
        "export runs/first llama-first",
        verb=export,
        group=GROUP,
    )
    add_run_dir(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder for the exported model")
    parser.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint to export (default: newest)"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        default="fp32",
        help="dtype of the exported weights",
    )
    add_ema(parser)
    parser.add_argument("--json", action="store_true", help=JSON)


def export(args: argparse.Namespace) -> None:
    with loading():
        from longspan.export.huggingface import export

    with waiting(f"exporting {args.run_dir}"):
        options = {"step": args.step, "dtype": args.dtype, "key_file": args.key_file}
        options["ema"] = args.ema
        exported = export(args.run_dir, args.out, **options)
    print(json.dumps(asdict(exported)) if args.json else exported)


def _add_checkpoint(commands: Commands) -> None:
    parser = commands.add(
        "checkpoint",
        "list, verify, remove or fork the checkpoints of a run",
        "checkpoint ls runs/first",
        group=GROUP,
    )
    actions = parser.add_commands()
    for name, text, is_checked in (
        ("ls", "list checkpoints with their sizes", False),
        ("verify", "verify every byte; the exit code is 1 if a checkpoint is corrupt", True),
    ):
        action = actions.add(name, text, f"checkpoint {name} runs/first", verb=checkpoint_list)
        action.set_defaults(checked=is_checked)
        add_run_dir(action)
        action.add_argument("--json", action="store_true", help=JSON)
    rm = actions.add(
        "rm",
        "remove checkpoints, but never the last intact one",
        "checkpoint rm runs/first 500",
        verb=checkpoint_rm,
    )
    add_run_dir(rm)
    rm.add_argument(
        "steps", type=int, nargs="+", metavar="STEP", help="steps whose checkpoints to remove"
    )
    fork = actions.add(
        "fork",
        "copy a checkpoint to a new run folder, to be resumed from there",
        "checkpoint fork runs/first 500 runs/decayed",
        verb=checkpoint_fork,
    )
    add_run_dir(fork)
    fork.add_argument("step", type=int, metavar="STEP", help="step of the checkpoint")
    fork.add_argument("out", type=Path, metavar="OUT", help="new run folder")


def checkpoint_list(args: argparse.Namespace) -> None:
    from longspan.checkpoint.listing import inspect_checkpoints

    with waiting(f"verifying {args.run_dir}") if args.checked else nullcontext():
        key, folder = _signing_key(args), args.run_dir / "checkpoints"
        found = inspect_checkpoints(folder, verify=args.checked, key=key)
    if args.json:
        print(json.dumps([asdict(entry) for entry in found]))
    for entry in [] if args.json else found:
        status = entry.problem or ("intact" if args.checked else "")
        size = f"{entry.bytes / 2**20:,.1f} MiB"
        print(f"{entry.name:<22}{size:>14}  {counted(entry.ranks, 'rank')}  {status}".rstrip())
    bad = [e for e in found if e.problem is not None and not e.name.startswith("bad-")]
    if args.checked and bad:
        raise SystemExit(FAILED)


def checkpoint_rm(args: argparse.Namespace) -> None:
    from longspan.checkpoint.listing import remove_steps

    with waiting(f"verifying {args.run_dir}"):  # to keep the last intact one
        remove_steps(args.run_dir / "checkpoints", args.steps, _signing_key(args))


def checkpoint_fork(args: argparse.Namespace) -> None:
    with loading():
        from longspan.training.folder import fork

    with waiting(f"copying step {args.step} of {args.run_dir}"):
        fork(args.run_dir, args.step, args.out, _signing_key(args))
    print(f"resume it with longspan train --resume {shlex.quote(str(args.out))}", file=sys.stderr)


def _signing_key(args: argparse.Namespace) -> bytes | None:
    """The key of --key-file, or else of the run."""
    from longspan.checkpoint import read_key
    from longspan.runfile import RUN_FILE, load_run

    path, run_file = args.key_file, args.run_dir / RUN_FILE
    if not path and run_file.exists():
        path = load_run(run_file, world=None).checkpoint.key_file
    return read_key(path)
