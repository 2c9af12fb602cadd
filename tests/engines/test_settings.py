"""DeepSpeed's and Accelerate's settings, what a user's file may add, and runs that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from longspan.cli import main
from longspan.engines.settings import deepspeed_settings
from longspan.errors import UserError
from longspan.runfile import load_run

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.grad_clip=0.5",
]


def settings(*overrides: str) -> dict[str, object]:
    run = load_run(None, [*SMALL, "engine.name=deepspeed", *overrides], world=2)
    return deepspeed_settings(run, run.layout.resolve(2))


def test_settings_follow_from_the_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["layout.zero=2", "engine.offload_optimizer=cpu", "engine.reduce_bucket_size=1000"]
    command = ["config", "show", "--deepspeed", "--nproc", "2", *SMALL, *options]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train_batch_size"] == 8
    assert shown["gradient_accumulation_steps"] == 2
    assert shown["gradient_clipping"] == 0.5
    zero = shown["zero_optimization"]
    assert zero["stage"] == 2
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 1000


def test_a_file_that_agrees_is_accepted_and_may_add_settings(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    derived = settings()
    file.write_text(json.dumps(derived))
    assert settings(f"engine.deepspeed_config={file}") == derived
    added = {
        "zero_optimization": {"stage": "auto", "sub_group_size": 1000, "reduce_bucket_size": 77},
        "flops_profiler": {"enabled": True},
        "train_batch_size": "auto",
    }
    file.write_text(json.dumps(added))
    found = settings(f"engine.deepspeed_config={file}")
    assert found["zero_optimization"]["sub_group_size"] == 1000  # type: ignore[index]
    assert found["zero_optimization"]["reduce_bucket_size"] == 77  # type: ignore[index]
    assert found["flops_profiler"] == {"enabled": True}
    assert found["train_batch_size"] == 8


def test_every_conflict_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    wrong = {
        "train_batch_size": 16,
        "gradient_clipping": 0.5,  # this one is right
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 7, "amsgrad": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "tensor_parallel": {"autotp_size": 2},
    }
    file.write_text(json.dumps(wrong))
    run_dir = tmp_path / "run"
    options = [*SMALL, "engine.name=deepspeed", f"engine.deepspeed_config={file}"]
    assert main(["train", *options, "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "disagree on 10 values" in error
    for text in (
        "train_batch_size                            16, but the run file says 8",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "DeepSpeed no longer has 1-bit optimizers",
        "optimizer.params.lr",
        "optimizer.params.amsgrad",
        "scheduler.type",
        "scheduler.params.warmup_num_steps",
        "tensor_parallel",
    ):
        assert text in error
    assert "gradient_clipping" not in error
    assert not run_dir.exists()


def test_unsupported_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--deepspeed", "--nproc", "0", *SMALL]) == 2
    assert "--nproc must be at least 1, got 0" in capsys.readouterr().err
    assert main(["config", "show", "--deepspeed", "--nproc", "2", *SMALL, "layout.tensor=2"]) == 2
    assert "layout.tensor  2 is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "added",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"communication_data_type": "fp16"},
        {"prescale_gradients": True},
    ],
)
def test_a_file_may_not_change_what_is_computed(tmp_path: Path, added: dict[str, object]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match="is not set by the run file"):
        settings(f"engine.deepspeed_config={tmp_path / 'ds.json'}")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN'])
def test_an_invalid_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError, match=r"ds\.json"):
        settings(f"engine.deepspeed_config={tmp_path / 'ds.json'}")


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_a_missing_extra_is_named(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    run_dir = tmp_path / "run"
    assert main(["train", *SMALL, f"engine.name={name}", "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert f'pip install "longspan[{name}]"' in error
    assert len(error.splitlines()) == 1
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["layout.tensor=2"], "layout.tensor  2 is not supported with engine.name"),
        (["layout.sequence=2"], "layout.sequence  2 is not supported with engine.name"),
        (
            ["layout.pipeline=2", "model.layers=2"],
            "layout.pipeline  2 is not supported with engine.name",
        ),
        (["layout.zero=0", "engine.offload_optimizer=cpu"], "needs layout.zero >= 1"),
    ],
)
def test_unsupported_layouts_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        settings(*options)


@pytest.mark.parametrize("mode", ["fsdp2", "deepspeed"])
def test_a_mode_that_accelerate_replaces_is_refused(
    mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["engine.name=accelerate", f"engine.mode={mode}", "--nproc", "2"]
    assert main(["train", *SMALL, *options, "--run-dir", str(tmp_path / "run")]) == 2
    assert "it set up MULTI_CPU: its sharded modes need a GPU" in capfd.readouterr().err


def test_verify_compares_engines(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["engine.name=deepspeed", "engine.param_persistence_threshold=0"]
    options = [*engine, "model.linear=sketched", "layout.zero=3"]
    assert main(["verify", *SMALL, *options, "--nproc", "2", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"]
    assert report["layout"].endswith("deepspeed")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["layout.zero=0"], "MULTI_CPU"),
        (["layout.zero=2"], "FSDP"),
        (["layout.zero=2", "engine.mode=deepspeed"], "DEEPSPEED"),
    ],
)
def test_accelerate_s_file_follows_from_the_run_file(
    options: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["config", "show", "--accelerate", "--nproc", "2", *SMALL, "engine.name=accelerate"]
    assert main([*command, *options]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["distributed_type"] == kind
    assert shown["num_processes"] == 2
    assert shown.get("fsdp_config", {}).get("fsdp_reshard_after_forward", False) is False
    assert ("deepspeed_config" in shown) == (kind == "DEEPSPEED")


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_s_launcher_runs_what_was_asked_for_or_nothing(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU it starts one process, however many it is asked for."""
    run = [*SMALL, "engine.name=accelerate", f"layout.replicate={ranks}", "train.steps=2"]
    assert main(["config", "show", "--accelerate", "--nproc", str(ranks), *run]) == 0
    (tmp_path / "accelerate.yaml").write_text(capsys.readouterr().out)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command = [*launch, str(tmp_path / "accelerate.yaml"), "-m", "longspan", "train", *run]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (ranks == 1)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists() == (ranks == 1)
    assert ("replicate 2 needs 2 processes, but there are 1" in done.stderr) == (ranks == 2)
