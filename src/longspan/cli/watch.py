"""Commands that look at runs: runs, watch."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import JSON
from longspan.errors import UserError

GROUP = "looking at runs"
"""Where `longspan --help` lists them."""


def add(commands: Commands) -> None:
    for each in (_add_runs, _add_watch):
        each(commands)


def _add_runs(commands: Commands) -> None:
    parser = commands.add(
        "runs",
        "list runs: their state, step, loss, speed and size",
        "runs",
        "runs experiments --json",
        verb=runs,
        group=GROUP,
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs"),
        metavar="DIR",
        help="folder of run folders, or one of them",
    )
    parser.add_argument("--json", action="store_true", help=JSON)


def runs(args: argparse.Namespace) -> None:
    from rich.console import Console

    from longspan.reporting.runs import as_table, list_runs

    found = list_runs(args.folder)
    if args.json:
        print(json.dumps([asdict(run) for run in found]))
    elif found:
        # In a pipe, lines are as long as they are.
        width = None if sys.stdout.isatty() else 10_000
        Console(highlight=False, width=width).print(as_table(found, time.time()))
    else:
        print(f"no runs in {args.folder}", file=sys.stderr)


def _add_watch(commands: Commands) -> None:
    parser = commands.add(
        "watch",
        "watch a run live, in the terminal or as a page",
        "watch runs/first",
        "watch runs/first --web",
        verb=watch,
        group=GROUP,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--web",
        action="store_true",
        help="serve the report as a live page on 127.0.0.1; the address that is printed has a "
        "token, without which nothing is served",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="with --web, the port (default: a free one)"
    )


def watch(args: argparse.Namespace) -> None:
    from rich.console import Console

    if args.port is not None and not args.web:
        raise UserError("--port needs --web")
    try:
        if args.web:
            _serve(args.run_dir, args.port or 0)
        else:
            from longspan.reporting.terminal import watch

            watch(args.run_dir, Console(highlight=False))
    except KeyboardInterrupt:  # how one stops watching
        pass


def _serve(folder: Path, port: int) -> None:
    from longspan.reporting.server import Server

    with Server(folder, port) as server:
        print(f"{server.url}\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        finally:
            server.is_closing.set()
