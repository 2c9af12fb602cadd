"""The verbs. Each is a thin call into a room; none imports torch until it must.

Exit codes: 0 done; 2 the user's input is wrong; 3 stopped on request with a checkpoint saved (0
under a torchrun that restarts); 1 anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from longspan import __version__
from longspan.errors import Diverged, OutOfMemory, Stopped, UserError

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = _parse(argv)
    try:
        _check_text(vars(args))
        args.verb(args)
    except UserError as error:
        print(f"longspan: {error}", file=sys.stderr)
        return WRONG_INPUT
    except SystemExit as ended:  # by the processes that did the work
        return int(ended.code or DONE)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        # torchrun would start it again after any other code, and has no word for this one.
        return DONE if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else STOPPED
    except Diverged as error:
        print(f"longspan: {error}", file=sys.stderr)
        return FAILED
    except OutOfMemory as error:  # of one rank perhaps, and not of that which has the console
        from longspan.launching.local import leave_word

        if not leave_word(str(error)):
            print(f"longspan: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("longspan: interrupted; nothing more was saved", file=sys.stderr)
        return FAILED
    return DONE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    train = verbs.add_parser("train", help="train a model; the same command on any machine")
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
    train.set_defaults(verb=_train)

    verify = verbs.add_parser(
        "verify", help="show that a layout computes what one process does, on your run file"
    )
    _add_run_arguments(verify)
    verify.add_argument("--nproc", type=int, metavar="N", help="processes (the axes' product)")
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (5)")
    verify.set_defaults(verb=_verify)

    drill = verbs.add_parser(
        "drill", help="break a run on purpose, resume it, and see whether anything was lost"
    )
    _add_run_arguments(drill)
    drill.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (2)")
    drill.add_argument("--faults", type=int, default=20, help="how often to break it (20)")
    drill.add_argument("--seed", type=int, default=0, help="which faults, and when (0)")
    drill.set_defaults(verb=_drill)

    generate = verbs.add_parser("generate", help="continue a prompt with a trained model")
    generate.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--tokens", type=int, default=200, help="at most this many (200)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    generate.add_argument("--top-p", type=float, default=0.95, help="nucleus (0.95)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--json", action="store_true", help="print the result as JSON")
    generate.set_defaults(verb=_generate)

    sketched = verbs.add_parser(
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
    sketched.set_defaults(verb=_sketch)

    data = verbs.add_parser("data", help="build and inspect token shards")
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
    build.set_defaults(verb=_data_build)
    info = data_verbs.add_parser("info", help="describe a folder of shards and check its files")
    info.add_argument("folder", type=Path, metavar="FOLDER")
    info.add_argument("--json", action="store_true", help="print the result as JSON")
    info.set_defaults(verb=_data_info)

    bench = verbs.add_parser("bench", help="measure speed and memory on this machine")
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
    attention.set_defaults(verb=_bench_attention)
    exchange = bench_verbs.add_parser(
        "exchange", help="the bytes that ranks sharing a sequence send one another, counted"
    )
    exchange.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[2, 4, 8, 16])
    exchange.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    exchange.set_defaults(verb=_bench_exchange)
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
    linear.set_defaults(verb=_bench_linear)

    export = verbs.add_parser("export", help="write a run's weights as a Hugging Face folder")
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    export.add_argument("--step", type=int, help="of this checkpoint (the newest)")
    export.set_defaults(verb=_export)

    kept = verbs.add_parser("checkpoint", help="list, check or remove the checkpoints of a run")
    kept_verbs = kept.add_subparsers(required=True, metavar="ls|verify|rm")
    for name, help_text, checked in (
        ("ls", "what there is", False),
        ("verify", "read every byte of them; exit code 1 where one is damaged", True),
    ):
        verb = kept_verbs.add_parser(name, help=help_text)
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        verb.set_defaults(verb=_checkpoint_list, checked=checked)
    rm = kept_verbs.add_parser("rm", help="remove some, but never the last whole one")
    rm.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    rm.add_argument("steps", type=int, nargs="+", metavar="STEP")
    rm.set_defaults(verb=_checkpoint_rm)

    config = verbs.add_parser("config", help="show a run file in full, or its schema")
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
    show.set_defaults(verb=_config_show)
    schema = config_verbs.add_parser("schema", help="the JSON schema of a run file")
    schema.set_defaults(verb=_config_schema)
    return parser


def _check_text(values: Mapping[str, object]) -> None:
    """Arguments that are not UTF-8 arrive with lone surrogates, which no file can hold."""
    for value in values.values():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"the argument {str(text)!r} is not UTF-8 text") from error


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and any number of overrides, for example train.steps=100",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _split_items(items: Sequence[str]) -> tuple[Path | None, list[str]]:
    files = [item for item in items if "=" not in item]
    if len(files) > 1:
        raise UserError(f"expected one run file, got {', '.join(files)}")
    return (Path(files[0]) if files else None), [item for item in items if "=" in item]


def _builtin_name() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _train(args: argparse.Namespace) -> None:
    from longspan.launching.local import join_launcher
    from longspan.parallel.world import world_of_environment
    from longspan.runfile import load_run, new_run_dir, saved_run_file

    join_launcher()
    world = world_of_environment()
    if args.nproc is not None and (args.nproc < 1 or world.size > 1):
        raise UserError(
            f"--nproc must be at least 1, got {args.nproc}"
            if args.nproc < 1
            else f"--nproc {args.nproc} within a world of {world.size} processes: leave it out"
        )
    if args.restarts < 0 or (args.restarts and (args.nproc or 1) < 2):
        raise UserError(
            f"--restarts is a number from 0 on and goes with --nproc of at least 2, got "
            f"{args.restarts}; torchrun has --max-restarts"
        )
    file, overrides = _split_items(args.items)
    if file is None and args.resume:
        file = saved_run_file(args.resume)
    run = load_run(
        file,
        overrides,
        builtin="cpu" if file else _builtin_name(),
        world=args.nproc or world.size,
    )
    if world.size > 1 and not (args.resume or args.run_dir):
        raise UserError("several processes need one folder: give --run-dir or --resume")
    run_dir = args.resume or args.run_dir or new_run_dir(Path("runs"), file)
    if args.nproc is not None and args.nproc > 1:
        _train_in_processes(args, run_dir)
        return

    from longspan.training import train

    result = train(run, run_dir, resume=args.resume is not None, world=world)
    if not world.is_main:
        return
    if args.json:
        print(json.dumps(asdict(result)))
        return
    if result.sample is not None:
        print(f"\nsample:\n{result.sample}\n")
    if result.validation_loss is not None:
        print(
            f"validation loss {result.validation_loss:.4f} nats per token; "
            f"{result.baseline} {result.baseline_loss:.4f} on the same tokens"
        )
    print(f"run folder: {result.run_dir}")


def _verify(args: argparse.Namespace) -> None:
    from longspan.verify import verify

    file, overrides = _split_items(args.items)
    builtin = "cpu" if file else _builtin_name()
    report = verify(file, overrides, builtin=builtin, nproc=args.nproc, steps=args.steps)
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.agrees:
        raise SystemExit(FAILED)


def _train_in_processes(args: argparse.Namespace, run_dir: Path) -> None:
    import signal

    from longspan.launching.local import FORWARDED, run_processes
    from longspan.tracking import HISTORY, History, cause_of_end
    from longspan.training.folder import check_run_folder

    check_run_folder(run_dir, resume=args.resume is not None)
    program = [sys.executable, "-m", "longspan", "train", *args.items]
    options = ["--json"] if args.json else []
    where, left = ["--resume" if args.resume else "--run-dir", str(run_dir)], args.restarts
    heard: list[int] = []
    if left:
        for number in FORWARDED:  # between two starts as well
            signal.signal(number, lambda number, _: heard.append(number))
    while True:
        command = [*program, *where, *options]
        code = run_processes(command, args.nproc, run_dir / "logs", heard=heard)
        if code != FAILED or left == 0 or heard or not (run_dir / "run.toml").exists():
            break
        cause = cause_of_end(History(run_dir / HISTORY).lines()) or ""
        if cause.startswith(Diverged.__name__):  # and would again
            break
        left -= 1
        print(f"longspan: starting again, then {left} more times", file=sys.stderr)
        where = ["--resume", str(run_dir)]
    if code != DONE:
        raise SystemExit(code)


def _drill(args: argparse.Namespace) -> None:
    from longspan.drill import drill

    file, overrides = _split_items(args.items)
    report = drill(
        file,
        overrides,
        builtin="cpu" if file else _builtin_name(),
        nproc=args.nproc,
        faults=args.faults,
        seed=args.seed,
    )
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.is_fine:
        raise SystemExit(FAILED)


def _generate(args: argparse.Namespace) -> None:
    from longspan.training.generation import complete_from_run

    text = complete_from_run(
        args.run_dir,
        args.prompt,
        count=args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    print(json.dumps({"text": text}) if args.json else text)


def _sketch(args: argparse.Namespace) -> None:
    from longspan.training.folder import check_run_folder
    from longspan.training.sketch_search import Search
    from longspan.training.sketching import convert, open_trained

    if not 0 < args.keep <= 1:
        raise UserError(f"--keep is a share above 0 and at most 1, got {args.keep}")
    for name in ("terms", "calibrate", "swaps"):
        least = int(name == "terms")
        if getattr(args, name) < least:
            raise UserError(f"--{name} is a number from {least} on, got {getattr(args, name)}")
    if args.method == "svd" and args.terms > 1:
        raise UserError("--terms goes with --method least_squares or sketch; svd has one")
    if args.method == "sketch" and args.calibrate:
        raise UserError("--calibrate goes with --method svd or least_squares; sketch fits nothing")
    how = {"method": args.method, "layers": args.layers, "terms": args.terms}
    how["calibrate"] = args.calibrate
    if args.out is not None:
        check_run_folder(args.out, resume=False)
    trained, found = open_trained(args.run_dir), None
    if args.search:
        found = Search(trained, args.run_dir / f"sketch-{args.method}", **how).run(
            args.keep, args.swaps
        )
    ranks = found.ranks if found else None
    result = convert(trained, args.out, keep=args.keep, ranks=ranks, **how)
    if args.json:
        search = {"search": found.as_dict()} if found else {}
        print(json.dumps({**result.as_dict(), **search}))
        return
    print("\n".join(str(part) for part in (found, result) if part))


def _data_build(args: argparse.Namespace) -> None:
    from longspan.data.build import build

    build(
        args.inputs,
        args.out,
        tokenizer=args.tokenizer,
        field_name=args.field,
        validation=args.validation,
    )
    args.folder = args.out
    _data_info(args)


def _data_info(args: argparse.Namespace) -> None:
    from longspan.data.shards import inspect_folder

    info = inspect_folder(args.folder)
    if args.json:
        print(json.dumps(info))
        return
    print(f"{args.folder}: tokenizer {info['tokenizer']}, {info['vocab']:,} tokens of vocabulary")
    for name, split in info["splits"].items():
        print(
            f"  {name:<10}  {split['tokens']:>14,} tokens  {split['documents']:>10,} documents  "
            f"longest {split['longest']:,}  {split['shards']} shard(s), SHA-256 right"
        )


def _bench_attention(args: argparse.Namespace) -> None:
    from dataclasses import replace

    from longspan.benchmarks.attention import CPU, GPU, bench_attention

    given = {
        "heads": args.heads,
        "head_dim": args.head_dim,
        "lengths": args.lengths and tuple(sorted(args.lengths)),
        "segment_lengths": args.segments and tuple(args.segments),
        "dilation_rates": args.rates and tuple(args.rates),
    }
    setting = GPU if _builtin_name() == "cuda" else CPU
    setting = replace(setting, **{name: x for name, x in given.items() if x is not None})
    bench_attention(setting, args.json, args.plot)


def _bench_exchange(args: argparse.Namespace) -> None:
    from longspan.benchmarks.exchange import bench_exchange

    bench_exchange(args.ranks, args.json)


def _bench_linear(args: argparse.Namespace) -> None:
    from dataclasses import replace

    from longspan.benchmarks.linear import CPU, GPU, bench_linear

    given = {
        "sizes": args.sizes and tuple(sorted(args.sizes)),
        "tokens": args.tokens,
        "shares": args.shares and tuple(args.shares),
        "compiled": args.compile,
    }
    setting = GPU if _builtin_name() == "cuda" else CPU
    setting = replace(setting, **{name: x for name, x in given.items() if x is not None})
    bench_linear(setting, args.json)


def _export(args: argparse.Namespace) -> None:
    from longspan.training.huggingface import export

    print(export(args.run_dir, args.out, step=args.step))


def _checkpoint_list(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    from longspan.checkpoint.listing import listed

    found = listed(args.run_dir / "checkpoints", checked=args.checked)
    if args.json:
        print(json.dumps([asdict(entry) for entry in found]))
    for entry in [] if args.json else found:
        fine = "whole" if args.checked else ""
        size = f"{entry.bytes / 2**20:,.1f} MiB"
        print(f"{entry.name:<22}{size:>14}  {entry.ranks} ranks  {entry.problem or fine}".rstrip())
    bad = [e for e in found if e.problem is not None and not e.name.startswith("bad-")]
    if args.checked and bad:
        raise SystemExit(FAILED)


def _checkpoint_rm(args: argparse.Namespace) -> None:
    from longspan.checkpoint.listing import remove_steps

    remove_steps(args.run_dir / "checkpoints", args.steps)


def _config_show(args: argparse.Namespace) -> None:
    from longspan.config import derived_values
    from longspan.runfile import dump_run, load_run

    if args.nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {args.nproc}")
    file, overrides = _split_items(args.items)
    if args.deepspeed:
        overrides.append("engine.name=deepspeed")  # with what that cannot do refused
    if args.accelerate:
        overrides.append("engine.name=accelerate")
    run = load_run(file, overrides, builtin="cpu" if file else _builtin_name(), world=args.nproc)
    if args.deepspeed or args.accelerate:
        import yaml

        from longspan.engines.settings import accelerate_settings, deepspeed_settings
        from longspan.training.device import choose_device, resolve

        settled = resolve(run, choose_device(run))
        if args.deepspeed:
            print(json.dumps(deepspeed_settings(settled, args.nproc), indent=1))
        else:
            print(yaml.safe_dump(accelerate_settings(settled, args.nproc)), end="")
        return
    from longspan.models import count_parameters

    derived = {"parameters": f"{count_parameters(run.model):,}", **derived_values(run, args.nproc)}
    if args.json:
        print(json.dumps({"run": run.model_dump(mode="json"), "derived": derived}))
        return
    print(dump_run(run))
    for name, value in derived.items():
        print(f"# {name}: {value}")


def _config_schema(args: argparse.Namespace) -> None:
    from longspan.config import Run

    print(json.dumps(Run.model_json_schema(), indent=1))
