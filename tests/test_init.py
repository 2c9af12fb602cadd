"""`longspan init` writes run files that load as promised and train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from longspan import init
from longspan.cli import main
from longspan.config import SECTIONS
from longspan.data.build import build
from longspan.device import resolve
from longspan.init import FOLLOWING, KEYS, Machine, render, starter_run
from longspan.presets import MODELS
from longspan.runfile import load_run

MACHINES = [
    Machine(memory=8 << 30),
    Machine("cuda", "bf16", True, devices=1, memory=80 << 30),
    Machine("cuda", "bf16", True, devices=6, memory=6 * 80 << 30),
]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longspan.cli.training.builtin_name", lambda: "cpu")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("preset", MODELS)
def test_the_written_file_is_the_promised_run(
    preset: str, machine: Machine, tmp_path: Path
) -> None:
    run = starter_run(preset, None, machine)
    file = tmp_path / "run.toml"
    init.write(render(run, machine), file)
    for world in {1, machine.devices}:
        assert load_run(file, world=world) == run
    assert run.model == load_run(None, [f"model.preset={preset}", "model.vocab=256"]).model
    assert (run.train.device, run.train.precision) == (machine.device, machine.precision)


def test_every_key_has_its_description_as_a_comment() -> None:
    text = render(starter_run(None, None, MACHINES[0]), MACHINES[0])
    for section, keys in KEYS.items():
        table = text.split(f"[{section}]\n")[1].split("\n\n")[0]
        table = re.sub(rf"^# ({'|'.join(FOLLOWING)}) = ", r"\1 = ", table, flags=re.M)
        for key in keys:
            description = " ".join((SECTIONS[section].model_fields[key].description or "").split())
            (comment,) = re.findall(rf"((?:# .*\n)+){key} = ", table)
            assert " ".join(comment.replace("# ", "").split()) == description
    assert list(KEYS) == list(SECTIONS)


def test_what_it_assumes_of_a_cpu_is_what_auto_resolves_to() -> None:
    train = resolve(load_run(None), torch.device("cpu")).train
    expected = Machine(memory=init.this_machine(has_gpu=False).memory)
    assert init.this_machine(has_gpu=False) == expected
    assert (train.device, train.precision, train.compile) == (
        expected.device,
        expected.precision,
        expected.compiled,
    )


def test_a_new_run_file_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--preset", "tiny"]) == 0
    told = capsys.readouterr().out
    assert "wrote run.toml: tiny, 459,392 parameters, context 4,096, cpu, fp32" in told
    assert "  longspan plan run.toml    # predict" in told
    assert "  longspan train run.toml   # train" in told
    written = Path("run.toml").read_text()
    assert main(["config", "show", "run.toml"]) == 0
    shown = capsys.readouterr().out
    for line in (line for line in written.splitlines() if re.match(r"\w+ = [^\[]", line)):
        assert f"\n{line}\n" in shown

    short = [
        "train.steps=2",
        "train.eval_samples=1",
        "data.context=256",
        "track.prompt=",
    ]
    assert main(["train", "run.toml", *short, "--run-dir", "run"]) == 0

    assert main(["init", "--preset", "125m"]) == 2
    assert "run.toml already exists: choose another name with -o" in capsys.readouterr().err
    assert Path("run.toml").read_text() == written
    assert main(["init", "-o", "-"]) == 0
    assert capsys.readouterr().out == written


def test_it_points_at_a_folder_of_shards(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("some text to learn " * 300)
    build([Path("in.txt")], Path("shards"), validation=0)
    assert main(["init", "--data", "shards", "-o", "mine.toml"]) == 0
    run = load_run(Path("mine.toml"))
    assert (run.data.source, run.model.vocab) == ("shards", 256)
    for wrong, message in (
        (["--data", "nowhere"], "cannot read nowhere/index.json"),
        (["--data", "shards", "--preset", "7b"], "reduce data.context or add text"),
        (["-o", "mine.json"], "the run file must end in .toml, got mine.json"),
        (["-o", "nowhere/mine.toml"], "cannot write nowhere/mine.toml"),
    ):
        capsys.readouterr()
        assert main(["init", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["in.txt", "mine.toml", "shards"]


def test_it_warns_of_a_model_that_does_not_fit() -> None:
    run = starter_run("7b", None, MACHINES[1])
    told = init.next_steps(run, Path("run.toml"), MACHINES[1])
    assert "needs at least 97 GiB for weights, gradients and optimizer state" in told
    assert "this machine has 80 GiB" in told
    assert "--nproc 6" in init.next_steps(run, Path("run.toml"), MACHINES[2])
