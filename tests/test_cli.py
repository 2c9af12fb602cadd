"""The command line as a user meets it: exit codes, messages, nothing written on wrong input."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.data.build import build

SMALL = [
    "model.hidden=32",
    "model.heads=2",
    "data.context=64",
    "train.eval_samples=2",
    "train.warmup=2",
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


def assert_refused(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`longspan train` gives one message, exit code 2, and leaves `folder` as it was."""
    before = tree(folder)
    assert main(["train", *SMALL, *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert tree(folder) == before


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
        (["train.stepz=3"], "did you mean 'steps'?"),
        (["train.steps=many"], "expected a valid integer, got 'many'"),
        (["model.heads=5"], "does not divide model.hidden = 32"),
        (["attention.segment_lengths=[10]", "attention.dilation_rates=[4]"], "use 8"),
        (["attention.kind=block_sparse", "attention.local_window=100"], "got 100: use 128"),
        (["attention.kind=dense", "attention.density=0.5"], 'no use with kind = "dense"'),
        (["missing.toml"], "cannot read the run file missing.toml: No such file"),
        (["data.source=nowhere"], "cannot read nowhere/index.json: No such file"),
        (["data.source=" + 300 * "x"], "File name too long"),
        (["--resume", "typo"], "typo is not a run folder: it has no run.toml"),
        (["--resume", "{shards}"], "is not a run folder: it has no run.toml"),
        (["track.prompt=\udcff"], "is not UTF-8 text"),
        (["train.seed=18446744073709551616"], "train.seed"),
        (["model.vocab=99999999999999"], "does not fit in the memory of cpu"),
        (["train.lr=inf"], "expected a finite number, got inf"),
        (["model.heads=99999999999"], "does not divide model.hidden = 32: use 32"),
        (["model.hidden=1" + 5000 * "0"], "model.hidden"),
        (["attention.segment_lengths=[9999999999999999999999,64]"], "attention.segment_lengths"),
        (["data.source={shards}", "data.context=100000"], "lower data.context or add text"),
        (["data.source={shards}", "model.vocab=100"], "set model.vocab=256"),
        (["one.toml", "two.toml"], "expected one run file"),
        (["train.device=cuda"], "torch sees no CUDA device"),
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
        pytest.skip("there is a CUDA device here")
    monkeypatch.chdir(tmp_path)
    arguments = [argument.format(shards=shards) for argument in arguments]
    assert_refused(arguments, message, tmp_path, capsys)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "train-00000.bin is truncated: expected 1,141 bytes, got 1,140"),
        (remove, "cannot read the shard"),
        (replace_by_folder, "train-00000.bin: it is not a file"),
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
    assert_refused([f"data.source={shards}"], message, tmp_path, capsys)


def test_an_unwritable_run_folder_gives_one_message_and_exit_2(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    target = str(tmp_path / "file" / "run")  # below a file, where root cannot write either
    arguments = [f"data.source={shards}", "--run-dir", target]
    assert_refused(arguments, f"cannot write the run folder {target}", tmp_path, capsys)


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
    assert json.loads(capsys.readouterr().out)["text"].startswith("some ")
    shutil.rmtree(shards)  # a run needs its data to train, not to generate
    assert main(["generate", run_dir, *options, "--temperature", "1e-39"]) == 0
    for wrong in (
        ["--prompt", ""],
        ["--prompt", "\udcff"],
        ["--prompt", "a", "--top-p", "0"],
        ["--prompt", "a", "--temperature", "nan"],
        ["--prompt", "a", "--seed", str(10**30)],
    ):
        assert main(["generate", run_dir, *wrong]) == 2
    assert main(["generate", str(tmp_path / "nowhere"), "--prompt", "a"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_resume_of_an_empty_folder_starts_there(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(f'[data]\nsource = "{shards}"\n[train]\nsteps = 2\n')
    arguments = [str(tmp_path / "run.toml"), *SMALL, "--json", "--resume", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["step"] == 2
    assert json.loads(output.out)["validation_loss"] is None
    assert "no evaluation: the validation split holds less than one sample" in output.err


def start_training(shards: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """A real process, returned once it has logged its third step."""
    command = [sys.executable, "-m", "longspan", "train", *SMALL, f"data.source={shards}"]
    process = subprocess.Popen(
        [*command, *arguments, "--run-dir", str(run_dir)], stderr=subprocess.PIPE, text=True
    )
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "no third step in two minutes"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_one_signal_saves_and_exits_3_and_the_run_goes_on_as_if_never_stopped(
    number: signal.Signals, shards: Path, tmp_path: Path
) -> None:
    options = ["train.steps=2000", "train.schedule=constant", "checkpoint.every=0"]
    process = start_training(shards, tmp_path / "stopped", *options)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 3, error
    assert f"longspan train --resume {tmp_path / 'stopped'}" in error
    (saved,) = (tmp_path / "stopped" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step < 2000

    steps = f"train.steps={step + 3}"
    assert main(["train", "--resume", str(tmp_path / "stopped"), steps]) == 0
    whole = [*SMALL, f"data.source={shards}", *options, steps]
    assert main(["train", *whole, "--run-dir", str(tmp_path / "whole")]) == 0
    final = f"checkpoints/step-{step + 3:08d}/model-00000.safetensors"
    assert (tmp_path / "stopped" / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()


def test_a_second_signal_stops_at_once(shards: Path, tmp_path: Path) -> None:
    # A step so long that the second signal comes within it.
    slow = ["train.steps=2000", "train.global_batch=40000", "track.log_every=1"]
    command = [sys.executable, "-m", "longspan", "train", *SMALL, f"data.source={shards}", *slow]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for awaited in ("device", "once more to stop at once"):
        while awaited not in (line := process.stderr.readline()):
            assert line, "the run ended before its first step"
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted" in error
    assert "Traceback" not in error
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
    assert "# batch: 1 = micro 1 × accumulation 1 × data-parallel 1" in shown
    (tmp_path / "run.toml").write_text(shown)
    assert main(["config", "show", str(tmp_path / "run.toml")]) == 0
    assert capsys.readouterr().out == shown
    assert main(["config", "schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from longspan.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "train a model" in done.stdout
