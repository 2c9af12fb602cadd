"""What several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longspan.cli.parser import Parser
from longspan.errors import UserError
from longspan.hardware import may_have_gpu
from longspan.progress import loading

JSON = "print the result as JSON on stdout"
BACKENDS = ("auto", "nccl", "gloo", "mpi")
DONE, FAILED = 0, 1
"""Exit codes of a command."""


def add_run_arguments(parser: Parser) -> None:
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file and any number of overrides, such as train.steps=100 (default: the "
        "built-in run for this machine)",
    )
    parser.add_argument("--json", action="store_true", help=JSON)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress, only results and errors"
    )


def add_backend(parser: Parser) -> None:
    """Add --backend, which `arguments.parse` turns into an override."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="the same as the override layout.backend=... (default: what the run file says)",
    )


def add_run_dir(parser: Parser, what: str = "folder of a run") -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=what)
    parser.add_argument(
        "--key-file",
        default="",
        metavar="FILE",
        help="key that checkpoints must be signed with (default: the run's checkpoint.key_file)",
    )


def add_ema(parser: Parser) -> None:
    text = "use the averages of the weights that a run with train.ema has"
    parser.add_argument("--ema", action="store_true", help=text)


def split_items(items: Sequence[str]) -> tuple[Path | None, list[str]]:
    files = [item for item in items if "=" not in item]
    if len(files) > 1:
        raise UserError(
            f"expected one run file, got {', '.join(files)}; an override looks like train.steps=100"
        )
    return (Path(files[0]) if files else None), [item for item in items if "=" in item]


def builtin_name(processes: int = 1) -> str:
    """Return the built-in run for this machine, on which each of `processes` needs a GPU."""
    if not may_have_gpu():
        return "cpu"
    with loading():
        import torch

    return "cuda" if torch.cuda.device_count() >= processes else "cpu"


def check_nproc(nproc: int | None, world: int = 1) -> None:
    """Refuse a number of processes below 1, and any that is given to one of several processes."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc must be at least 1, got {nproc}")
    if nproc is not None and world > 1:
        raise UserError(f"--nproc cannot be used by one of {world} processes: remove it")
