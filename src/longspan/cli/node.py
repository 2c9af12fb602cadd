"""longspan node: torchrun on one node of several, without a node that must not be lost."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.errors import UserError


def add(commands: Commands) -> None:
    parser = commands.add(
        "node",
        "run torchrun on this node; the nodes meet through the run folder",
        "node --run-dir /nfs/a -- --nnodes 4 -m longspan train --resume /nfs/a",
        verb=node,
        group="training",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder, which all nodes share",
    )
    parser.add_argument(
        "--address",
        metavar="HOST",
        help="name or address by which other nodes reach this one (default: its host name)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=29400,
        metavar="N",
        help="port of the rendezvous, if this node hosts it and the port is free",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often to meet again after the rendezvous was lost",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT",
        help="after --, arguments of torchrun, without those of the rendezvous (--rdzv-...)",
    )


def node(args: argparse.Namespace) -> None:
    from longspan.launching.node import Node

    if not args.arguments:
        raise UserError("node needs the arguments of torchrun, after --: see longspan node --help")
    ours = ("--rdzv", "--master", "--standalone", "--local-addr")
    if given := [word for word in args.arguments if word.replace("_", "-").startswith(ours)]:
        raise UserError(f"node decides where the nodes meet: remove {given[0]}, or run torchrun")
    if not 1 <= args.port < 65536 or args.restarts < 0:
        raise UserError(
            f"--port must be from 1 to 65535 and --restarts at least 0, got {args.port} and "
            f"{args.restarts}"
        )
    address = args.address or socket.getfqdn()
    code = Node(args.run_dir, address, args.port, args.restarts, args.arguments).run()
    if code:
        raise SystemExit(code)
