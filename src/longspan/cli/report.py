"""`longspan report`: runs and results as one HTML page."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import JSON
from longspan.errors import UserError

REPORT = "report.html"
"""Name of the page in a run folder."""


def add(commands: Commands) -> None:
    parser = commands.add(
        "report",
        "write runs and results as one HTML page",
        "report runs/first",
        "report runs/first runs/second plan.json -o compared.html",
        verb=report,
        group="looking at runs",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR | RESULT.json",
        help="run folders, and what plan --json, bench --json or drill --json wrote",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page, which is replaced (default: RUN_DIR/{REPORT} for one run, else {REPORT})",
    )
    parser.add_argument("--json", action="store_true", help=f"{JSON}; a page only with -o")


def report(args: argparse.Namespace) -> None:
    from longspan.files import atomic_write_text
    from longspan.reporting import page_data, read_input, render

    is_one_run = len(args.inputs) == 1 and os.path.isdir(args.inputs[0])
    out = args.out or (args.inputs[0] / REPORT if is_one_run else Path(REPORT))
    if args.out and args.out.suffix not in (".html", ".htm"):
        raise UserError(f"-o must name a file that ends in .html, got {args.out}")
    repeated = [str(path) for path in args.inputs if args.inputs.count(path) > 1]
    if repeated:
        raise UserError(f"{repeated[0]} is given twice: name each input once")
    inputs = [read_input(path) for path in args.inputs]
    if args.json:
        print(json.dumps(page_data(inputs)))
        if not args.out:
            return
    page = render(inputs)
    try:
        atomic_write_text(out, page)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    if not args.json:
        print(
            f"{out}: {len(page.encode()) / 2**20:.1f} MiB, opens in any browser without a network"
        )
