"""The arguments of all commands: help, examples, mistyped words, JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from longspan.cli import main
from longspan.cli.arguments import build_parser, parse
from longspan.cli.launch import TARGETS
from longspan.cli.parser import WIDTH, Parser

NO_RESULT = {"watch", "config schema", "init", "completion", "_complete", "node"}
NO_RESULT |= {"checkpoint rm", "checkpoint fork", "serve"}
NO_RESULT |= {f"launch {target.name}" for target in TARGETS}
"""Commands that print JSON anyway, write or print a file, or print nothing."""


def all_parsers(parser: Parser, name: str = "") -> Iterator[tuple[str, Parser]]:
    yield name, parser
    for word, command in parser.commands.items():
        yield from all_parsers(command, f"{name} {word}".strip())


PARSERS = dict(all_parsers(build_parser()))
VERBS = [name for name, parser in PARSERS.items() if not parser.commands]


@pytest.mark.parametrize("name", [name for name in PARSERS if name and name != "_complete"])
def test_help_explains_every_argument_and_shows_an_example(name: str) -> None:
    text = PARSERS[name].format_help()
    assert max(map(len, text.splitlines())) <= WIDTH, text
    examples = re.findall(r"^  longspan (.*)$", text, re.MULTILINE)
    assert examples, f"{name} has no example"
    for example in examples:
        words = shlex.split(example.split(" >")[0])
        assert example.startswith(name)
        assert parse(words).verb is not None
    for action in PARSERS[name]._actions:
        if not PARSERS[name].commands:
            assert action.help, f"{name}: {action.dest} has no help"
            assert re.match(r"^[a-z-]", action.help), f"{name}: {action.help}"
            assert len(action.help.split()) >= 3, f"{name}: {action.help}"
        takes_value = action.option_strings and action.nargs != 0
        if takes_value and not action.required and action.dest != "resume":
            says = "default: " in (action.help or "")
            assert says or action.dest in ("json", "plot", "csv"), f"{name}: {action.help}"


def test_every_command_is_listed_once() -> None:
    parser = build_parser()
    listed = [name for names in parser.groups.values() for name in names]
    assert sorted(listed) == sorted(set(parser.commands) - {"_complete"})
    text = parser.format_help()
    assert all(re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE) for name in listed)
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", VERBS)
def test_every_command_with_a_result_prints_it_as_json(name: str) -> None:
    assert ("--json" in PARSERS[name].options) == (name not in NO_RESULT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "longspan: error: unknown command 'trian'; did you mean train?"),
        ("xyz", "unknown command 'xyz'; longspan --help lists the commands"),
        ("data bild", "longspan data: error: unknown command 'bild'; did you mean build?"),
        ("bench memry", "unknown command 'memry'; did you mean memory?"),
        ("train --nprocs 4", "unrecognized arguments: --nprocs; did you mean --nproc?"),
        ("train a.toml --nprocs=4", "unrecognized arguments: --nprocs=4; did you mean --nproc?"),
        ("sketch runs --method svdd", "'sketch'); did you mean svd?"),
        ("init --preset 7B", "did you mean 7b?"),
        # An abbreviation could become ambiguous with the next option that is added.
        ("plan --gpuss 2", "unrecognized arguments: --gpuss; did you mean --gpus?"),
        ("train --res runs/first", "unrecognized arguments: --res"),
        ("bench attention --head 3", "unrecognized arguments: --head 3"),
        ("--vers", "COMMAND"),
    ],
)
def test_a_mistyped_word_is_refused_with_what_was_meant(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(line.split())
    assert exited.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([option])
    assert exited.value.code == 0
    assert re.fullmatch(r"longspan \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)
