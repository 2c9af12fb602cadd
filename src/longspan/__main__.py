"""The command `longspan`, and `python -m longspan`."""

import sys


def run() -> int:
    """Run the command of this process, which may be told to stop while it imports it."""
    try:
        from longspan.cli import main

        return main()
    except KeyboardInterrupt:
        print("longspan: interrupted", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run())
