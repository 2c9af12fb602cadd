"""Completion of commands, options, run files and their keys in a shell.

A shell calls `longspan _complete LINE` with the line up to the cursor, and gets one candidate for
its last word per line. Nothing else is needed: the scripts below are all that a shell has to load.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import get_args

from longspan.cli.parser import Commands, Parser

# A word such as train.optimizer=ad ends at "=" for bash, which then wants only what follows it.
BASH = r"""
_longspan() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
  COMPREPLY=($("$1" _complete "$line" 2>/dev/null))
  [[ "${line##* }" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
  [[ "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace
}
complete -o default -F _longspan longspan
"""
ZSH = r"""
_longspan() {
  local -a found
  found=(${(f)"$("${words[1]}" _complete "$LBUFFER" 2>/dev/null)"})
  if (( ! $#found )); then _files; return; fi
  local -a open=(${(M)found:#*[=./]}) closed=(${found:#*[=./]})
  compadd -Q -S '' -a open
  compadd -Q -a closed
}
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
compdef _longspan longspan
"""
FISH = r"""
complete -c longspan -a '(longspan _complete (commandline -cp) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
RUN_FILES = (".toml", ".yaml", ".yml")


def candidates(parser: Parser, line: str) -> list[str]:
    """Return the words that can stand where the last word of `line` begins."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    if not words or line[-1:].isspace():
        words.append("")
    *before, word = words[1:] or [""]
    for name in before:
        parser = parser.commands.get(name, parser)
    usage = parser.format_usage()
    if before and before[-1] in parser.option_choices:
        found = parser.option_choices[before[-1]]
    elif before and before[-1].startswith("-") and f"{before[-1]} " in usage:
        found = []  # its value, perhaps a file, which the shell completes
    elif word.startswith("-"):
        found = ["--help", *parser.options]
    elif parser.commands:
        found = [name for name in parser.commands if not name.startswith("_")]
    elif "shell" in parser.option_choices:
        found = parser.option_choices["shell"]
    elif "section.key=value" in usage:
        found = [*_keys(word), *_run_files(word)]
    else:
        found = []
    return [candidate for candidate in dict.fromkeys(found) if candidate.startswith(word)]


def _keys(word: str) -> list[str]:
    """Sections ("train."), then their keys ("train.steps="), then the values that have names."""
    from longspan.config import SECTIONS

    section, dot, key = word.partition(".")
    if not dot:
        return [f"{name}." for name in SECTIONS]
    if section not in SECTIONS:
        return []
    fields = SECTIONS[section].model_fields
    key, equals, _ = key.partition("=")
    if not equals:
        return [f"{section}.{name}=" for name in fields]
    if key not in fields:
        return []
    kind = fields[key].annotation
    values = ["true", "false"] if kind is bool else map(_toml, get_args(kind))
    return [f"{section}.{key}={value}" for value in values if value]


def _toml(value: object) -> str:
    """A named value as an override writes it; "" for a type."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int) else ""


def _run_files(word: str) -> list[str]:
    """Run files, and folders that may hold some."""
    folder = Path(word if word.endswith("/") else Path(word).parent)
    prefix = word[: word.rfind("/") + 1]
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    folders = [f"{prefix}{p.name}/" for p in entries if p.is_dir() and p.name[0] != "."]
    return [*(f"{prefix}{p.name}" for p in entries if p.suffix in RUN_FILES), *folders]


def add(commands: Commands) -> None:
    group = "shell"
    completion = commands.add(
        "completion",
        "print a script that completes commands in your shell",
        "completion bash >> ~/.bashrc",
        verb=print_script,
        group=group,
    )
    completion.add_argument(
        "shell", choices=["bash", "zsh", "fish"], help="bash, zsh or fish", metavar="SHELL"
    )
    hidden = commands.add("_complete", "complete the last word of a line", group="")
    hidden.add_argument("line")
    hidden.set_defaults(verb=print_candidates)


def print_script(args: argparse.Namespace) -> None:
    print(SCRIPTS[args.shell].strip())


def print_candidates(args: argparse.Namespace) -> None:
    from longspan.cli.arguments import build_parser

    print("\n".join(candidates(build_parser(), args.line)))
