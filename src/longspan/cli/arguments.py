"""The commands and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from longspan import __version__
from longspan.cli import verbs
from longspan.cli.parser import Commands, Parser
from longspan.presets import MODELS

JSON = "print the result as JSON on stdout"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments like `parse_args`, but allow overrides after options too."""
    args, rest = build_parser().parse_known_args(argv)
    if rest and (not hasattr(args, "items") or any(item.startswith("-") for item in rest)):
        args.parser.reject(rest)
    if rest:
        args.items = [*args.items, *rest]
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
    _add_training(commands)
    _add_trained(commands)
    _add_inputs(commands)
    _add_bench(commands)
    _add_shell(commands)
    return parser


def _add_training(commands: Commands) -> None:
    group = "training"
    init = commands.add(
        "init",
        "write a commented run file for this machine",
        "init --preset 125m -o run.toml",
        verb=verbs.init,
        group=group,
    )
    init.add_argument(
        "--preset",
        choices=list(MODELS),
        help="model size (default: tiny on a CPU, 125m on a GPU)",
    )
    init.add_argument(
        "--data", type=Path, metavar="FOLDER", help="folder of token shards (default: builtin)"
    )
    init.add_argument(
        "-o",
        "--out",
        default="run.toml",
        metavar="FILE",
        help="new run file, or - for stdout",
    )

    train = commands.add(
        "train",
        "train a model, on one process or many",
        "train run.toml train.steps=2000 --nproc 4",
        "train --resume runs/first",
        verb=verbs.train,
        group=group,
    )
    _add_run_arguments(train)
    where = train.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder for a new run (default: runs/ and the file's name and time)",
    )
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
        help="number of processes to start on this machine; not needed under torchrun (default: 1)",
    )
    train.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --nproc, how often to resume the run after a process has failed, or to replace "
        "that process while the others go on (layout.replicate > 1 on CPUs)",
    )

    plan = commands.add(
        "plan",
        "predict parameters, FLOPs and memory of a run",
        "plan run.toml --gpus 64",
        verb=verbs.plan,
        group=group,
    )
    _add_run_arguments(plan)
    plan.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs (default: as many devices of this machine as the layout needs)",
    )

    verify = commands.add(
        "verify",
        "check that a layout computes the same as one process",
        "verify run.toml layout.shard=2",
        verb=verbs.verify,
        group=group,
    )
    _add_run_arguments(verify)
    verify.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes (default: product of the layout's axes)",
    )
    verify.add_argument(
        "--steps", type=int, default=5, metavar="N", help="number of optimizer steps to compare"
    )

    drill = commands.add(
        "drill",
        "inject faults into a run and check that nothing is lost",
        "drill run.toml --nproc 2 --faults 20 --seed 7",
        verb=verbs.drill,
        group=group,
    )
    _add_run_arguments(drill)
    drill.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of processes to start (default: the product of the axes, at least 2)",
    )
    drill.add_argument(
        "--faults", type=int, default=20, metavar="N", help="number of faults to inject"
    )
    drill.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that selects the faults"
    )


def _add_trained(commands: Commands) -> None:
    group = "trained runs"
    generate = commands.add(
        "generate",
        "generate text with a trained model",
        "generate runs/first --prompt 'import ' --tokens 100",
        verb=verbs.generate,
        group=group,
    )
    _add_run_dir(generate)
    generate.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text that the model continues (required)"
    )
    generate.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="maximum number of new tokens"
    )
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0 is greedy decoding",
    )
    generate.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="nucleus sampling: sample from the most likely tokens with this total probability",
    )
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="seed for sampling")
    generate.add_argument("--json", action="store_true", help=JSON)

    sketch = commands.add(
        "sketch",
        "compress the linear layers of a trained run",
        "sketch runs/first runs/half --keep 0.5",
        verb=verbs.sketch,
        group=group,
    )
    _add_run_dir(sketch)
    sketch.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="new folder for the compressed run; without it the loss is only reported",
    )
    sketch.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="F",
        help="fraction of the layers' parameters to keep",
    )
    sketch.add_argument(
        "--method",
        choices=["svd", "least_squares", "sketch"],
        default="svd",
        help="low-rank layers by SVD, or sketched layers by least squares or by the raw sketch",
    )
    sketch.add_argument(
        "--layers",
        default="*",
        metavar="PATTERN",
        help="glob of layer names to compress, such as blocks.*.mlp.*",
    )
    sketch.add_argument(
        "--terms", type=int, default=1, metavar="N", help="number of terms per sketched layer"
    )
    sketch.add_argument(
        "--calibrate",
        type=int,
        default=0,
        metavar="N",
        help="number of training samples to fit the layers to",
    )
    sketch.add_argument(
        "--search",
        action="store_true",
        help="search for a rank per layer, with --keep of the parameters in total; continues from "
        "earlier measurements in RUN_DIR/sketch-METHOD",
    )
    sketch.add_argument(
        "--swaps",
        type=int,
        default=20,
        metavar="N",
        help="with --search, number of rank swaps to try at the end of the search",
    )
    sketch.add_argument("--json", action="store_true", help=JSON)

    export = commands.add(
        "export",
        "export a run's weights to a Hugging Face folder",
        "export runs/first llama-first",
        verb=verbs.export,
        group=group,
    )
    _add_run_dir(export)
    export.add_argument("out", type=Path, metavar="OUT", help="new folder for the exported model")
    export.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint to export (default: newest)"
    )
    export.add_argument("--json", action="store_true", help=JSON)

    checkpoint = commands.add(
        "checkpoint",
        "list, verify or remove the checkpoints of a run",
        "checkpoint ls runs/first",
        group=group,
    )
    actions = checkpoint.add_commands()
    for name, text, is_checked in (
        ("ls", "list checkpoints with their sizes", False),
        ("verify", "verify every byte; the exit code is 1 if a checkpoint is corrupt", True),
    ):
        action = actions.add(
            name, text, f"checkpoint {name} runs/first", verb=verbs.checkpoint_list
        )
        action.set_defaults(checked=is_checked)
        _add_run_dir(action)
        action.add_argument("--json", action="store_true", help=JSON)
    rm = actions.add(
        "rm",
        "remove checkpoints, but never the last intact one",
        "checkpoint rm runs/first 500",
        verb=verbs.checkpoint_rm,
    )
    _add_run_dir(rm)
    rm.add_argument(
        "steps", type=int, nargs="+", metavar="STEP", help="steps whose checkpoints to remove"
    )


def _add_inputs(commands: Commands) -> None:
    group = "data and settings"
    data = commands.add(
        "data", "build and inspect token shards", "data info my-shards", group=group
    )
    actions = data.add_commands()
    build = actions.add(
        "build",
        "tokenize text into shards",
        "data build my-texts/ -o my-shards",
        verb=verbs.data_build,
    )
    build.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="a text file, a folder of text files, a .jsonl file, or a saved Hugging Face dataset",
    )
    build.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="new folder for the shards (required)",
    )
    build.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json of Hugging Face, or a folder with one (default: a token per byte)",
    )
    build.add_argument(
        "--eos",
        metavar="TOKEN",
        help="end-of-text token of the tokenizer, as in '</s>' (default: found by its usual names)",
    )
    for option, verb in (("--include", "use only"), ("--exclude", "skip")):
        build.add_argument(
            option,
            action="append",
            default=[],
            metavar="GLOB",
            help=f"{verb} files of folders whose name matches, or with a slash their path",
        )
    build.add_argument(
        "--field", default="text", metavar="NAME", help="text field in JSONL and datasets"
    )
    build.add_argument(
        "--validation",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of documents for the validation split",
    )
    build.add_argument("--json", action="store_true", help=JSON)
    info = actions.add(
        "info",
        "describe a folder of shards and verify its files",
        "data info my-shards",
        verb=verbs.data_info,
    )
    info.add_argument("folder", type=Path, metavar="FOLDER", help="folder of token shards")
    info.add_argument("--json", action="store_true", help=JSON)

    config = commands.add(
        "config",
        "show a complete run file, or the schema of run files",
        "config show run.toml",
        group=group,
    )
    actions = config.add_commands()
    show = actions.add(
        "show",
        "show every value of a run, and what follows from them",
        "config show run.toml train.micro_batch=4",
        verb=verbs.config_show,
    )
    _add_run_arguments(show)
    show.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="number of processes to resolve -1 for"
    )
    engine = show.add_mutually_exclusive_group()
    engine.add_argument(
        "--deepspeed", action="store_true", help="print the DeepSpeed configuration as JSON"
    )
    engine.add_argument(
        "--accelerate", action="store_true", help="print the Accelerate configuration as YAML"
    )
    actions.add(
        "schema",
        "print the JSON schema of run files, for editors",
        "config schema > schema.json",
        verb=verbs.config_schema,
    )


def _add_bench(commands: Commands) -> None:
    bench = commands.add(
        "bench", "measure speed and memory on this machine", "bench attention", group="measuring"
    )
    actions = bench.add_commands()

    attention = actions.add(
        "attention",
        "compare dilated with dense and with branch-by-branch attention",
        "bench attention --lengths 4096 8192 --plot attention.svg",
        verb=verbs.bench_attention,
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
        verb=verbs.bench_checkpoint,
    )
    checkpoint.add_argument(
        "--gib", type=float, default=1.0, metavar="SIZE", help="size of the checkpoint in GiB"
    )
    checkpoint.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the saved tensors"
    )

    conversion = actions.add(
        "conversion",
        "convert a run by each method of `sketch`, and fine-tune it",
        "bench conversion runs/first --steps 200",
        verb=verbs.bench_conversion,
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
        verb=verbs.bench_engines,
    )

    exchange = actions.add(
        "exchange",
        "count the bytes that sequence (context) parallel ranks receive",
        "bench exchange --ranks 2 4",
        verb=verbs.bench_exchange,
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
        verb=verbs.bench_linear,
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
        verb=verbs.bench_loss,
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
        verb=verbs.bench_memory,
    )
    memory.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="number of GPUs to plan for"
    )

    for each in (engines, memory):
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


def _add_shell(commands: Commands) -> None:
    group = "shell"
    completion = commands.add(
        "completion",
        "print a script that completes commands in your shell",
        "completion bash >> ~/.bashrc",
        verb=verbs.completion,
        group=group,
    )
    completion.add_argument(
        "shell", choices=["bash", "zsh", "fish"], help="bash, zsh or fish", metavar="SHELL"
    )
    hidden = commands.add("_complete", "complete the last word of a line", group="")
    hidden.add_argument("line")
    hidden.set_defaults(verb=verbs.complete)


def _add_run_arguments(parser: Parser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and any number of overrides, such as train.steps=100 (default: the "
        "built-in run for this machine)",
    )
    parser.add_argument("--json", action="store_true", help=JSON)


def _add_run_dir(parser: Parser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key that checkpoints must be signed with (default: the run's checkpoint.key_file)",
    )
