"""The command line: what may stand there (`arguments`), and what is then done (`verbs`).

Exit codes: 0 done; 2 the user's input is wrong; 3 stopped on request with a checkpoint saved (0
under a torchrun that restarts); 1 anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from longspan.cli.arguments import parse
from longspan.cli.verbs import DONE, FAILED
from longspan.errors import Diverged, OutOfMemory, Stopped, UserError

WRONG_INPUT, STOPPED = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = parse(argv)
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
    except BrokenPipeError:  # whoever read the output has had enough, and so has the interpreter
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("longspan: interrupted; nothing more was saved", file=sys.stderr)
        return FAILED
    return DONE


def _check_text(values: Mapping[str, object]) -> None:
    """Arguments that are not UTF-8 arrive with lone surrogates, which no file can hold."""
    for value in values.values():
        for text in value if isinstance(value, list) else [value]:
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"the argument {str(text)!r} is not UTF-8 text") from error
