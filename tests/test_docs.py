"""The docs match the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.cli.arguments import parse
from longspan.config import Section, Sketch
from longspan.runfile import SECTIONS, load_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def reference(name: str, section: type[Section]) -> str:
    """Return the table of a section's keys as docs/run-file.md must contain it."""
    rows = [f"### [{name}]", "", "| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in section.model_fields.items():
        empty = field.default in (None, (), {}) or isinstance(field.default, Section)
        default = "" if empty else f"`{field.default!r}`".replace("'", '"')
        meaning = " ".join((field.description or "").split())
        assert meaning, f"{name}.{key} has no description"
        rows.append(f"| `{key}` | {default} | {meaning} |")
    return "\n".join(rows)


TABLES: dict[str, type[Section]] = {**SECTIONS, "model.sketch": Sketch}


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_the_run_file_is_documented(name: str) -> None:
    assert reference(name, TABLES[name]) in (ROOT / "docs" / "run-file.md").read_text()


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.DOTALL):
            joined = block.replace("\\\n", " ")
            lines = [line.removeprefix("$ ") for line in joined.splitlines()]
            found += [line for line in lines if line.startswith("longspan ")]
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_docs_parses(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    if "--help" not in words:
        parse(words)


def test_links_between_pages_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name
)
def test_every_example_run_file_is_valid(example: Path) -> None:
    load_run(example)


def test_the_python_in_the_attention_page_runs() -> None:
    q, k, v = (torch.randn(1, 64, 4, 8) for _ in range(3))
    names: dict[str, object] = {"q": q, "k": k, "v": v}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/attention.md").read_text(), re.S):
        exec(block, names)
    assert isinstance(names["y"], torch.Tensor)
    assert names["y"].shape == q.shape


def test_the_plan_in_the_docs_is_the_printed_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/planning.md").read_text()
    ((command, text),) = re.findall(r"```console\n\$ longspan (.*?)\n(.*?)```", page, re.S)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == text


@pytest.mark.filterwarnings("ignore:SKLinear .* stores")
def test_the_python_in_the_sketched_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/sketched.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
    (table,) = re.findall(r"```text\n(.*?)```", page, re.S)
    assert table in capsys.readouterr().out
