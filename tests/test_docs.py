"""The docs match the code."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import socket
from collections import Counter
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from longspan.cli import main
from longspan.cli.arguments import parse
from longspan.config import SECTIONS, Lora, Profile, Rope, Section, Sketch
from longspan.runfile import load_run
from longspan.wording import toml_value
from tests.harness import Ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def reference(name: str, section: type[Section]) -> str:
    """Return the table of a section's keys as docs/run-file.md must contain it."""
    rows = [f"### [{name}]", "", "| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in section.model_fields.items():
        empty = field.default in (None, (), {}) or isinstance(field.default, Section)
        default = "" if empty else f"`{toml_value(field.default)}`"
        meaning = " ".join((field.description or "").split())
        assert meaning, f"{name}.{key} has no description"
        rows.append(f"| `{key}` | {default} | {meaning} |")
    return "\n".join(rows)


TABLES: dict[str, type[Section]] = {
    **SECTIONS,
    "model.rope": Rope,
    "model.sketch": Sketch,
    "model.lora": Lora,
}
TABLES["track.profile"] = Profile


@pytest.mark.parametrize("name", TABLES)
def test_every_key_of_the_run_file_is_documented(name: str) -> None:
    assert reference(name, TABLES[name]) in (ROOT / "docs" / "run-file.md").read_text()


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of `languages`; "" is a block without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands() -> list[str]:
    """The arguments of `longspan` wherever a page shows a command, in a block or in a sentence."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh", "console", ""):
            if "\nlongspan: " in block:  # an error, which the next test compares
                continue
            for line in block.replace("\\\n", " ").splitlines():
                start = re.match(r"(?:\$ )?(?:longspan|\S.*(?:-m|--module) longspan) ", line)
                found += [line[start.end() :]] if start else []
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in re.findall(r"`([^`]*\blongspan [^`]+)`", prose):
            start = re.match(r"(?:longspan|\S.*(?:-m|--module) longspan)\s", line)
            found += [" ".join(line[start.end() :].split())] if start else []
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_every_command_in_the_docs_is_valid(command: str) -> None:
    words = [word for word in shlex.split(command, comments=True) if word != "…"]
    if ">" in words:
        words = words[: words.index(">")]
    if "--help" in words or not any(word.startswith("-") or "=" in word for word in words):
        with pytest.raises(SystemExit) as exit:  # a verb by name, perhaps without its arguments
            parse([*words, "--help"])
        assert exit.value.code == 0
        return
    if words[-1] == "--nproc":  # an option by name
        words.append("2")
    items = getattr(parse(words), "items", [])
    # `load_run` would read the folder that a run starts from.
    folder = r"^(train\.init_from|model\.from)=.*"
    overrides = [re.sub(folder, r"\1=", item) for item in items if "=" in item]
    load_run(None, overrides, world=None)


ERRORS = [x for page in PAGES for x in blocks(page, "console") if "\nlongspan: " in x]


@pytest.mark.parametrize("text", ERRORS, ids=lambda x: x.split()[2])
def test_every_error_in_the_docs_is_the_printed_one(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, message = text.split("\n", 1)
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "text", [text for page in PAGES for text in blocks(page, "toml")], ids=lambda x: x.split()[0]
)
def test_every_toml_block_in_the_docs_is_a_run_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    load_run(tmp_path / "run.toml")


def test_links_between_pages_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name
)
def test_every_example_run_file_is_valid(example: Path) -> None:
    load_run(example)


def run_page(rank: int, world: int, code: str, folder: str) -> str:
    """Run a page's Python as torchrun does, in `folder`, and return what it prints."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port[0]}
    environment = {name: str(value) for name, value in places.items()}
    if "init_process_group" in code:
        dist.destroy_process_group()  # the page makes its own
    before = Path.cwd()
    os.chdir(folder)
    with patch.dict(os.environ, environment, MASTER_ADDR="127.0.0.1"):
        names, printed = execute(code)
    os.chdir(before)
    if "agree" in names:  # CONTRIBUTING's function for several ranks
        printed += f"{names['agree'](rank, world, 10)}\n"  # type: ignore[operator]
    return printed


def execute(code: str) -> tuple[dict[str, object], str]:
    """Run Python and return its names and what it prints."""
    names: dict[str, object] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "page", "exec"), names)
    return names, printed.getvalue()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


PYTHON = [page for page in PAGES if blocks(page, "python") and page.name != "engines.md"]
"""Pages whose Python is run here; that of engines.md is examples/, which test_examples.py runs."""


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_the_python_in_a_page_runs_and_prints_what_it_says(
    ranks: Ranks, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    world = int((re.findall(r"nproc-per-node (\d+)", code) or [1])[0])
    if page.name == "CONTRIBUTING.md":
        assert ranks.run(run_page, 4, code, str(tmp_path)) == ["60\n"] * 4
        return
    printed = ranks.run(run_page, world, code, str(tmp_path))[0] if world > 1 else execute(code)[1]
    expected = re.findall(r"^print\(.*\)(?:  |\n)# (.*)$", code, re.MULTILINE)
    expected += blocks(page, "text") if page.name == "sketched.md" else []
    for text in expected:
        assert text in printed


def test_the_plans_in_the_docs_are_the_printed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """An … stands for what is left out before."""
    page = (ROOT / "docs/planning.md").read_text()
    plans = re.findall(r"```console\n\$ longspan (.*?)\n(.*?)```", page, re.S)
    assert plans
    for command, text in plans:
        assert main(shlex.split(command)) == 0
        out, left_out = capsys.readouterr().out, "…\n"
        assert text.removeprefix(left_out) in out if text.startswith(left_out) else text == out


def refused_keys() -> Counter[str]:
    """Return the key of each refusal of a layout or an engine in the rules."""
    names = ["layout_rules", "decoder_layout_rules", "module_layout_rules", "engine_rules"]
    names += ["_pipeline_problems", "_zbv_problems", "chunk_layout_rules", "residual_rules"]
    names += ["fp8_rules", "fp8_layout_rules", "_sequence_problems", "parameter_precision_rules"]
    names += ["recomputation_rules", "tile_rules", "graph_rules", "graph_layout_rules"]
    found: Counter[str] = Counter()
    texts = [path.read_text() for path in (ROOT / "src/longspan/rules").glob("*.py")]
    for rule in chain.from_iterable(ast.parse(text).body for text in texts):
        if isinstance(rule, ast.FunctionDef) and rule.name in (*names, "_deepspeed_problems"):
            calls = (node for node in ast.walk(rule) if isinstance(node, ast.Call))
            found.update(
                re.sub(r"{.*}", "*", ast.unparse(call.args[0]).strip("f'"))
                for call in calls
                if ast.unparse(call.func) == "Problem"
            )
    return found


def test_every_refusal_of_a_layout_or_an_engine_is_documented() -> None:
    page = (ROOT / "docs/layouts.md").read_text()
    section = page.partition("## What is refused\n")[2].partition("\n## ")[0]
    rows: Counter[str] = Counter()
    for keys in re.findall(r"^\| (`.*?) \|", section, re.M):
        axes = re.sub(r"layout\.(sequence|tensor|pipeline)(`, |`$)", r"layout.*\2", keys)
        named = axes if "," in keys else keys
        rows.update(set(re.sub(r"engine\.offload_\w+", "engine.*", named).strip("`").split("`, `")))
    assert rows == refused_keys()


def test_every_row_of_the_reliability_page_names_a_test_that_exists() -> None:
    rows = re.findall(
        r"^\|(.+)\|$", (ROOT / "docs" / "reliability.md").read_text(), flags=re.MULTILINE
    )
    rows = [row for row in rows if "---" not in row and "fault or attack" not in row]
    assert rows
    for row in rows:
        found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.split("|")[-1])
        assert found, row
        for file, name in found:
            assert f"def {name}(" in (ROOT / file).read_text(), row
