"""The commands generate and serve."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.parser import Commands
from longspan.cli.shared import DONE, JSON, add_ema, add_run_dir, check_nproc
from longspan.errors import UserError
from longspan.files import read_bounded
from longspan.progress import loading, waiting
from longspan.wording import counted

if TYPE_CHECKING:
    from longspan.generate import TextGenerator
    from longspan.models.generation import Piece, Sampling

GROUP = "trained runs"
"""Where `longspan --help` lists them."""
OPTIONS = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
"""Those of `TextGenerator.sampling`."""
MAX_BYTES = 1 << 30
"""Size of a file of prompts."""
MIN_TOKEN, MAX_TOKEN_BYTES = 16, 4096


def add(commands: Commands) -> None:
    _add_generate(commands)
    _add_serve(commands)


def _add_generate(commands: Commands) -> None:
    parser = commands.add(
        "generate",
        "generate text with a trained model",
        "generate runs/first --prompt 'import ' --tokens 100",
        verb=generate,
        group=GROUP,
    )
    add_run_dir(parser, "folder of a run, or a Hugging Face folder")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text that the model continues; may be given several times (default: none)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='file with a prompt per line; of a .jsonl file, {"prompt": TEXT} or TEXT '
        "(default: none)",
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="maximum number of new tokens"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 is greedy decoding (default: the folder's, or 0.8)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="nucleus sampling: sample from the most likely tokens with this total probability "
        "(default: the folder's, or 0.95)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from this many most likely tokens; 0 for all (default: the folder's, or 0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="make tokens that occurred less likely (default: the folder's, or 1 for none)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the generated text before this text; may be given several times (default: none)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for sampling, of every prompt"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        metavar="N",
        help="number of prompts that are continued at a time",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that split the model (tensor parallelism)",
    )
    add_ema(parser)
    parser.add_argument("--json", action="store_true", help=f"{JSON}, one line for each prompt")


def _add_serve(commands: Commands) -> None:
    parser = commands.add(
        "serve",
        "serve a trained model by OpenAI's protocol, on 127.0.0.1",
        "serve runs/first --port 8000",
        verb=serve,
        group=GROUP,
    )
    add_run_dir(parser, "folder of a run, or a Hugging Face folder")
    parser.add_argument("--port", type=int, metavar="N", help="port (default: a free one)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that clients must send (default: a new one is printed)",
    )
    add_ema(parser)


def serve(args: argparse.Namespace) -> None:
    token = None
    if args.token_file is not None:
        token = read_bounded(args.token_file, MAX_TOKEN_BYTES).decode("utf-8", "replace").strip()
        if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable():
            raise UserError(
                f"{args.token_file} must hold a token of at least {MIN_TOKEN} ASCII characters"
            )
    with loading():
        from longspan.generate import open_generator
        from longspan.serve import Server
    with ExitStack() as stack:
        with waiting(f"loading {args.run_dir}"):
            opened = open_generator(args.run_dir, key_file=args.key_file, ema=args.ema)
            generator = stack.enter_context(opened)
        server = stack.enter_context(Server(generator, args.port or 0, token))
        print(f"base URL {server.url}, model {generator.name}", flush=True)
        if token is None:
            print(f"token    {server.token}", flush=True)
        print("Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):  # how one stops it
            server.serve_forever()


def generate(args: argparse.Namespace) -> None:
    check_nproc(args.nproc)
    prompts = [*(args.prompt or []), *(_read_prompts(args.prompts) if args.prompts else [])]
    if not prompts:
        raise UserError("there is nothing to continue: give --prompt TEXT or --prompts FILE")
    if args.batch < 1:
        raise UserError(f"--batch must be at least 1, got {args.batch}")
    if args.nproc > 1 and "WORLD_SIZE" not in os.environ:
        _start_processes(args)
        return
    with loading():
        from longspan.generate import open_generator
        from longspan.launching.local import join_launcher
        from longspan.parallel.world import world_of_environment
    join_launcher()
    world = world_of_environment()
    with ExitStack() as stack:
        with waiting(f"loading {args.run_dir}", quiet=not world.is_main):
            opened = open_generator(args.run_dir, key_file=args.key_file, world=world, ema=args.ema)
            generator = stack.enter_context(opened)
        options = {name: getattr(args, name) for name in OPTIONS}
        sampling = generator.sampling(args.tokens, **options)
        if not world.is_main:
            stack.enter_context(redirect_stdout(None))
            stack.enter_context(redirect_stderr(None))
        if len(prompts) == 1:
            _stream(generator.complete(prompts[0], sampling), prompts[0], as_json=args.json)
        else:
            _print_batches(generator, sampling, prompts, args.batch, as_json=args.json)


def _stream(pieces: Iterator[Piece], prompt: str, *, as_json: bool) -> None:
    """Print the text of one prompt as it comes, or the whole of it as JSON."""
    text, times, last = "", list[float](), None  # times: the prompt, then every token
    try:
        for last in pieces:
            times.append(time.perf_counter())
            text += last.text
            if not as_json:
                print(last.text, end="", flush=True)
    finally:  # also after Ctrl-C: what was generated is the result
        tokens = last.tokens if last else 0
        if last and as_json:
            print(json.dumps(_result(prompt, text, tokens, last.finish_reason)), flush=True)
        elif last:
            print(flush=True)
        if tokens > 1:
            prompt_s, rest_s = times[1] - times[0], times[tokens] - times[1]
            rate = f"then {(tokens - 1) / rest_s:,.1f} tok/s"
            print(f"{tokens} tokens: the first after {prompt_s:.2f} s, {rate}", file=sys.stderr)


def _print_batches(
    generator: TextGenerator, sampling: Sampling, prompts: list[str], size: int, *, as_json: bool
) -> None:
    """Print the texts of several prompts, each with its prompt."""
    start_s, tokens = time.perf_counter(), 0
    for start in range(0, len(prompts), size):
        for found in generator.complete_batch(prompts[start : start + size], sampling):
            text = found.prompt + found.text
            tokens += found.tokens
            if as_json:
                result = _result(found.prompt, text, found.tokens, found.finish_reason)
                print(json.dumps(result), flush=True)
            else:
                print(f"{text}\n---", flush=True)
    rate = tokens / max(time.perf_counter() - start_s, 1e-9)
    what = f"{counted(tokens, 'token')} after {counted(len(prompts), 'prompt')}"
    print(f"{what}: {rate:,.1f} tok/s", file=sys.stderr)


def _result(prompt: str, text: str, tokens: int, reason: str | None) -> dict[str, object]:
    """The line of a prompt for --json; without a reason, it was interrupted."""
    return {"prompt": prompt, "text": text, "tokens": tokens, "finish_reason": reason}


def _read_prompts(path: Path) -> list[str]:
    """The prompts in a file, one per line that is not empty."""
    try:
        lines = read_bounded(path, MAX_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        return [line for line in lines if line]
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line) if line.strip() else ""
        except ValueError as error:
            raise UserError(f"line {number} of {path} is not JSON: {error}") from error
        prompt = found.get("prompt") if isinstance(found, dict) else found
        if not isinstance(prompt, str):
            raise UserError(
                f'line {number} of {path} must be {{"prompt": TEXT}} or TEXT, got {line[:80]}'
            )
        prompts += [prompt] if prompt else []
    return prompts


def _start_processes(args: argparse.Namespace) -> None:
    from longspan.launching.local import run_processes

    options = [f"--tokens={args.tokens}", f"--batch={args.batch}", f"--key-file={args.key_file}"]
    for name in (*OPTIONS, "prompt", "prompts"):
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        flag = "--" + name.replace("_", "-")
        options += [f"{flag}={each}" for each in values if each is not None]
    options += [f"--{name}" for name in ("ema", "json") if getattr(args, name)]
    command = [sys.executable, "-m", "longspan", "generate", *options]
    command += [f"--nproc={args.nproc}", "--", str(args.run_dir)]
    code = run_processes(command, args.nproc, Path(os.devnull, "logs"))
    if code != DONE:
        raise SystemExit(code)
