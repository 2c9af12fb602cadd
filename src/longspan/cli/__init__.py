"""The command line: `arguments` parses it; the other modules hold the commands, by group.

Exit codes: 0 done; 2 the user's input is wrong; 3 stopped on request with a checkpoint saved (0
after a file STOP under a torchrun with restarts); 1 anything else.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from longspan.cli.arguments import parse
from longspan.cli.shared import DONE, FAILED
from longspan.errors import Diverged, OutOfMemory, SaveFailed, Stopped, UserError
from longspan.progress import quietly, tolerant_stderr
from longspan.wording import printable

WRONG_INPUT, STOPPED = 2, 3


@tolerant_stderr()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = parse(argv)
    # The interpreter's last collection visits every object of torch, for a second or more; what it
    # would free ends with the process.
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of a terminal that cannot show every character
            stream.reconfigure(errors="replace")
    try:
        _check_text(vars(args))
        with quietly() if getattr(args, "quiet", False) else nullcontext():
            args.verb(args)
    except UserError as error:  # which may quote a file that others wrote
        print("longspan:", "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
        return WRONG_INPUT
    except SystemExit as exited:  # with the exit code of worker processes
        return int(exited.code or DONE)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":  # it is a decision of all
            print(stopped, file=sys.stderr)
        # torchrun restarts workers after any other exit code. After a signal it should: the agent
        # that received one ends in any case, and those on other nodes wait for its replacement.
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        return DONE if restarts and not stopped.by_signal else STOPPED
    except (Diverged, SaveFailed) as error:
        print(f"longspan: {error}", file=sys.stderr)
        return FAILED
    except OutOfMemory as error:  # perhaps on a rank without the console
        from longspan.launching.local import report_failure

        if not report_failure(str(error)):
            print(f"longspan: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader closed the pipe; keep the interpreter from flushing to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(f"longspan: cannot write the output: {error.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # of the "^C" that the terminal echoes
        print(f"{clear}longspan: interrupted; nothing more was saved", file=sys.stderr)
        return FAILED
    return DONE


def _check_text(values: Mapping[str, object]) -> None:
    """Reject arguments that are not UTF-8: their lone surrogates cannot be written to a file."""
    for value in values.values():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"the argument {str(text)!r} is not UTF-8 text") from error
