"""`longspan launch`: the job, its size and its command; the script for one machine or each node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.launching.job import Job, parse_minutes, parse_nodes, port_of
from longspan.launching.node_script import script
from longspan.runfile import dump_run, load_run
from tests.launching.test_local import SMALL
from tests.parallel.test_apply import run_of

RECORDER = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    names = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    json.dump([sys.argv[1:], {name: os.environ.get(name) for name in names}], file)
    file.write("\\n")
"""
"""A program that records its arguments, in place of torchrun."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "My run.toml"
    file.write_text(dump_run(load_run(None, ["train.global_batch=64", "train.device=auto"])))
    return file


def recorded(text: str, folder: Path, *arguments: str, **environment: str) -> list[str]:
    """Run a script with programs that record their arguments, and return them."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("torchrun", "longspan"):
        fake = folder / "bin" / name
        fake.write_text(RECORDER)
        fake.chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "RECORD": str(folder / "record"), **environment}
    subprocess.run(["bash", "-s", *arguments], input=text, text=True, env=variables, check=True)
    *_, last = (folder / "record").read_text().splitlines()
    command, seen = json.loads(last)
    assert seen == {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
    }
    assert all(isinstance(word, str) for word in command)
    return list(command)


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["launch", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_one_node_meets_on_a_free_port(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, hint = launch(
        capsys, "local", str(run_file), "--gpus-per-node", "8", "train.steps=7", "--restarts", "3"
    )
    assert code == 0
    assert "nothing was started" in hint
    expected = "--nnodes 1 --nproc-per-node 8 --max-restarts 3 --standalone -m longspan train"
    folder = Path.cwd() / "runs" / "my-run"
    words = [*expected.split(), str(run_file), "train.steps=7", "--resume", str(folder)]
    assert recorded(text, tmp_path) == words


def test_every_node_runs_the_same_script(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["local", str(run_file), "--nodes", "4:5", "--gpus-per-node", "8"]
    code, text, _ = launch(capsys, *arguments, "--run-dir", "/shared/a b", "--name", "first")
    assert code == 0
    port = port_of("first")
    assert 20_000 <= port < 32_000 != port_of("second")
    expected = ["node", "--run-dir", "/shared/a b", "--port", str(port), "--restarts", "10", "--"]
    expected += [
        "--nnodes",
        "4",
        "--nproc-per-node",
        "8",
        "--max-restarts",
        "10",
        "-m",
        "longspan",
        "train",
    ]
    expected += [str(run_file), "--resume", "/shared/a b"]
    assert recorded(text, tmp_path) == expected
    expected[7:7] = ["--address", "10.0.0.2"]
    assert recorded(text, tmp_path, LOCAL_ADDR="10.0.0.2") == expected


@pytest.mark.parametrize(
    ("overrides", "nnodes", "said"),
    [
        (["train.global_batch=960"], "4:6", "4 to 6 nodes"),  # a multiple of 4, 5 and 6 nodes' GPUs
        (["train.global_batch=64"], "4", "2 nodes will wait as hot spare"),  # not of 5
        (["layout.shard=32", "train.global_batch=960"], "4", "2 nodes will wait as hot spare"),
    ],
)
def test_more_nodes_train_if_the_layout_fits_any_number_of_them(
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    nnodes: str,
    said: str,
) -> None:
    size = ["--nodes", "4:6", "--gpus-per-node", "8"]
    code, text, error = launch(capsys, "local", str(run_file), *overrides, *size)
    assert code == 0, error
    assert f"--nnodes {nnodes} --nproc-per-node 8 " in text
    assert said in text


def test_submit_trains(tmp_path: Path) -> None:
    """A worker of the real torchrun, in a run folder with a quote and spaces."""
    file, run_dir = tmp_path / "run.toml", tmp_path / "it's a run"
    file.write_text(dump_run(run_of(1, *SMALL)))
    words = ["launch", "local", str(file), "--gpus-per-node", "0"]
    words += ["--run-dir", str(run_dir), "train.steps=2", "--submit"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "longspan", *words], env=environment, check=True)
    events = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    assert [e["ranks"] for e in events if e["event"] == "start"] == [1]
    assert events[-1] | {"event": "end", "step": 2} == events[-1]


def test_a_written_file_comes_with_the_command_that_runs_it(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a job.sh"
    words = ["local", str(run_file), "--gpus-per-node", "1"]
    assert launch(capsys, *words, "-o", str(out)) == (
        0,
        f"{out}: run it with\n  bash '{out}'\n",
        "",
    )
    assert out.read_text() == launch(capsys, *words)[1]


@pytest.mark.parametrize(
    ("words", "nodes", "processes"),
    [
        ("--gpus-per-node 4", 1, 4),
        ("--gpus 8", 1, 8),
        ("--gpus 16 --nodes 2", 2, 8),
        ("--gpus 16 --gpus-per-node 4", 4, 4),
        ("--gpus 16 --hardware h100", 2, 8),
        ("--gpus 4 --hardware h100", 1, 4),
        ("--hardware a100 --nodes 2", 2, 8),
        ("--gpus-per-node 0 --processes-per-node 3", 1, 3),
        ("--gpus-per-node 0", 1, 1),
    ],
)
def test_the_size_of_a_job(
    words: str,
    nodes: int,
    processes: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_run(load_run(None, ["train.global_batch=96", "train.device=auto"])))
    code, text, error = launch(capsys, "local", str(file), *words.split())
    assert code == 0, error
    assert f" --nnodes {nodes} --nproc-per-node {processes} " in text
    assert ("train.device=cpu" in text) == ("--gpus-per-node 0" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give --gpus-per-node M (0 for CPUs), or --gpus, or --hardware"),
        ("--gpus 0", "--gpus must be at least 1, got 0; --gpus-per-node 0 trains on CPUs"),
        ("--gpus 8 --nodes 3", "--gpus 8 is not 3 nodes with 2 GPUs each"),
        ("--gpus-per-node -1", "--gpus-per-node must be at least 0, got -1"),
        ("--gpus-per-node 8 --processes-per-node 4", "one process uses one GPU"),
        ("--gpus-per-node 0 --processes-per-node 0", "--processes-per-node must be at least 1"),
        ("--gpus-per-node 1 --nodes 0", "--nodes must be N or N:MAX, from 1, got 0:0"),
        ("--gpus-per-node 1 --nodes 5:4", "--nodes must be N or N:MAX, from 1, got 5:4"),
        ("--gpus-per-node 1 --nodes two", '--nodes must be N, or N:MAX with hot spares, got "two"'),
        ("--gpus-per-node 1 --restarts -1", "--restarts must be at least 0, got -1"),
        ("--gpus-per-node 1 --name A_b", 'begin with a letter, got "A_b": give another with'),
        ("--gpus-per-node 3", "train.global_batch"),
        ("--gpus 1 train.device=cpu", 'has 1 GPU per node, but the run sets train.device = "cpu"'),
        ("--gpus-per-node 0 train.device=cuda", "add train.device=cpu, or change --gpus-per-node"),
        ("--gpus-per-node 1 train.stepz=1", "unknown key; did you mean train.steps?"),
        ("--gpus-per-node 1 --nodes 2 --submit", "local cannot start 2 nodes from one"),
        ("--gpus-per-node 1 --epochs 0", "train.epochs  expected a number greater than 0, got 0"),
        (
            "--gpus-per-node 1 --epochs 1 data.source=recall",
            "needs data of a known size",
        ),
        (
            "--gpus-per-node 1 --epochs 1 data.source=nowhere",
            "needs the size of the data, here: ",
        ),
        ("--gpus-per-node 1 -o /nowhere/job.sh", "cannot write /nowhere/job.sh: No such file"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: str, message: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, error = launch(capsys, "local", str(run_file), *words.split())
    assert (code, text) == (2, "")
    assert message in error


def test_a_run_file_is_needed_and_no_file_is_replaced(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = launch(capsys, "local", "--gpus-per-node", "1")
    assert code == 2
    assert "launch needs a run file" in error
    before = run_file.read_text()
    words = ["local", str(run_file), "--gpus-per-node", "1", "-o", str(run_file)]
    code, _, error = launch(capsys, *words)
    assert code == 2
    assert "already exists: choose another name with -o" in error
    assert run_file.read_text() == before


def test_a_missing_program_is_named(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, text, error = launch(capsys, "local", str(run_file), "--gpus-per-node", "1", "--submit")
    assert (code, text) == (2, "")
    assert "--submit needs the program bash, which is not on the PATH of this machine" in error


def test_relative_paths_hold_wherever_the_job_starts(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run file as the job starts it, read in another folder."""
    monkeypatch.chdir(run_file.parent)
    job = [str(run_file), "--gpus-per-node", "0", "checkpoint.key_file=my key", "-o", "-"]
    job += ["data.source=../tokens"]
    expected = {"local": run_file.parent, "docker": Path("/shared")}
    for target, base in expected.items():
        given = ["--run-dir", "runs/../first"]
        assert main(["launch", target, *job, *given]) == 0
        text = capsys.readouterr().out
        assert f"checkpoint.key_file={base}/my key" in text
        assert f"data.source={base.parent / 'tokens'}" in text
        assert f"{base / 'first'}" in text
    assert not Path("-").exists()


def test_the_folders_of_a_mixture_become_absolute(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_file.parent)
    mix = 'data.mix=[{source="../a b"},{source="builtin",weight=2}]'
    assert main(["launch", "local", str(run_file), "--gpus-per-node", "0", mix, "-o", "-"]) == 0
    folder = run_file.parent.parent / "a b"
    expected = f'[{{source = "{folder}", weight = 1.0}}, {{source = "builtin", weight = 2.0}}]'
    assert f"data.mix={expected}" in capsys.readouterr().out


def test_the_conveniences_of_the_guides(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model size, passes over the data, and a GPU that the model does not fit."""
    from longspan.data.opening import open_source
    from longspan.data.source import TokenSource

    run = load_run(run_file)
    source = open_source(run.data, run.model)
    assert isinstance(source, TokenSource)
    samples = source.num_windows("train")
    code, text, error = launch(
        capsys, "local", str(run_file), "--gpus", "1", "--epochs", "20", "--hardware", "h100"
    )
    assert code == 0
    assert "train.epochs=20\n" in text.replace(" \\", "")
    assert load_run(run_file, ["train.epochs=20"]).train.steps == -(-20 * samples // 64)
    assert "warning" not in error
    run_file.write_text('[model]\npreset = "tiny"\n[data]\nsource = "recall"\n')
    words = ["local", str(run_file), "--gpus", "1", "--hardware", "h100", "--model-size", "13b"]
    code, text, error = launch(capsys, *words)
    assert (code, "model.preset=13b" in text) == (0, True)
    assert "warning: a step needs" in error


def test_numbers_of_nodes_and_minutes_are_parsed() -> None:
    assert [parse_nodes(text) for text in ("1", "4:5")] == [(1, 1), (4, 5)]
    times = {"90": 90, "24:00:00": 1440, "0:00:30": 1, "1-12:00:00": 2160, "2-00": None, "x": None}
    for text, minutes in {**times, "1:30": None, "": None, "٣": None}.items():
        if minutes is None:
            with pytest.raises(UserError, match="--time must be minutes"):
                parse_minutes(text)
        else:
            assert parse_minutes(text) == minutes, text


def test_what_is_not_printable_is_refused_and_all_problems_are_listed() -> None:
    with pytest.raises(UserError) as raised:
        Job("-x", "a=b.txt", "runs/\u202eevil", ("--submit", "a.b=\n"), nodes=2, restarts=-1)
    message = str(raised.value)
    for part in (
        "the run folder must not have U+202E, which is not printable",
        "the run file must not have = in its path",
        "the run file must end in .toml, .yaml or .yml",
        'must look like section.key=value, got "--submit"',
        "the override 2 must not have U+000A",
        "the name must be at most 40",
        "--nodes must be",
        "--restarts must be",
    ):
        assert part in message
    assert "\u202e" not in message
    assert "\n" not in message
    assert "-m longspan train ./-run.toml" in script(Job("a", "-run.toml", "runs/a"))
