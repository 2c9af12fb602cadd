"""The commands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from longspan import __version__
from longspan.cli import (
    bench,
    completion,
    doctor,
    evaluation,
    generation,
    inputs,
    launch,
    node,
    profile,
    report,
    trained,
    training,
    watch,
)
from longspan.cli.parser import Parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments like `parse_args`, but allow overrides after options too."""
    args, rest = build_parser().parse_known_args(argv)
    if rest and (not hasattr(args, "items") or any(item.startswith("-") for item in rest)):
        args.parser.reject(rest)
    if rest:
        args.items = [*args.items, *rest]
    if backend := getattr(args, "backend", None):
        args.items = [*args.items, f"layout.backend={backend}"]
    return args


def build_parser() -> Parser:
    parser = Parser(
        prog="longspan",
        description="Train long-context transformers from one run file.",
        epilog="`longspan COMMAND --help` shows arguments and an example. A command that takes a\n"
        "run file uses the built-in run for this machine when it gets none.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"longspan {__version__}")
    # The `deepspeed` launcher passes it; the environment holds the same value.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_commands()
    groups = (
        training,
        launch,
        node,
        doctor,
        profile,
        generation,
        trained,
        evaluation,
        watch,
        report,
        inputs,
        bench,
    )
    for group in (*groups, completion):
        group.add(commands)
    return parser
