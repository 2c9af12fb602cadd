"""The command eval."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.parser import Commands
from longspan.cli.shared import DONE, JSON, add_ema, check_nproc
from longspan.errors import UserError
from longspan.progress import ProgressBar, loading
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.evaluation.evaluate import Evaluation

GROUP = "trained runs"
"""Where `longspan --help` lists it."""
WORST = 5
"""Documents that are printed."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "eval",
        "measure loss by position and recall by distance of a model",
        "eval runs/first --needle --pairs --plot recall.svg",
        verb=evaluate,
        group=GROUP,
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder of a run, or a Hugging Face folder"
    )
    parser.add_argument(
        "items",
        nargs="*",
        metavar="section.key=value",
        help="overrides of the run, such as data.source=FOLDER or data.context=65536",
    )
    parser.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key that checkpoints must be signed with (default: the run's checkpoint.key_file)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="number of validation samples; 0 for no loss (default: 1,048,576 tokens of them)",
    )
    parser.add_argument(
        "--needle", action="store_true", help="ask for a number that is hidden in other text"
    )
    parser.add_argument(
        "--pairs", action="store_true", help="ask for one value of a list of keys and values"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=4,
        metavar="N",
        help="number of questions for each length and depth",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that share samples and questions, each with the whole model, "
        "or split by layout.tensor=N",
    )
    add_ema(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")
    parser.add_argument("--json", action="store_true", help=JSON)


def evaluate(args: argparse.Namespace) -> None:
    check_nproc(args.nproc)
    if args.trials < 1 or (args.samples is not None and args.samples < 0):
        raise UserError(
            f"expected --trials >= 1 and --samples >= 0, got {args.trials} and {args.samples}"
        )
    if args.plot is not None and not os.access(args.plot.parent, os.W_OK):
        raise UserError(
            f"cannot write --plot {args.plot}: no folder {args.plot.parent} to write to"
        )
    if args.nproc > 1 and "WORLD_SIZE" not in os.environ:
        _start_processes(args)
        return
    with loading():
        from longspan.evaluation.evaluate import Wanted
        from longspan.evaluation.evaluate import evaluate as evaluate_model
        from longspan.launching.local import join_launcher
        from longspan.parallel.world import world_of_environment
    join_launcher()
    world = world_of_environment()
    tasks = tuple(name for name in ("needle", "pairs") if getattr(args, name))
    wanted = Wanted(args.samples, tasks, args.trials)
    with ProgressBar(f"evaluating {args.folder}", quiet=not world.is_main) as bar:
        found = evaluate_model(
            args.folder,
            args.items,
            wanted,
            world,
            key_file=args.key_file,
            ema=args.ema,
            report=bar.show,
        )
    if not world.is_main:
        return
    if args.json:
        print(json.dumps(found.as_dict()))
    else:
        _print(found)
    if args.plot is not None:
        try:
            args.plot.write_text(_plot(found), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write --plot {args.plot}: {error.strerror}") from error


def _start_processes(args: argparse.Namespace) -> None:
    from longspan.launching.local import run_processes

    options = [f"--trials={args.trials}", f"--key-file={args.key_file}"]
    options += [f"--samples={args.samples}"] if args.samples is not None else []
    options += [f"--plot={args.plot}"] if args.plot is not None else []
    options += [f"--{name}" for name in ("needle", "pairs", "ema", "json") if getattr(args, name)]
    command = [sys.executable, "-m", "longspan", "eval", *options]
    command += ["--nproc", str(args.nproc), "--", str(args.folder), *args.items]
    code = run_processes(command, args.nproc, Path(os.devnull, "logs"))
    if code != DONE:
        raise SystemExit(code)


def _print(found: Evaluation) -> None:
    from longspan.evaluation.evaluate import perplexity

    at = "" if found.step is None else f", step {found.step}"
    print(f"model  {found.model}{at}\ndata   {found.data}")
    if found.changes:
        print(f"note   {'; '.join(found.changes)}")
    if (losses := found.losses) is not None:
        bits = "" if losses.bits_per_byte is None else f", {losses.bits_per_byte:.4f} bits per byte"
        print(
            f"loss   {losses.mean:.4f} nats per token, perplexity {perplexity(losses.mean):,.2f}"
            f"{bits}, over {counted(losses.tokens, 'token')}"
        )
        print("\nloss by position" + " " * 10 + "tokens      nats")
        for row in losses.by_position():
            where = f"{row['first']:,.0f} to {row['last']:,.0f}"
            print(f"  {where:22}{row['tokens']:>10,.0f}{row['loss']:>10.4f}")
        documents = sorted(losses.documents(), key=lambda x: x.nats / x.tokens)
        middle = documents[len(documents) // 2]
        what = f"{counted(len(documents), 'document')}, or parts of one"
        if not found.run.data.isolates:
            what = f"{counted(len(documents), 'sample')} of joined documents"
        print(f"\n{what}: median loss {middle.nats / middle.tokens:.4f}; the highest:")
        for x in documents[: -WORST - 1 : -1]:
            where = f"sample {x.sample}, from token {x.start:,}"
            print(f"  {x.nats / x.tokens:8.4f}  {where}, {counted(x.tokens, 'token')}")
    for task in dict.fromkeys(str(row["task"]) for row in found.recall):
        rows = [row for row in found.recall if row["task"] == task]
        depths = sorted({float(row["depth"]) for row in rows})
        print(f"\n{task}: share of right answers by context length and depth of the fact")
        print("    tokens" + "".join(f"{depth:>8.0%}" for depth in depths))
        for length in dict.fromkeys(int(row["length"]) for row in rows):
            shares = {float(r["depth"]): r for r in rows if r["length"] == length}
            cells = (
                f"{float(shares[d]['right']) / float(shares[d]['trials']):>8.0%}" for d in depths
            )
            print(f"{length:>10,}" + "".join(cells))


def _plot(found: Evaluation) -> str:
    """Loss by position, and the share of right answers by distance, one line per depth."""
    from longspan.benchmarks.chart import charts_svg

    charts = dict[str, dict[str, list[tuple[float, float]]]]()
    tops = dict[str, float]()
    if found.losses is not None:
        rows = [row for row in found.losses.by_position() if math.isfinite(row["loss"])]
        if not rows:
            raise UserError("cannot draw the loss by position, which is non-finite everywhere")
        points = [(row["last"], row["loss"]) for row in rows]
        title = "Nats per token by position"
        charts[title], tops[title] = {"loss": points}, math.ceil(max(y for _, y in points))
    for task in dict.fromkeys(str(row["task"]) for row in found.recall):
        lines = dict[str, list[tuple[float, float]]]()
        for row in (row for row in found.recall if row["task"] == task):
            share = float(row["right"]) / float(row["trials"])
            lines.setdefault(f"depth {float(row['depth']):.0%}", []).append(
                (float(row["length"]), share)
            )
        title = f"Right answers, {task}"
        charts[title], tops[title] = lines, 1.0
    return charts_svg(charts, found.model, top=tops)
