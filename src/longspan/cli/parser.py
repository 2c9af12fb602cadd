"""An argument parser without abbreviations that shows defaults, examples and what was meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from longspan.wording import did_you_mean

WIDTH = 80


class Parser(argparse.ArgumentParser):
    """Also keeps its commands, and the choices of its options, for completion."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        self.commands: dict[str, Parser] = {}
        self.groups: dict[str, list[str]] = {}
        """Names of commands by the title under which the help lists them."""
        self.option_choices: dict[str, list[str]] = {}

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        default, text = options.get("default"), options.get("help", "")
        if default not in (None, argparse.SUPPRESS) and "%(default)" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
            options["help"] = f"{text} (default: {shown})".replace("%", "%%")
        if "choices" in options:
            self.option_choices |= {name: list(map(str, options["choices"])) for name in names}
        return super().add_argument(*names, **options)

    def add_commands(self) -> Commands:
        self.usage = f"{self.prog} [-h] COMMAND ..."
        hidden = argparse.SUPPRESS  # argparse lists commands without groups, and poorly aligned
        action = self.add_subparsers(required=True, prog=self.prog, metavar="COMMAND", help=hidden)
        return Commands(self, action)

    def format_help(self) -> str:
        sections = []
        for title, names in self.groups.items():
            lines = [f"  {name:<12}{self.commands[name].description}" for name in names]
            sections.append("\n".join([f"{title}:", *lines]))
        given, self.epilog = self.epilog, "\n\n".join(filter(None, [*sections, self.epilog]))
        text, self.epilog = super().format_help(), given
        return text

    @property
    def options(self) -> list[str]:
        """The long options, in the order of the help."""
        return list(dict.fromkeys(re.findall(r"--[a-z][\w-]*", self.format_usage())))

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(", message):
            hint = (
                did_you_mean(found[1], self.commands) or f"; {self.prog} --help lists the commands"
            )
            message = f"unknown command {found[1]!r}{hint}"
        elif found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(found[1], re.findall(r"[\w-]+", found[2]))
        super().error(message)

    def reject(self, unknown: list[str]) -> NoReturn:
        """Exit because of unknown arguments."""
        option = next((word for word in unknown if word.startswith("-")), unknown[0])
        hint = did_you_mean(option.split("=")[0], self.options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: Parser, action: argparse._SubParsersAction[Parser]) -> None:
        self._parser, self._action = parser, action

    def add(
        self,
        name: str,
        text: str,
        *examples: str,
        verb: Any = None,
        group: str = "commands",
    ) -> Parser:
        """Add a command. `text` is its help; examples follow `longspan`; no group hides it."""
        lines = [f"  longspan {example}" for example in examples]
        title = "examples" if len(lines) > 1 else "example"
        parser = self._action.add_parser(
            name,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n".join([f"{title}:", *lines]) if lines else None,
        )
        parser.set_defaults(verb=verb, parser=parser)
        self._parser.commands[name] = parser
        if group:
            self._parser.groups.setdefault(group, []).append(name)
        return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of examples, and wraps descriptions."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
