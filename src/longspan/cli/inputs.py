"""Commands for data and settings: data, config."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from longspan.cli.parser import Commands
from longspan.cli.shared import JSON, add_run_arguments, builtin_name, check_nproc, split_items
from longspan.progress import ProgressBar, loading, waiting
from longspan.wording import counted

GROUP = "data and settings"
"""Where `longspan --help` lists them."""


def add(commands: Commands) -> None:
    for each in (_add_data, _add_config):
        each(commands)


def _add_data(commands: Commands) -> None:
    parser = commands.add(
        "data", "build and inspect token shards", "data info my-shards", group=GROUP
    )
    actions = parser.add_commands()
    build = actions.add(
        "build",
        "tokenize text into shards",
        "data build my-texts/ -o my-shards",
        verb=data_build,
    )
    build.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="text, .jsonl (also .gz, .zst, .bz2, .xz), .parquet or .arrow files, folders of them, "
        "or a saved Hugging Face dataset",
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
    for option, words in (
        ("--prompt", "field of a prompt, which has no loss (default: documents are --field)"),
        ("--answer", "field of the answer that follows the prompt (default: as --prompt)"),
        ("--loss", "field with spans of characters that have a loss (default: all have one)"),
        ("--chat", "field of messages for the tokenizer's chat template (default: no chat)"),
    ):
        build.add_argument(option, metavar="NAME", help=f"{words} (default: none)")
    build.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that encode (default: one for each core, up to 8, if the input is large)",
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
        verb=data_info,
    )
    info.add_argument("folder", type=Path, metavar="FOLDER", help="folder of token shards")
    info.add_argument(
        "--context",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="context of which to say what it cuts, repeatable (default: some usual ones)",
    )
    info.add_argument("--json", action="store_true", help=JSON)


def data_build(args: argparse.Namespace) -> None:
    from longspan.data.build import build
    from longspan.data.documents import Fields

    shown = time.monotonic()
    with ProgressBar("tokenizing") as bar:

        def show(documents: int, tokens: int, fraction: float) -> None:
            nonlocal shown
            now = time.monotonic()
            if now >= shown + (0.1 if bar.is_terminal else 30):
                shown = now
                bar.update(f"{documents:,} documents, {tokens:,} tokens", fraction)

        build(
            args.inputs,
            args.out,
            tokenizer=args.tokenizer,
            eos=args.eos,
            fields=Fields(args.field, args.loss, args.prompt, args.answer, args.chat),
            workers=args.workers,
            validation=args.validation,
            include=args.include,
            exclude=args.exclude,
            on_document=show,
            on_note=lambda text: bar.print(f"longspan: {text}"),
        )
    args.folder, args.context = args.out, []
    data_info(args)


def data_info(args: argparse.Namespace) -> None:
    from longspan.data.inspection import inspect_folder
    from longspan.data.lengths import picture

    with waiting(f"verifying {args.folder}"):
        info = inspect_folder(args.folder, args.context)
    if args.json:
        print(json.dumps(info))
        return
    print(f"{args.folder}: tokenizer {info['tokenizer']}, vocabulary size {info['vocab']:,}")
    for name, split in info["splits"].items():
        print(
            f"  {name:<10}  {split['tokens']:>14,} tokens  {split['documents']:>10,} documents  "
            f"longest {split['longest']:,}  {counted(split['shards'], 'shard')}, SHA-256 verified"
        )
        if (targets := split["targets"]) < split["tokens"]:
            print(f"{'':<14}{targets:>12,} of them have a loss ({targets / split['tokens']:.1%})")
        for line in picture(split) if name == "train" else ():
            print(line)


def _add_config(commands: Commands) -> None:
    parser = commands.add(
        "config",
        "show a complete run file, or the schema of run files",
        "config show run.toml",
        group=GROUP,
    )
    actions = parser.add_commands()
    show = actions.add(
        "show",
        "show every value of a run, and what follows from them",
        "config show run.toml train.micro_batch=4",
        verb=config_show,
    )
    add_run_arguments(show)
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
        verb=config_schema,
    )


def config_show(args: argparse.Namespace) -> None:
    from longspan.derived import batch_values, derived_values
    from longspan.runfile import dump_run, load_run

    check_nproc(args.nproc)
    file, overrides = split_items(args.items)
    if args.deepspeed:
        overrides.append("engine.name=deepspeed")  # so that unsupported keys are rejected
    if args.accelerate:
        overrides.append("engine.name=accelerate")
    run = load_run(file, overrides, builtin="cpu" if file else builtin_name(), world=args.nproc)
    ranks = run.layout.resolve(args.nproc)
    if args.deepspeed or args.accelerate:
        import yaml

        with loading():
            from longspan.device import choose_device, resolve
            from longspan.engines.settings import accelerate_settings, deepspeed_settings

        resolved = resolve(run, choose_device(run))
        if args.deepspeed:
            print(json.dumps(deepspeed_settings(resolved, ranks), indent=1))
        else:
            print(yaml.safe_dump(accelerate_settings(resolved, ranks)), end="")
        return
    from longspan.costs import count_parameters

    with loading():  # the reach of an attention pattern needs it
        if run.model.factory:
            derived = batch_values(run, ranks)
        else:
            parameters = {"parameters": f"{count_parameters(run.model):,}"}
            derived = parameters | derived_values(run, ranks)
    if args.json:
        print(json.dumps({"run": run.model_dump(mode="json"), "derived": derived}))
        return
    print(dump_run(run))
    for name, value in derived.items():
        print(f"# {name}: {value}")


def config_schema(args: argparse.Namespace) -> None:
    from longspan.config import AUTO, Run

    schema = Run.model_json_schema()
    layout = schema["properties"]["layout"]
    schema["properties"]["layout"] = {"anyOf": [{"const": AUTO}, layout]}
    print(json.dumps(schema, indent=1))
