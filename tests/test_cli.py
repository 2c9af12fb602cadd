"""The command line: exit codes, messages, and nothing written on wrong input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from longspan.__main__ import run
from longspan.cli import main
from longspan.data.build import build
from longspan.models.generation import Piece
from longspan.stop_signals import stop_signals
from tests.terminal import Terminal

SMALL = [
    "model.hidden=32",
    "model.heads=2",
    "data.context=64",
    "train.eval_samples=2",
    "train.warmup_steps=2",
    "track.log_every=1",
]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("some text to learn " * 60)
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "held out " * 20}))
    build([tmp_path / "in.txt"], tmp_path / "shards", validation=0)
    return tmp_path / "shards"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_rejected(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that `longspan train` prints one message, exits with 2 and writes nothing."""
    before = tree(folder)
    assert main(["train", *SMALL, *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert tree(folder) == before


def test_quiet_prints_results_and_errors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", *SMALL, "train.steps=1", "track.prompt=", "-q"]
    assert main([*run, "--run-dir", str(tmp_path / "a"), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"] == 1
    assert output.err == ""
    assert main([*run, "train.stepz=2"]) == 2
    assert "train.stepz" in capsys.readouterr().err
    assert main([*run[:-1], "--run-dir", str(tmp_path / "b")]) == 0
    assert "step 1/1" in capsys.readouterr().err  # --quiet holds for its own command


def truncate(shards: Path) -> None:
    shard = shards / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])


def replace_by_folder(shards: Path) -> None:
    (shards / "train-00000.bin").unlink()
    (shards / "train-00000.bin").mkdir()


def remove(shards: Path) -> None:
    (shards / "train-00000.bin").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=3"], "did you mean train.steps?"),
        (["train.steps=many"], 'expected an integer, got "many"'),
        (["model.heads=5"], "does not divide model.hidden = 32"),
        (["attention.segment_lengths=[10]", "attention.dilation_rates=[4]"], "use 8"),
        (["attention.kind=block_sparse", "attention.local_window=100"], "got 100: use 128"),
        (
            ["attention.kind=dense", "attention.density=0.5"],
            "no effect with attention.kind",
        ),
        (["missing.toml"], "cannot read the run file missing.toml: No such file"),
        (["data.source=nowhere"], "cannot read nowhere/index.json: it does not exist"),
        (["data.source=" + 300 * "x"], "File name too long"),
        (["--resume", "typo"], "typo is not a run folder: it has no run.toml"),
        (["--resume", "{shards}"], "is not a run folder: it has no run.toml"),
        (["track.prompt=\udcff"], "is not UTF-8 text"),
        (["train.seed=18446744073709551616"], "train.seed"),
        (["model.vocab=16777216", "model.hidden=4194304"], "parameters do not fit on cpu"),
        (["train.lr=inf"], "expected a finite number, got inf"),
        (["model.heads=9999999"], "does not divide model.hidden = 32: use 32"),
        (["model.hidden=1" + 5000 * "0"], "model.hidden"),
        (["attention.segment_lengths=[9999999999999999999999,64]"], "attention.segment_lengths"),
        (["data.source={shards}", "data.context=100000"], "reduce data.context or add text"),
        (["data.source={shards}", "model.vocab=100"], "set model.vocab=256"),
        (["one.toml", "two.toml"], "expected one run file"),
        (["train.device=cuda"], "needs a CUDA device, but torch sees none"),
    ],
)
def test_wrong_input_gives_one_message_exit_2_and_no_file(
    arguments: list[str],
    message: str,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    if "cuda" in str(arguments) and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.chdir(tmp_path)
    arguments = [argument.format(shards=shards) for argument in arguments]
    assert_rejected(arguments, message, tmp_path, capsys)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "train-00000.bin is truncated: expected 1,141 bytes, got 1,140"),
        (remove, "cannot read the shard"),
        (replace_by_folder, "train-00000.bin: it is not a regular file"),
    ],
)
def test_a_damaged_shard_gives_one_message_exit_2_and_no_file(
    damage: Callable[[Path], None],
    message: str,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(shards)
    assert_rejected([f"data.source={shards}"], message, tmp_path, capsys)


def test_an_unwritable_run_folder_gives_one_message_and_exit_2(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "run")  # inside a file, where even root cannot write
    arguments = [f"data.source={shards}", "--run-dir", target]
    assert_rejected(arguments, f"cannot write the run folder {target}", tmp_path, capsys)


def test_train_resume_generate_and_a_second_run(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "run")
    run = [*SMALL, f"data.source={shards}", "train.steps=3", "--json"]
    assert main(["train", *run, "--run-dir", run_dir]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["run_dir"], result["step"], result["tokens"]) == (run_dir, 3, 192)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints", "env.json", "heartbeats", "history.jsonl", "metrics.jsonl", "run.toml",
    ]  # fmt: skip

    assert main(["train", *run, "--run-dir", run_dir]) == 2
    assert "is not empty" in capsys.readouterr().err

    assert main(["train", "--resume", run_dir, "train.steps=5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5

    options = ["--prompt", "some ", "--tokens", "5", "--json"]
    assert main(["generate", run_dir, *options]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text.startswith("some ")
    assert main(["generate", run_dir, *options[:-1]]) == 0
    output = capsys.readouterr()
    assert output.out == text + "\n"
    assert re.fullmatch(r"5 tokens: the first after [\d.]+ s, then [\d.,]+ tok/s\n", output.err)
    shutil.rmtree(shards)  # generation does not need the data
    assert main(["generate", run_dir, *options, "--temperature", "1e-39"]) == 0
    for wrong in (
        ["--prompt", ""],
        ["--prompt", "\udcff"],
        ["--prompt", "a", "--top-p", "0"],
        ["--prompt", "a", "--temperature", "nan"],
        ["--prompt", "a", "--seed", str(10**30)],
        ["--prompt", "a", "--top-k", "-1"],
        ["--prompt", "a", "--stop", ""],
        ["--prompt", "a", "--repetition-penalty", "0"],
        ["--prompt", "a", "--batch", "0"],
        ["--prompts", str(tmp_path / "nothing")],
        [],
    ):
        assert main(["generate", run_dir, *wrong]) == 2
    capsys.readouterr()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "some "}\n\n"other"\n')
    batch = ["--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "5", "--batch", "2"]
    assert main(["generate", run_dir, *batch, "--prompt", "third", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in found] == ["third", "some ", "other"]
    assert found[1] == {"prompt": "some ", "text": text, "tokens": 5, "finish_reason": "length"}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    assert main(["generate", run_dir, *batch]) == 2
    assert "line 2 of" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "a"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupted_generation_ends_with_what_was_generated(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Piece]:
        yield Piece("a pro", 0)
        yield Piece("mpt", 1)
        raise KeyboardInterrupt

    generator = SimpleNamespace(complete=interrupted, sampling=lambda *_, **__: None)
    monkeypatch.setattr("longspan.generate.open_generator", lambda *_, **__: nullcontext(generator))
    options = ["--json"] if as_json else []
    assert main(["generate", "somewhere", "--prompt", "a pro", *options]) == 1
    output = capsys.readouterr()
    result = '{"prompt": "a pro", "text": "a prompt", "tokens": 1, "finish_reason": null}\n'
    assert output.out == (result if as_json else "a prompt\n")
    assert "interrupted" in output.err


def test_resume_starts_a_run_in_an_empty_folder(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(f'[data]\nsource = "{shards}"\n[train]\nsteps = 2\n')
    arguments = [str(tmp_path / "run.toml"), *SMALL, "--json", "--resume", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"] == 2
    assert json.loads(output.out)["validation_loss"] is None
    assert "no evaluation: the validation split holds less than one sample" in output.err


def send_after_three_steps(run_dir: Path, pid: int, number: signal.Signals) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline, "no third step in two minutes"
        time.sleep(0.02)
    os.kill(pid, number)


def train_in_another_process(arguments: list[str], run_dir: Path, number: signal.Signals) -> int:
    process = subprocess.Popen([sys.executable, "-m", "longspan", "train", *arguments])
    send_after_three_steps(run_dir, process.pid, number)
    return process.wait(timeout=120)


def train_in_this_process(arguments: list[str], run_dir: Path, number: signal.Signals) -> int:
    previous = signal.signal(number, lambda *_: None)  # without a handler it would end the tests
    sender = Thread(target=send_after_three_steps, args=(run_dir, os.getpid(), number))
    sender.start()
    try:
        return main(["train", *arguments])
    finally:
        sender.join()
        signal.signal(number, previous)


@pytest.mark.parametrize(
    ("number", "train"),
    [
        (signal.SIGINT, train_in_another_process),
        (signal.SIGTERM, train_in_this_process),
        (signal.SIGUSR1, train_in_this_process),
        (signal.SIGHUP, train_in_this_process),
    ],
)
def test_a_signal_saves_and_exits_3_and_the_resumed_run_gives_the_same_bytes(
    number: signal.Signals,
    train: Callable[[list[str], Path, signal.Signals], int],
    shards: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopped, uninterrupted = tmp_path / "stopped", tmp_path / "uninterrupted"
    options = [*SMALL, f"data.source={shards}", "track.prompt="]
    options += ["train.schedule=constant", "checkpoint.every=0"]
    code = train([*options, "train.steps=2000", "--run-dir", str(stopped)], stopped, number)
    error = capfd.readouterr().err
    assert code == 3, error
    assert f"longspan train --resume {stopped}" in error
    (saved,) = (stopped / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step < 2000

    steps = f"train.steps={step + 3}"
    assert main(["train", "--resume", str(stopped), steps]) == 0
    assert main(["train", *options, steps, "--run-dir", str(uninterrupted)]) == 0
    final = f"checkpoints/step-{step + 3:08d}/model-00000.safetensors"
    assert (stopped / final).read_bytes() == (uninterrupted / final).read_bytes()


def test_under_nohup_sighup_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGHUP in stop_signals()
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    assert signal.SIGTERM in stop_signals()


@pytest.mark.parametrize("stops", [True, False])
def test_a_closed_pipe_ends_no_training(stops: bool, shards: Path, tmp_path: Path) -> None:
    """Neither stdout nor stderr can be written; one run is stopped by SIGHUP, one finishes."""
    run_dir = tmp_path / "run"
    options = [*SMALL, f"data.source={shards}", "track.log_every=1", "track.prompt="]
    options += [f"train.steps={1_000_000 if stops else 4}", "--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "longspan", "train", *options]
    reader, writer = os.pipe()
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    try:
        if stops:
            send_after_three_steps(run_dir, process.pid, signal.SIGHUP)
        assert process.wait(timeout=120) == (3 if stops else 0)
    finally:
        process.kill()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][:3] == [1, 2, 3]
    assert len(list((run_dir / "checkpoints").iterdir())) == 1


def test_ctrl_c_twice_in_a_terminal_stops_at_once_and_each_message_has_its_own_line(
    shards: Path, tmp_path: Path
) -> None:
    # The step is long enough for the second signal to arrive during it.
    slow = ["train.steps=2000", "train.global_batch=40000", "track.log_every=1"]
    command = [sys.executable, "-m", "longspan", "train", *SMALL, f"data.source={shards}", *slow]
    with Terminal([*command, "--run-dir", str(tmp_path / "run")]) as terminal:
        terminal.wait_for("loading PyTorch")
        terminal.wait_for("preparing model and data")
        terminal.wait_for("step 0/2000")
        terminal.type("\x03")
        terminal.wait_for("again to stop at once")
        terminal.type("\x03")
        assert terminal.wait() == 1
    screen = terminal.screen()
    assert "stopping after this step; press Ctrl-C again to stop at once" in screen
    assert "longspan: interrupted; nothing more was saved" in screen
    assert "loading PyTorch" not in "".join(screen)
    assert "preparing" not in "".join(screen)
    assert "Traceback" not in "".join(screen)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_data_build_and_info(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [str(tmp_path / "in.txt"), str(tmp_path / "in.jsonl")]
    assert main(["data", "build", *inputs, "-o", str(tmp_path / "out"), "--validation", "0"]) == 0
    assert "1,322 tokens           2 documents" in capsys.readouterr().out
    assert main(["data", "info", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["longest"] == 1141
    assert main(["data", "build", "nothing", "-o", str(tmp_path / "other")]) == 2
    assert "no such file or folder: nothing" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_config_show_and_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "model.preset=125m", "data.context=131072"]) == 0
    shown = capsys.readouterr().out
    assert "# batch: 1 = micro-batch 1 × gradient accumulation 1 × data-parallel 1" in shown
    (tmp_path / "run.toml").write_text(shown)
    assert main(["config", "show", str(tmp_path / "run.toml")]) == 0
    assert capsys.readouterr().out == shown
    assert main(["config", "schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


def test_ctrl_c_before_a_command_runs_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("longspan.cli.main", interrupted)
    assert run() == 1
    assert capsys.readouterr().err == "longspan: interrupted\n"
