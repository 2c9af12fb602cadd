"""What may stand on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from longspan import __version__
from longspan.cli import verbs


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Like parse_args, but overrides may stand after options too."""
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
        epilog="Without RUN.toml a verb uses the built-in run for this machine.",
    )
    parser.add_argument("--version", action="version", version=f"longspan {__version__}")
    # As `deepspeed` starts a module; the environment says the same.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    kinds = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    train = kinds.add_parser("train", help="train a model; the same command on any machine")
    _add_run_arguments(train)
    where = train.add_mutually_exclusive_group()
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for a new run")
    where.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on with the run in DIR from its newest checkpoint; with its own run file unless "
        "RUN.toml is given, and from the start where it has no checkpoint",
    )
    train.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="start N processes on this machine; under torchrun the environment says it",
    )
    train.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --nproc: resume up to N times after a process has failed (0)",
    )
    train.set_defaults(verb=verbs.train)

    plan = kinds.add_parser("plan", help="say what a run takes, before it runs")
    _add_run_arguments(plan)
    plan.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="on N GPUs; unless given, on as many devices of this machine's kind as the layout has",
    )
    plan.set_defaults(verb=verbs.plan)

    verify = kinds.add_parser(
        "verify", help="show that a layout computes what one process does, on your run file"
    )
    _add_run_arguments(verify)
    verify.add_argument("--nproc", type=int, metavar="N", help="processes (the axes' product)")
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (5)")
    verify.set_defaults(verb=verbs.verify)

    drill = kinds.add_parser(
        "drill", help="break a run on purpose, resume it, and see whether anything was lost"
    )
    _add_run_arguments(drill)
    drill.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (2)")
    drill.add_argument("--faults", type=int, default=20, help="how often to break it (20)")
    drill.add_argument("--seed", type=int, default=0, help="which faults, and when (0)")
    drill.set_defaults(verb=verbs.drill)

    generate = kinds.add_parser("generate", help="continue a prompt with a trained model")
    generate.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--tokens", type=int, default=200, help="at most this many (200)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    generate.add_argument("--top-p", type=float, default=0.95, help="nucleus (0.95)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--json", action="store_true", help="print the result as JSON")
    generate.set_defaults(verb=verbs.generate)

    sketched = kinds.add_parser(
        "sketch", help="store a trained run's linear layers in fewer numbers, and say what it costs"
    )
    sketched.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    sketched.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="folder for the new run; or only a report",
    )
    sketched.add_argument("--keep", type=float, default=0.5, help="share of the numbers (0.5)")
    sketched.add_argument(
        "--method",
        choices=["svd", "least_squares", "sketch"],
        default="svd",
        help="low-rank layers by SVD; sketched ones by least squares, or by the raw sketch (svd)",
    )
    sketched.add_argument(
        "--layers", default="*", metavar="PATTERN", help="names such as blocks.*.mlp.* (all)"
    )
    sketched.add_argument("--terms", type=int, default=1, help="of sketched layers (1)")
    sketched.add_argument(
        "--calibrate", type=int, default=0, metavar="N", help="fit to N training samples (0)"
    )
    sketched.add_argument(
        "--search",
        action="store_true",
        help="find ranks for each layer that store --keep of all of them together; goes on with "
        "what it has measured before, in RUN_DIR/sketch-METHOD",
    )
    sketched.add_argument(
        "--swaps", type=int, default=20, metavar="N", help="of the search, at its end (20)"
    )
    sketched.add_argument("--json", action="store_true", help="print the result as JSON")
    sketched.set_defaults(verb=verbs.sketch)

    data = kinds.add_parser("data", help="build and inspect token shards")
    data_verbs = data.add_subparsers(required=True, metavar="build|info")
    build = data_verbs.add_parser("build", help="make token shards from text")
    build.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="a text file, a folder of them, a .jsonl file, or a saved Hugging Face dataset",
    )
    build.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER")
    build.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizers JSON (bytes)")
    build.add_argument("--field", default="text", help="the text's key in JSONL and datasets")
    build.add_argument(
        "--validation", type=float, default=0.05, help="share of documents for validation (0.05)"
    )
    build.add_argument("--json", action="store_true", help="print the result as JSON")
    build.set_defaults(verb=verbs.data_build)
    info = data_verbs.add_parser("info", help="describe a folder of shards and check its files")
    info.add_argument("folder", type=Path, metavar="FOLDER")
    info.add_argument("--json", action="store_true", help="print the result as JSON")
    info.set_defaults(verb=verbs.data_info)

    bench = kinds.add_parser("bench", help="measure speed and memory on this machine")
    bench_verbs = bench.add_subparsers(required=True, metavar="attention|exchange|linear")
    attention = bench_verbs.add_parser(
        "attention", help="dilated against dense attention and the plain branch-by-branch one"
    )
    attention.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    attention.add_argument("--plot", type=Path, metavar="FILE", help="draw them as an SVG file")
    attention.add_argument("--heads", type=int)
    attention.add_argument("--head-dim", type=int)
    for name, help_text in (
        ("lengths", "sequence lengths, in tokens"),
        ("segments", "segment lengths of the dilated pattern"),
        ("rates", "its dilation rates"),
    ):
        attention.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=help_text)
    attention.set_defaults(verb=verbs.bench_attention)
    exchange = bench_verbs.add_parser(
        "exchange", help="the bytes that ranks sharing a sequence send one another, counted"
    )
    exchange.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[2, 4, 8, 16])
    exchange.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    exchange.set_defaults(verb=verbs.bench_exchange)
    linear = bench_verbs.add_parser("linear", help="nn.Linear against LowRankLinear and SKLinear")
    linear.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="inputs and outputs of a layer"
    )
    linear.add_argument("--tokens", type=int, metavar="N", help="rows of the input")
    linear.add_argument(
        "--shares",
        type=float,
        nargs="+",
        metavar="F",
        help="shares of nn.Linear's numbers to store (0.5 0.25 0.125)",
    )
    linear.add_argument(
        "--compile", action="store_true", default=None, help="with torch.compile too, as on CUDA"
    )
    linear.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    linear.set_defaults(verb=verbs.bench_linear)

    export = kinds.add_parser("export", help="write a run's weights as a Hugging Face folder")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    export.add_argument("--step", type=int, help="of this checkpoint (the newest)")
    export.set_defaults(verb=verbs.export)

    kept = kinds.add_parser("checkpoint", help="list, check or remove the checkpoints of a run")
    kept_verbs = kept.add_subparsers(required=True, metavar="ls|verify|rm")
    for name, help_text, checked in (
        ("ls", "what there is", False),
        ("verify", "read every byte of them; exit code 1 where one is damaged", True),
    ):
        verb = kept_verbs.add_parser(name, help=help_text)
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        verb.set_defaults(verb=verbs.checkpoint_list, checked=checked)
    rm = kept_verbs.add_parser("rm", help="remove some, but never the last whole one")
    rm.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    rm.add_argument("steps", type=int, nargs="+", metavar="STEP")
    rm.set_defaults(verb=verbs.checkpoint_rm)

    config = kinds.add_parser("config", help="show a run file in full, or its schema")
    config_verbs = config.add_subparsers(required=True, metavar="show|schema")
    show = config_verbs.add_parser("show", help="every value, defaults included, and what follows")
    _add_run_arguments(show)
    show.add_argument("--nproc", type=int, default=1, metavar="N", help="for N processes (1)")
    of_engine = show.add_mutually_exclusive_group()
    of_engine.add_argument(
        "--deepspeed", action="store_true", help="DeepSpeed's configuration of it, as JSON"
    )
    of_engine.add_argument(
        "--accelerate", action="store_true", help="Accelerate's configuration of it, as YAML"
    )
    show.set_defaults(verb=verbs.config_show)
    schema = config_verbs.add_parser("schema", help="the JSON schema of a run file")
    schema.set_defaults(verb=verbs.config_schema)
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and any number of overrides, for example train.steps=100",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
