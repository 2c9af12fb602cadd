"""The benchmark of generation."""

from __future__ import annotations

import argparse
from dataclasses import replace

from longspan.cli.parser import Commands
from longspan.cli.shared import builtin_name
from longspan.progress import loading


def add(actions: Commands) -> None:
    parser = actions.add(
        "generate",
        "measure decoding with a full KV cache, beside transformers",
        "bench generate --preset 125m --lengths 8192 65536",
        verb=bench_generate,
    )
    parser.add_argument(
        "--preset", metavar="NAME", help="shape of the model (default: tiny, GPU 1.3b)"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="sequence lengths in tokens (default: 1024 4096, GPU 8192 131072 1048576)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="number of tokens to time (default: 50, GPU 64)"
    )
    parser.add_argument(
        "--prefill",
        type=int,
        metavar="N",
        help="longest sequence whose prompt runs through the model; the KV cache of a longer one "
        "is filled with random rows (default: 4096, GPU 131072)",
    )


def bench_generate(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.generate import CPU, GPU, bench_generate

    given = {
        "preset": args.preset,
        "lengths": args.lengths and tuple(sorted(args.lengths)),
        "tokens": args.tokens,
        "prefill": args.prefill,
    }
    setting = GPU if builtin_name() == "cuda" else CPU
    known = {name: value for name, value in given.items() if value is not None}
    bench_generate(replace(setting, **known), args.json)
