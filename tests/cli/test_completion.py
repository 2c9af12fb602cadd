"""Completion, as functions and in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli.arguments import build_parser
from longspan.cli.completion import SCRIPTS, candidates
from tests.terminal import Terminal


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("longspan tr", ["train"]),
        ("longspan data ", ["build", "info"]),
        ("longspan checkpoint v", ["verify"]),
        ("longspan train --re", ["--resume", "--restarts"]),
        ("longspan bench attention --head", ["--heads", "--head-dim"]),
        ("longspan sketch --method l", ["least_squares"]),
        ("longspan completion ", ["bash", "zsh", "fish"]),
        ("longspan train tra", ["train.", "track."]),
        ("longspan train train.warm", ["train.warmup_steps="]),
        (
            "longspan train train.optimizer=",
            [f"train.optimizer={name}" for name in ("adamw", "adamw8bit", "muon")],
        ),
        ("longspan verify --nproc 2 layout.offload=t", ["layout.offload=true"]),
        (
            "longspan train train.compile=",
            [f"train.compile={x}" for x in ("auto", "true", "false")],
        ),
        ("longspan plan layout.zero=", [f"layout.zero={n}" for n in range(4)]),
        ("longspan train train.lr=", []),
        ("longspan train nothing.", []),
        ("longspan plan ru", ["run.toml", "runs/"]),
        ("longspan plan runs/", ["runs/b.yaml"]),
        ("longspan train 'open quote", []),
        ("longspan train --run-dir ru", []),
        ("longspan plan --json ru", ["run.toml", "runs/"]),
        ("longspan export ", []),  # the shell completes files
    ],
)
def test_the_last_word_is_completed(
    line: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.toml", "run.txt", "runs/b.yaml", "runs/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert candidates(build_parser(), line) == expected


def test_the_first_word_offers_all_commands() -> None:
    found = candidates(build_parser(), "longspan ")
    assert {"init", "train", "bench", "completion"} <= set(found)
    assert "_complete" not in found


def test_tab_completes_in_a_real_bash(tmp_path: Path) -> None:
    program = tmp_path / "longspan"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m longspan "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(SCRIPTS["bash"])
    (tmp_path / "my-shards").mkdir()
    with Terminal(["bash", "--norc", "--noprofile"]) as terminal:
        terminal.type(f"cd {tmp_path}; PATH={tmp_path}:$PATH; . ./script; PS1='re''ady '\n")
        terminal.wait_for("ready ")
        for typed, completed in (
            ("longspan tra\t", "longspan train "),
            ("train.optimizer=adamw8\t", "train.optimizer=adamw8bit "),
            ("train.micro_b\t", "train.micro_batch="),
            ("4 --rest\t", "4 --restarts "),
        ):
            terminal.type(typed)
            terminal.wait_for(completed)
        terminal.type("\x15longspan data info my\t")  # Ctrl-U clears the line
        terminal.wait_for("longspan data info my-shards/")
        terminal.type("\x15exit\n")
        terminal.wait()


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_valid_in_its_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=SCRIPTS[shell], text=True, check=True, timeout=60)
