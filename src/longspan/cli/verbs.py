"""The commands. Each is a thin call into a package; none imports torch before it needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import Diverged, UserError
from longspan.hardware import may_have_gpu
from longspan.progress import loading, waiting
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.config import Run
    from longspan.training import Result

DONE, FAILED = 0, 1
"""Exit codes of a command."""


def _split_items(items: Sequence[str]) -> tuple[Path | None, list[str]]:
    files = [item for item in items if "=" not in item]
    if len(files) > 1:
        raise UserError(
            f"expected one run file, got {', '.join(files)}; an override looks like train.steps=100"
        )
    return (Path(files[0]) if files else None), [item for item in items if "=" in item]


def _builtin_name(processes: int = 1) -> str:
    """Return the built-in run for this machine, on which each of `processes` needs a GPU."""
    if not may_have_gpu():
        return "cpu"
    with loading():
        import torch

    return "cuda" if torch.cuda.device_count() >= processes else "cpu"


def init(args: argparse.Namespace) -> None:
    from longspan.init import next_steps, render, starter_run, this_machine, write

    with loading() if (has_gpu := _builtin_name() == "cuda") else nullcontext():
        machine = this_machine(has_gpu=has_gpu)
    run = starter_run(args.preset, args.data, machine)
    text = render(run, machine)
    if args.out == "-":
        print(text, end="")
        return
    write(text, Path(args.out))
    print(next_steps(run, Path(args.out), machine))


def train(args: argparse.Namespace) -> None:
    from longspan.launching.local import SPARE, join_launcher, wait_as_spare
    from longspan.parallel.world import world_of_environment
    from longspan.runfile import load_run, new_run_dir, saved_run_file

    join_launcher()
    if SPARE in os.environ:
        import longspan.training  # noqa: F401  which takes seconds

        wait_as_spare()
    world = world_of_environment()
    if args.nproc is not None and (args.nproc < 1 or world.size > 1):
        raise UserError(
            f"--nproc must be at least 1, got {args.nproc}"
            if args.nproc < 1
            else f"--nproc cannot be used by one of {world.size} processes: remove it"
        )
    if args.restarts < 0 or (args.restarts and (args.nproc or 1) < 2):
        raise UserError(
            f"--restarts must be at least 0 and needs --nproc of at least 2, got {args.restarts}; "
            "with torchrun use --max-restarts"
        )
    file, overrides = _split_items(args.items)
    if file is None and args.resume:
        file = saved_run_file(args.resume)
    processes = args.nproc or world.size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    builtin = "cpu" if file else _builtin_name(here)
    run = load_run(file, overrides, builtin=builtin, world=processes)
    if world.size > 1 and not (args.resume or args.run_dir):
        raise UserError(f"{world.size} processes need one run folder: give --run-dir or --resume")
    run_dir = args.resume or args.run_dir or new_run_dir(Path("runs"), file)
    if args.nproc is not None and args.nproc > 1:
        _train_in_processes(args, run, run_dir)
        return

    with loading(quiet=not world.is_main):
        from longspan.training import train

    result = train(run, run_dir, resume=args.resume is not None, world=world)
    if not world.is_main:
        return
    try:
        _print_result(result, as_json=args.json)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads it, but the run is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_result(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)))
        return
    if result.sample is not None:
        print(f"\nsample:\n{result.sample}\n")
    if result.validation_loss is not None and result.baseline is not None:
        print(
            f"validation loss {result.validation_loss:.4f} nats per token; "
            f"{result.baseline} {result.baseline_loss:.4f} on the same tokens"
        )
    elif result.validation_loss is not None:
        print(f"validation loss {result.validation_loss:.6g}")
    print(f"run folder: {result.run_dir}")


def plan(args: argparse.Namespace) -> None:
    from longspan.runfile import load_run

    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {args.gpus}")
    file, overrides = _split_items(args.items)
    for_gpus = args.gpus is not None
    builtin = "cpu" if file else "cuda" if for_gpus else _builtin_name()
    given = load_run(file, overrides, builtin=builtin, world=None)
    if given.model.factory:
        raise UserError(
            "plan needs the decoder that a run file describes, but this run has model.factory = "
            f'"{given.model.factory}": its model is known to train, verify and drill'
        )
    if for_gpus and given.train.precision == "auto":
        overrides.append("train.precision=bf16")
    gpus = args.gpus if for_gpus else given.layout.min_world_size
    run = load_run(file, overrides, builtin=builtin, world=gpus)
    with loading():
        import torch

        from longspan.device import choose_device, resolve
        from longspan.planning import plan

    device = torch.device("cuda") if for_gpus else choose_device(run)
    with waiting(f"planning for {gpus:,} processes"):
        found = plan(resolve(run, device), gpus)
    print(json.dumps(found.as_dict()) if args.json else found)


def verify(args: argparse.Namespace) -> None:
    from longspan.runfile import load_run
    from longspan.verification import verify

    file, overrides = _split_items(args.items)
    builtin = "cpu"
    if file is None:
        layout = load_run(None, overrides, world=None).layout
        builtin = _builtin_name(args.nproc or layout.min_world_size)
    report = verify(file, overrides, builtin=builtin, nproc=args.nproc, steps=args.steps)
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.agrees:
        raise SystemExit(FAILED)


def _train_in_processes(args: argparse.Namespace, run: Run, run_dir: Path) -> None:
    from longspan.locking import owned
    from longspan.runfile import check_run_folder

    check_run_folder(run_dir, resume=args.resume is not None)
    with owned(run_dir) as lock:
        code = _train_with_restarts(args, run, run_dir, lock)
    if code != DONE:
        raise SystemExit(code)


def _train_with_restarts(args: argparse.Namespace, run: Run, run_dir: Path, lock: int) -> int:
    import signal

    from longspan.launching.local import run_processes
    from longspan.stop_signals import stop_signals
    from longspan.tracking import HISTORY, History, exit_reason

    program = [sys.executable, "-m", "longspan", "train", *args.items]
    options = ["--json"] if args.json else []
    restarts_left, received = args.restarts, list[int]()
    if restarts_left:
        for number in stop_signals():  # also between two starts
            signal.signal(number, lambda number, _: received.append(number))

    def may_replace(lost: Mapping[int, str]) -> bool:
        """Whether to replace lost ranks, for one of the restarts."""
        nonlocal restarts_left
        if restarts_left == 0 or not run_dir.exists():
            return False
        restarts_left -= 1
        for rank, reason in lost.items():
            print(f"longspan: rank {rank} {reason}", file=sys.stderr)
        ranks = ", ".join(map(str, lost))
        left = counted(restarts_left, "restart")
        print(f"longspan: replacing rank {ranks}; {left} left", file=sys.stderr)
        return True

    replaces = restarts_left > 0 and run.replaces_lost_ranks(args.nproc)
    replacement = [*program, "--resume", str(run_dir), *options]
    while True:
        resumes = args.resume or (run_dir / "run.toml").exists()
        command = [*program, "--resume" if resumes else "--run-dir", str(run_dir), *options]
        code = run_processes(
            command,
            args.nproc,
            run_dir / "logs",
            received=received,
            lock=lock,
            replacement=replacement if replaces else None,
            on_lost=may_replace,
        )
        if code != FAILED or restarts_left == 0 or received or not run_dir.exists():
            return code  # who removes a run's folder wants no other run in it
        cause = exit_reason(History(run_dir / HISTORY).events()) or ""
        if cause.startswith(Diverged.__name__):  # it would diverge again
            return code
        restarts_left -= 1
        print(f"longspan: restarting; {counted(restarts_left, 'restart')} left", file=sys.stderr)


def drill(args: argparse.Namespace) -> None:
    from longspan.drill import drill

    file, overrides = _split_items(args.items)
    report = drill(
        file,
        overrides,
        nproc=args.nproc,
        faults=args.faults,
        seed=args.seed,
    )
    print(json.dumps(report.as_dict()) if args.json else report)
    if not report.passed:
        raise SystemExit(FAILED)


def generate(args: argparse.Namespace) -> None:
    with loading():
        from longspan.generate import complete_from_run

    text, tokens, times = "", 0, list[float]()  # times: the prompt, then every token
    pieces = complete_from_run(
        args.run_dir,
        args.prompt,
        count=args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        key_file=args.key_file,
    )
    with waiting(f"loading {args.run_dir}"):
        first = list(islice(pieces, 1))
    try:
        for piece in chain(first, pieces):
            times.append(time.perf_counter())
            text, tokens = text + piece.text, piece.tokens
            if not args.json:
                print(piece.text, end="", flush=True)
    finally:  # also after Ctrl-C: what was generated is the result
        if times:
            print(json.dumps({"text": text}) if args.json else "", flush=True)
        if tokens > 1:
            prompt_s, rest_s = times[1] - times[0], times[tokens] - times[1]
            rate = f"then {(tokens - 1) / rest_s:,.1f} tok/s"
            print(f"{tokens} tokens: the first after {prompt_s:.2f} s, {rate}", file=sys.stderr)


def sketch(args: argparse.Namespace) -> None:
    from longspan.runfile import check_run_folder

    if not 0 < args.keep <= 1:
        raise UserError(f"--keep must be greater than 0 and at most 1, got {args.keep}")
    for name in ("terms", "calibrate", "swaps"):
        minimum = int(name == "terms")
        if (value := getattr(args, name)) < minimum:
            raise UserError(f"--{name} must be at least {minimum}, got {value}")
    if args.method == "svd" and args.terms > 1:
        raise UserError("--terms > 1 is not supported with --method svd: use least_squares")
    if args.method == "sketch" and args.calibrate:
        raise UserError("--calibrate has no effect with --method sketch: use svd or least_squares")
    how = {"method": args.method, "layers": args.layers, "terms": args.terms}
    how["calibrate"] = args.calibrate
    if args.out is not None:
        check_run_folder(args.out, resume=False)
    with loading():
        from longspan.sketch_run import convert, open_trained, search

    with waiting(f"loading {args.run_dir}"):
        trained, found = open_trained(args.run_dir, args.key_file), None
    if args.search:
        found = search(trained, keep=args.keep, swaps=args.swaps, **how)
    ranks = found.ranks if found else None
    with waiting("converting layers and measuring the validation loss"):
        result = convert(trained, args.out, keep=args.keep, ranks=ranks, **how)
    if args.json:
        searched = {"search": found.as_dict()} if found else {}
        print(json.dumps({**result.as_dict(), **searched}))
        return
    print("\n".join(str(part) for part in (found, result) if part))


def data_build(args: argparse.Namespace) -> None:
    from longspan.data.build import build

    started = shown = time.monotonic()
    with waiting("tokenizing") as status:

        def show(documents: int, tokens: int, fraction: float) -> None:
            nonlocal shown
            now = time.monotonic()
            if now < shown + (0.1 if status.console.is_terminal else 30):
                return
            shown = now
            text = f"tokenizing: {documents:,} documents, {tokens:,} tokens"
            if fraction:
                text += f", {fraction:.0%}, {(now - started) * (1 / fraction - 1):,.0f} s left"
            if status.console.is_terminal:
                status.update(text)
            else:
                print(text, file=sys.stderr)

        build(
            args.inputs,
            args.out,
            tokenizer=args.tokenizer,
            eos=args.eos,
            field_name=args.field,
            validation=args.validation,
            include=args.include,
            exclude=args.exclude,
            on_document=show,
            on_note=lambda text: status.console.print(f"longspan: {text}", markup=False),
        )
    args.folder = args.out
    data_info(args)


def data_info(args: argparse.Namespace) -> None:
    from longspan.data.verification import inspect_folder

    with waiting(f"verifying {args.folder}"):
        info = inspect_folder(args.folder)
    if args.json:
        print(json.dumps(info))
        return
    print(f"{args.folder}: tokenizer {info['tokenizer']}, vocabulary size {info['vocab']:,}")
    for name, split in info["splits"].items():
        print(
            f"  {name:<10}  {split['tokens']:>14,} tokens  {split['documents']:>10,} documents  "
            f"longest {split['longest']:,}  {counted(split['shards'], 'shard')}, SHA-256 verified"
        )


def _setting(cpu: Any, gpu: Any, given: Mapping[str, Any]) -> Any:
    """Return a benchmark's setting for this machine, with the values given on the command line."""
    setting = gpu if _builtin_name() == "cuda" else cpu
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

    bench_conversion(args.run_dir, args.steps, args.keep, _builtin_name(), args.json)


def bench_checkpoint(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.checkpoint import bench_checkpoint

    bench_checkpoint(args.gib, args.device, args.json)


def bench_engines(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.engines import bench_engines

    bench_engines(_builtin_name(), args.items, args.json)


def bench_memory(args: argparse.Namespace) -> None:
    with loading():
        from longspan.benchmarks.memory import bench_memory

    bench_memory(args.gpus, args.items, args.json)


def export(args: argparse.Namespace) -> None:
    with loading():
        from longspan.export.huggingface import export

    with waiting(f"exporting {args.run_dir}"):
        exported = export(args.run_dir, args.out, step=args.step, key_file=args.key_file)
    print(json.dumps(asdict(exported)) if args.json else exported)


def checkpoint_list(args: argparse.Namespace) -> None:
    from longspan.checkpoint.listing import inspect_checkpoints

    with waiting(f"verifying {args.run_dir}") if args.checked else nullcontext():
        key, folder = _signing_key(args), args.run_dir / "checkpoints"
        found = inspect_checkpoints(folder, verify=args.checked, key=key)
    if args.json:
        print(json.dumps([asdict(entry) for entry in found]))
    for entry in [] if args.json else found:
        status = entry.problem or ("intact" if args.checked else "")
        size = f"{entry.bytes / 2**20:,.1f} MiB"
        print(f"{entry.name:<22}{size:>14}  {counted(entry.ranks, 'rank')}  {status}".rstrip())
    bad = [e for e in found if e.problem is not None and not e.name.startswith("bad-")]
    if args.checked and bad:
        raise SystemExit(FAILED)


def checkpoint_rm(args: argparse.Namespace) -> None:
    from longspan.checkpoint.listing import remove_steps

    with waiting(f"verifying {args.run_dir}"):  # to keep the last intact one
        remove_steps(args.run_dir / "checkpoints", args.steps, _signing_key(args))


def _signing_key(args: argparse.Namespace) -> bytes | None:
    """The key of --key-file, or else of the run."""
    from longspan.checkpoint import read_key
    from longspan.runfile import RUN_FILE, load_run

    path, run_file = args.key_file, args.run_dir / RUN_FILE
    if not path and run_file.exists():
        path = load_run(run_file, world=None).checkpoint.key_file
    return read_key(path)


def config_show(args: argparse.Namespace) -> None:
    from longspan.derived import batch_values, derived_values
    from longspan.runfile import dump_run, load_run

    if args.nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {args.nproc}")
    file, overrides = _split_items(args.items)
    if args.deepspeed:
        overrides.append("engine.name=deepspeed")  # so that unsupported keys are rejected
    if args.accelerate:
        overrides.append("engine.name=accelerate")
    run = load_run(file, overrides, builtin="cpu" if file else _builtin_name(), world=args.nproc)
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
    from longspan.config import Run

    print(json.dumps(Run.model_json_schema(), indent=1))


def completion(args: argparse.Namespace) -> None:
    from longspan.cli.completion import SCRIPTS

    print(SCRIPTS[args.shell].strip())


def complete(args: argparse.Namespace) -> None:
    from longspan.cli.arguments import build_parser
    from longspan.cli.completion import candidates

    print("\n".join(candidates(build_parser(), args.line)))
