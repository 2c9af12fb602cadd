"""The benchmarks: each measures on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.cli import bench_generation, bench_parallel
from longspan.cli.parser import Commands
from longspan.cli.shared import builtin_name
from longspan.progress import loading


def add(commands: Commands) -> None:
    bench = commands.add(
        "bench", "measure speed and memory on this machine", "bench attention", group="measuring"
    )
    actions = bench.add_commands()

    attention = actions.add(
        "attention",
        "compare dilated with dense and with branch-by-branch attention",
        "bench attention --lengths 4096 8192 --plot attention.svg",
        verb=bench_attention,
    )
    attention.add_argument(
        "--heads", type=int, metavar="N", help="number of heads (default: 4, GPU 12)"
    )
    attention.add_argument(
        "--head-dim", type=int, metavar="N", help="features per head (default: 32, GPU 64)"
    )
    for name, text in (
        ("lengths", "sequence lengths in tokens (default: 2048 … 32768, GPU 2048 … 1048576)"),
        ("segments", "segment lengths of the pattern (default: 256 … 4096, GPU 2048 … 32768)"),
        ("rates", "dilation rates of the pattern (default: 1 4 16, GPU 1 2 4 8 16)"),
    ):
        attention.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=text)
    attention.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")

    checkpoint = actions.add(
        "checkpoint",
        "measure how long training waits for a checkpoint",
        "bench checkpoint --gib 4",
        verb=bench_checkpoint,
    )
    checkpoint.add_argument(
        "--gib", type=float, default=1.0, metavar="SIZE", help="size of the checkpoint in GiB"
    )
    checkpoint.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the saved tensors"
    )

    bench_parallel.add(actions)
    bench_generation.add(actions)

    conversion = actions.add(
        "conversion",
        "convert a run by each method of `sketch`, and fine-tune it",
        "bench conversion runs/first --steps 200",
        verb=bench_conversion,
    )
    conversion.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="folder of a trained run; without it the built-in run is trained first",
    )
    conversion.add_argument(
        "--steps", type=int, default=200, metavar="N", help="number of fine-tuning steps"
    )
    conversion.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="F",
        help="fraction of the dense layers' parameters to keep",
    )

    engines = actions.add(
        "engines",
        "compare the engines on one run",
        "bench engines model.preset=tiny",
        verb=bench_engines,
    )

    exchange = actions.add(
        "exchange",
        "count the bytes that sequence (context) parallel ranks receive",
        "bench exchange --ranks 2 4",
        verb=bench_exchange,
    )
    exchange.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        default=[2, 4, 8, 16],
        help="numbers of processes to measure",
    )

    linear = actions.add(
        "linear",
        "compare nn.Linear, LowRankLinear and SKLinear",
        "bench linear --sizes 1024 4096 --fractions 0.5",
        verb=bench_linear,
    )
    linear.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="in and out features of the layers (default: 256 … 2048, GPU 1024 … 8192)",
    )
    linear.add_argument(
        "--tokens", type=int, metavar="N", help="number of input rows (default: 512, GPU 8192)"
    )
    linear.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        metavar="F",
        help="fractions of nn.Linear's parameters (default: 0.5 0.25 0.125)",
    )
    linear.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="measure SKLinear under torch.compile too (default: on a GPU)",
    )

    loss = actions.add(
        "loss",
        "compare chunked with plain cross-entropy",
        "bench loss --lengths 4096 --vocab 32000",
        verb=bench_loss,
    )
    loss.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="sequence lengths in tokens (default: 1024 … 8192, GPU 8192 … 131072)",
    )
    loss.add_argument(
        "--width", type=int, metavar="N", help="features per token (default: 64, GPU 768)"
    )
    loss.add_argument(
        "--vocab", type=int, metavar="N", help="size of the vocabulary (default: 50304)"
    )

    memory = actions.add(
        "memory",
        "compare planned with measured memory, on one GPU",
        "bench memory layout.shard=8 --gpus 8",
        verb=bench_memory,
    )
    memory.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="number of GPUs to plan for"
    )

    planned = actions.add(
        "step-memory",
        "compare planned with measured memory over many runs, on one GPU",
        "bench step-memory --json memory.json",
        verb=bench_step_memory,
    )
    planned.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help='device to train on; "cpu" tries tiny models (default: cuda)',
    )

    planner = actions.add(
        "planner",
        "compare the planner's model of time and memory with measured runs",
        "bench planner runs.csv --hardware h100 --json errors.json",
        verb=bench_planner,
    )
    planner.add_argument(
        "file", type=Path, metavar="RUNS.csv", help="measured runs; one half is fitted"
    )
    planner.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help="runs to predict (default: the other half of RUNS.csv)",
    )
    planner.add_argument(
        "--hardware",
        required=True,
        metavar="GPU",
        help="the GPU of the runs, a name or a TOML file as in `longspan launch`",
    )
    planner.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")

    step_time = actions.add(
        "step-time",
        "compare predicted with measured tokens/s, on one device",
        "bench step-time --json h200.json",
        "bench step-time --fit h200.json",
        verb=bench_step_time,
    )
    step_time.add_argument(
        "--steps", type=int, default=5, metavar="N", help="number of steps to time in each run"
    )
    step_time.add_argument(
        "--fit",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="fit the planner's constants to results of --json, of `bench train` too, and print "
        "them as TOML (default: measure)",
    )

    train = actions.add(
        "train",
        "measure tokens/s of training steps, beside a plain dense GPT",
        "bench train --only 125m --plot train.svg",
        "bench train --only 8K train.compile=false",
        "bench train --longest --only 32M",
        verb=bench_train,
    )
    train.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of steps to time in each run (default: 10, with --longest 1)",
    )
    train.add_argument(
        "--longest",
        action="store_true",
        help="run the longest contexts instead, for minutes each, in chunks or with offload",
    )
    train.add_argument(
        "--only",
        metavar="WORD,…",
        help="run the cases whose name contains one of these words (default: all)",
    )
    train.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")

    tracking = actions.add(
        "tracking",
        "measure what metrics and sinks cost of a step",
        "bench tracking track.log_every=1",
        verb=bench_tracking,
    )

    for each in (engines, memory, tracking, train):
        each.add_argument(
            "items", nargs="*", metavar="section.key=value", help="overrides of the measured run"
        )
    for each in bench.commands.values():
        each.add_argument(
            "--json",
            type=Path,
            metavar="FILE",
            help="write the figures as JSON; - prints them on stdout instead of the tables",
        )


def _setting(cpu: Any, gpu: Any, given: Mapping[str, Any]) -> Any:
    """Return a benchmark's setting for this machine, with the values given on the command line."""
    setting = gpu if builtin_name() == "cuda" else cpu
    return replace(setting, **{name: x for name, x in given.items() if x is not None})


def bench_attention(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.attention import CPU, GPU, bench_attention

    given = {
        "heads": args.heads,
        "head_dim": args.head_dim,
        "lengths": args.lengths and tuple(sorted(args.lengths)),
        "segment_lengths": args.segments and tuple(args.segments),
        "dilation_rates": args.rates and tuple(args.rates),
    }
    bench_attention(_setting(CPU, GPU, given), args.json, args.plot)


def bench_exchange(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.exchange import bench_exchange

    bench_exchange(args.ranks, args.json)


def bench_linear(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.linear import CPU, GPU, bench_linear

    given = {
        "sizes": args.sizes and tuple(sorted(args.sizes)),
        "tokens": args.tokens,
        "fractions": args.fractions and tuple(args.fractions),
        "compiled": args.compile,
    }
    bench_linear(_setting(CPU, GPU, given), args.json)


def bench_loss(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.loss import CPU, GPU, bench_loss

    lengths = args.lengths and tuple(args.lengths)
    given = {"lengths": lengths, "width": args.width, "vocab": args.vocab}
    bench_loss(_setting(CPU, GPU, given), args.json)


def bench_conversion(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.conversion import bench_conversion

    bench_conversion(args.run_dir, args.steps, args.keep, builtin_name(), args.json)


def bench_checkpoint(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.checkpoint import bench_checkpoint

    bench_checkpoint(args.gib, args.device, args.json)


def bench_engines(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.engines import bench_engines

    bench_engines(builtin_name(), args.items, args.json)


def bench_step_memory(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.step_memory import bench_step_memory

    bench_step_memory(args.device, args.json)


def bench_memory(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.memory import bench_memory

    bench_memory(args.gpus, args.items, args.json)


def bench_planner(args: argparse.Namespace) -> None:
    from longspan.hardware import device_of

    device = device_of(args.hardware)
    with loading():
        from longspan.benchmarks.planner import bench_planner

    bench_planner(args.file, args.test, device, args.json, args.plot)


def bench_step_time(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.step_time import bench_step_time, refit

    if args.fit:
        print(refit(args.fit), end="")
        return
    bench_step_time(builtin_name(), args.steps, args.json)


def bench_train(args: argparse.Namespace) -> None:
    # Before torch is loaded: the largest case fills a GPU of 141 GB but for 6, which must not be
    # lost between blocks of memory. The first of these variables would hide the others.
    if not any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("CUDA_", "HIP_", "")):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with loading():
        from longspan.benchmarks.train import bench_train

    words = [word for word in (args.only or "").split(",") if word]
    files = args.json, args.plot
    bench_train(builtin_name(), args.steps, words, args.items, *files, longest=args.longest)


def bench_tracking(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.tracking import bench_tracking

    bench_tracking(builtin_name(), args.items, args.json)
