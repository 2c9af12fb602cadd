"""Parses the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longspan import __version__
from longspan.cli import verbs

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments like `parse_args`, but allow overrides after options too."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "items") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.items = [*args.items, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longspan",
        description="Train long-context transformers from one run file.",
        epilog="Without RUN.toml a command uses the built-in run for this machine.",
    )
    parser.add_argument("--version", action="version", version=f"longspan {__version__}")
    # The `deepspeed` launcher passes it; the environment holds the same value.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    _add_running(commands)
    _add_trained(commands)
    _add_data(commands)
    _add_bench(commands)
    _add_checkpoint(commands)
    _add_config(commands)
    return parser


def _add_running(commands: Commands) -> None:
    """Add the commands that take a run file: train, plan, verify, drill."""
    train = commands.add_parser("train", help="train a model, on one process or many")
    _add_run_arguments(train)
    where = train.add_mutually_exclusive_group()
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for a new run")
    where.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="resume the run in DIR from its newest checkpoint, or start it if there is none; uses "
        "the run file in DIR unless RUN.toml is given",
    )
    train.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N processes on this machine; not needed under torchrun",
    )
    train.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --nproc: resume up to N times after a process fails (0)",
    )
    train.set_defaults(verb=verbs.train)

    plan = commands.add_parser("plan", help="predict parameters, FLOPs and memory of a run")
    _add_run_arguments(plan)
    plan.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs; by default as many devices of this machine as the layout needs",
    )
    plan.set_defaults(verb=verbs.plan)

    verify = commands.add_parser(
        "verify", help="check that a layout computes the same as one process"
    )
    _add_run_arguments(verify)
    verify.add_argument("--nproc", type=int, metavar="N", help="processes (product of the axes)")
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (5)")
    verify.set_defaults(verb=verbs.verify)

    drill = commands.add_parser(
        "drill", help="inject faults into a run, resume it, and check that nothing is lost"
    )
    _add_run_arguments(drill)
    drill.add_argument("--nproc", type=int, default=2, metavar="N", help="number of processes (2)")
    drill.add_argument("--faults", type=int, default=20, help="number of faults to inject (20)")
    drill.add_argument("--seed", type=int, default=0, help="seed for which faults occur when (0)")
    drill.set_defaults(verb=verbs.drill)


def _add_trained(commands: Commands) -> None:
    """Add the commands that take a trained run: generate, sketch, export."""
    generate = commands.add_parser("generate", help="generate text with a trained model")
    generate.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--tokens", type=int, default=200, help="maximum new tokens (200)")
    generate.add_argument(
        "--temperature", type=float, default=0.8, help="0 is greedy decoding (0.8)"
    )
    generate.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling (0.95)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--json", action="store_true", help="print the result as JSON")
    generate.set_defaults(verb=verbs.generate)

    sketched = commands.add_parser(
        "sketch", help="compress the linear layers of a trained run, and report the loss"
    )
    sketched.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    sketched.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="folder for the new run; without it, only report",
    )
    sketched.add_argument("--keep", type=float, default=0.5, help="fraction of parameters (0.5)")
    sketched.add_argument(
        "--method",
        choices=["svd", "least_squares", "sketch"],
        default="svd",
        help="low-rank layers by SVD; sketched layers by least squares or by the raw sketch (svd)",
    )
    sketched.add_argument(
        "--layers",
        default="*",
        metavar="PATTERN",
        help="names such as blocks.*.mlp.* (all)",
    )
    sketched.add_argument("--terms", type=int, default=1, help="terms per sketched layer (1)")
    sketched.add_argument(
        "--calibrate", type=int, default=0, metavar="N", help="fit to N training samples (0)"
    )
    sketched.add_argument(
        "--search",
        action="store_true",
        help="search for a rank per layer, with --keep of the parameters in total; continues from "
        "earlier measurements in RUN_DIR/sketch-METHOD",
    )
    sketched.add_argument(
        "--swaps",
        type=int,
        default=20,
        metavar="N",
        help="rank swaps that end the search (20)",
    )
    sketched.add_argument("--json", action="store_true", help="print the result as JSON")
    sketched.set_defaults(verb=verbs.sketch)

    export = commands.add_parser("export", help="export a run's weights to a Hugging Face folder")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    export.add_argument("--step", type=int, help="step of the checkpoint (the newest)")
    export.set_defaults(verb=verbs.export)


def _add_data(commands: Commands) -> None:
    data = commands.add_parser("data", help="build and inspect token shards")
    data_verbs = data.add_subparsers(required=True, metavar="build|info")
    build = data_verbs.add_parser("build", help="tokenize text into shards")
    build.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="a text file, a folder of text files, a .jsonl file, or a saved Hugging Face dataset",
    )
    build.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER")
    build.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (bytes)")
    build.add_argument("--field", default="text", help="text field in JSONL and datasets (text)")
    build.add_argument(
        "--validation", type=float, default=0.05, help="fraction of documents for validation (0.05)"
    )
    build.add_argument("--json", action="store_true", help="print the result as JSON")
    build.set_defaults(verb=verbs.data_build)
    info = data_verbs.add_parser("info", help="describe a folder of shards and verify its files")
    info.add_argument("folder", type=Path, metavar="FOLDER")
    info.add_argument("--json", action="store_true", help="print the result as JSON")
    info.set_defaults(verb=verbs.data_info)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure speed and memory on this machine")
    benchmarks = "attention|checkpoint|conversion|engines|exchange|linear|loss|memory"
    bench_verbs = bench.add_subparsers(required=True, metavar=benchmarks)
    attention = bench_verbs.add_parser(
        "attention", help="compare dilated with dense and with branch-by-branch attention"
    )
    attention.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    attention.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")
    attention.add_argument("--heads", type=int)
    attention.add_argument("--head-dim", type=int)
    for name, help_text in (
        ("lengths", "sequence lengths, in tokens"),
        ("segments", "segment lengths of the dilated pattern"),
        ("rates", "dilation rates of the dilated pattern"),
    ):
        attention.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=help_text)
    attention.set_defaults(verb=verbs.bench_attention)
    exchange = bench_verbs.add_parser(
        "exchange", help="count the bytes that sequence (context) parallel ranks communicate"
    )
    exchange.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[2, 4, 8, 16])
    exchange.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    exchange.set_defaults(verb=verbs.bench_exchange)
    linear = bench_verbs.add_parser("linear", help="compare nn.Linear, LowRankLinear and SKLinear")
    linear.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="in and out features of a layer"
    )
    linear.add_argument("--tokens", type=int, metavar="N", help="number of input rows")
    linear.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        metavar="F",
        help="fractions of nn.Linear's parameters (0.5 0.25 0.125)",
    )
    linear.add_argument(
        "--compile", action="store_true", default=None, help="also with torch.compile, as on CUDA"
    )
    linear.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    linear.set_defaults(verb=verbs.bench_linear)
    loss = bench_verbs.add_parser("loss", help="compare chunked with plain cross-entropy")
    loss.add_argument("--lengths", type=int, nargs="+", metavar="N", help="number of tokens")
    loss.add_argument("--width", type=int, metavar="N", help="features per token")
    loss.add_argument("--vocab", type=int, metavar="N", help="size of the vocabulary (50304)")
    loss.set_defaults(verb=verbs.bench_loss)
    conversion = bench_verbs.add_parser(
        "conversion", help="convert a run by each method of `sketch`, and fine-tune it"
    )
    conversion.add_argument(
        "run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="a trained run (the built-in one)"
    )
    conversion.add_argument("--steps", type=int, default=200, help="fine-tuning steps (200)")
    conversion.add_argument(
        "--keep", type=float, default=0.5, help="fraction of the dense parameters (0.5)"
    )
    conversion.set_defaults(verb=verbs.bench_conversion)
    saves = bench_verbs.add_parser(
        "checkpoint", help="measure how long training waits for a checkpoint"
    )
    saves.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint (1)")
    saves.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the tensors (cpu)"
    )
    saves.set_defaults(verb=verbs.bench_checkpoint)
    engines = bench_verbs.add_parser("engines", help="compare the engines on one run")
    engines.set_defaults(verb=verbs.bench_engines)
    memory = bench_verbs.add_parser(
        "memory", help="compare planned with measured memory, on one GPU"
    )
    memory.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs to plan for (1)")
    memory.set_defaults(verb=verbs.bench_memory)
    for each in (engines, memory):
        each.add_argument("items", nargs="*", metavar="section.key=value", help="overrides")
    for each in (loss, conversion, saves, engines, memory):
        each.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def _add_checkpoint(commands: Commands) -> None:
    checkpoint = commands.add_parser(
        "checkpoint", help="list, verify or remove the checkpoints of a run"
    )
    checkpoint_verbs = checkpoint.add_subparsers(required=True, metavar="ls|verify|rm")
    for name, help_text, checked in (
        ("ls", "list checkpoints", False),
        ("verify", "verify every byte; the exit code is 1 if a checkpoint is corrupt", True),
    ):
        verb = checkpoint_verbs.add_parser(name, help=help_text)
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        verb.set_defaults(verb=verbs.checkpoint_list, checked=checked)
    rm = checkpoint_verbs.add_parser("rm", help="remove checkpoints, but never the last intact one")
    rm.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    rm.add_argument("steps", type=int, nargs="+", metavar="STEP")
    rm.set_defaults(verb=verbs.checkpoint_rm)


def _add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="show a complete run file, or its schema")
    config_verbs = config.add_subparsers(required=True, metavar="show|schema")
    show = config_verbs.add_parser("show", help="every value, and what follows from them")
    _add_run_arguments(show)
    show.add_argument("--nproc", type=int, default=1, metavar="N", help="number of processes (1)")
    engine = show.add_mutually_exclusive_group()
    engine.add_argument(
        "--deepspeed", action="store_true", help="print the DeepSpeed configuration as JSON"
    )
    engine.add_argument(
        "--accelerate", action="store_true", help="print the Accelerate configuration as YAML"
    )
    show.set_defaults(verb=verbs.config_show)
    schema = config_verbs.add_parser("schema", help="the JSON schema of run files")
    schema.set_defaults(verb=verbs.config_schema)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and any number of overrides, such as train.steps=100",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
