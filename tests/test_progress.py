"""What commands show while they work: in a terminal, and elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from longspan.data.build import build
from longspan.progress import Progress, ProgressBar, measuring, waiting
from tests.terminal import Terminal

RUN = Path(__file__).parents[1] / "examples" / "recall.toml"
WITHOUT_TORCH = """
import sys
from importlib.abc import MetaPathFinder
from longspan.cli import main

class Refuse(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise RuntimeError("torch is imported")

sys.meta_path.insert(0, Refuse())
for line in sys.argv[1:]:
    try:
        code = str(main(line.split()))
    except SystemExit as exited:
        code = str(exited.code)
    except RuntimeError as error:
        code = str(error)
    print("\\n" + code, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "in.txt").write_text("some text " * 60)
    build([folder / "in.txt"], folder / "shards", validation=0)
    return folder / "shards"


def codes_without_torch(*commands: str) -> list[str]:
    """Return for each command its exit code, or "torch is imported", after what it showed."""
    with Terminal([sys.executable, "-c", WITHOUT_TORCH, *commands]) as terminal:
        assert terminal.wait() == 0
    lines = terminal.received.replace("\r\n", "\n").split("\n")
    ends = ("0", "1", "2", "torch is imported")
    return [line for line in lines if line in ends or "loading PyTorch" in line]


def test_commands_that_compute_nothing_import_no_torch(shards: Path) -> None:
    (shards / "checkpoints").mkdir()
    commands = {
        "--help": "0",
        "train --help": "0",
        "config schema": "0",
        f"config show {RUN} train.stepz=3": "2",
        f"data info {shards}": "0",
        f"data build {shards.parent / 'in.txt'} -o {shards.parent / 'more'}": "0",
        f"checkpoint ls {shards}": "0",
        f"checkpoint verify {shards}": "0",
        f"train {RUN} train.stepz=3": "2",
        "plan nothing.toml": "2",
        f"verify {RUN} --steps 0": "2",
        "sketch nothing --keep 2": "2",
    }
    assert codes_without_torch(*commands) == list(commands.values())


def test_every_other_command_says_that_it_loads_torch() -> None:
    commands = ["train", "plan", "generate runs --prompt a", "sketch runs", "export runs out"]
    commands.append(f"config show {RUN}")
    names = [
        "attention",
        "exchange",
        "linear",
        "loss",
        "conversion",
        "checkpoint",
        "engines",
        "memory",
    ]
    commands += [f"bench {name}" for name in names]
    found = codes_without_torch(*commands)
    assert len(found) == 2 * len(commands)
    assert all("loading PyTorch" in line for line in found[::2])
    assert set(found[1::2]) == {"torch is imported"}


def test_phases_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.phase("one")
        progress.detail("step 1")
        progress.phase("two [/]")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "one\ntwo [/]\n")


def test_nothing_is_shown_in_a_pipe_even_with_force_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with waiting("one"), measuring("two"):
        print("result")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("result\n", "")


PHASES = """
import os, sys, time
from longspan.progress import Progress

def shown(path):
    while not os.path.exists(path):
        time.sleep(0.01)

with Progress() as progress:
    progress.phase("one [/]")
    shown(sys.argv[1])
    progress.detail("step 7")
    shown(sys.argv[2])
"""


def test_a_phase_and_its_detail_are_one_line_in_a_terminal_that_is_cleared(tmp_path: Path) -> None:
    files = [tmp_path / "phase", tmp_path / "detail"]
    with Terminal([sys.executable, "-c", PHASES, *map(str, files)]) as terminal:
        for text, file in zip(("one [/]", "one [/]: step 7"), files, strict=True):
            terminal.wait_for(text)
            file.touch()
        assert terminal.wait() == 0
    shown = terminal.received
    assert shown.index("one [/]") < shown.index("one [/]: step 7")
    assert not any(terminal.screen())


def test_a_bar_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("tokenizing") as bar:
        bar.update("3 documents [of text]", 0.25)
        bar.print("a note [b]")
    assert capsys.readouterr().err == "tokenizing: 3 documents [of text], 25%\na note [b]\n"
