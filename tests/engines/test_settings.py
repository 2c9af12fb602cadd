"""DeepSpeed's and Accelerate's settings, what a user's file may add, and runs that are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy

from longspan.cli import main
from longspan.config import Layout
from longspan.engines.accelerate import fsdp_plugin
from longspan.engines.accelerate_fields import FSDP_ENVIRONMENT, accelerate_fields
from longspan.engines.deepspeed_fields import deepspeed_fields
from longspan.engines.settings import accelerate_settings, deepspeed_settings
from longspan.errors import UserError
from longspan.runfile import load_run
from tests.slow import slow

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


def settings(*overrides: str) -> dict[str, Any]:
    device = ["train.device=cpu", "train.precision=fp32"]
    run = load_run(None, [*SMALL, *device, "engine.name=deepspeed", *overrides], world=2)
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
    assert found["zero_optimization"]["sub_group_size"] == 1000
    assert found["zero_optimization"]["reduce_bucket_size"] == 77
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
        "gradient_cliping": 1.0,
    }
    file.write_text(json.dumps(wrong))
    run_dir = tmp_path / "run"
    options = [*SMALL, "engine.name=deepspeed", f"engine.deepspeed_config={file}"]
    assert main(["train", *options, "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "disagree on 11 settings" in error
    found = dict(line.split(maxsplit=1) for line in error.splitlines()[1:])
    assert found == {
        "train_batch_size": "16, but train.global_batch is 8: set train.global_batch = 16",
        "bf16.enabled": 'true, but train.precision is "fp32": set train.precision = "bf16"',
        "zero_optimization.stage": "1, but layout.zero is 3: set layout.zero = 1",
        "zero_optimization.offload_optimizer.device": '"cpu", but engine.offload_optimizer is '
        '"none": set engine.offload_optimizer = "cpu"',
        "optimizer.type": '"OneBitAdam": DeepSpeed no longer has 1-bit optimizers; the optimizer '
        'is AdamW: set "AdamW"',
        "optimizer.params.lr": "7, but train.lr is 0.0025: set train.lr = 7",
        "optimizer.params.amsgrad": "true: AMSGrad is not supported: set false",
        "scheduler.type": '"WarmupLR", but train.schedule is "cosine": set train.schedule = '
        '"constant"',
        "scheduler.params.warmup_num_steps": "3, but train.warmup_steps is 20: set "
        "train.warmup_steps = 3",
        "tensor_parallel": '{"autotp_size": 2}: remove it, and set engine.name = "native" and '
        "layout.tensor",
        "gradient_cliping": "1.0: unknown setting, which would have no effect; did you mean "
        "gradient_clipping?",
    }
    assert not run_dir.exists()


ADAMW = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
ON_CPU = {"device": "cpu", "pin_memory": True}
COMMUNICATION = dict.fromkeys(
    ("allgather_partitions", "reduce_scatter", "overlap_comm", "contiguous_gradients"), True
)
GUIDES = {
    "ZeRO-2 in fp16": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 2, **COMMUNICATION},
        "fp16": {
            "enabled": True,
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "gradient_clipping": 1.0,
    },
    "ZeRO-3, offloaded, with checkpointing": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": ON_CPU,
            "offload_param": ON_CPU,
            **COMMUNICATION,
        },
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
    },
    "ZeRO-2, offloaded, with a schedule": {
        "train_batch_size": 256,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {"stage": 2, "offload_optimizer": ON_CPU, **COMMUNICATION},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAMW, "betas": [0.9, 0.999], "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4,
                "warmup_num_steps": 1000,
                "total_num_steps": 100000,
            },
        },
    },
    "ZeRO-3 for large models": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": ON_CPU,
            "offload_optimizer": ON_CPU,
            "sub_group_size": 1e9,
            "stage3_prefetch_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    },
    "in bf16, left to the run file": {
        "elasticity": {"enabled": False},  # removed from DeepSpeed, which fails on it
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 1000},
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
    },
}
"""Configurations such as guides to distributed training give."""
ON_GPU = ["train.device=cuda", "train.precision=bf16", "train.compile=false"]


def follow(error: str, file: dict[str, Any]) -> list[str]:
    """Change `file` as the message says, and return the overrides that it asks for."""
    overrides = []
    for line in error.splitlines()[1:]:
        name, text = line.split(maxsplit=1)
        *tables, key = name.split(".")
        advice = text.rpartition(": ")[2]
        if re.search(r" is .*: set [a-z]+\.", text):
            for part in advice.removeprefix("set ").split(", "):
                overrides.append(part.replace(" = ", "=").replace('"', ""))
            continue
        table = file
        for each in tables:
            table = table[each]
        if advice.startswith("remove it"):
            del table[key]
        else:
            assert advice.startswith("set "), advice
            table[key] = json.loads(advice.removeprefix("set "))
    return overrides


@pytest.mark.parametrize("name", GUIDES)
def test_the_configurations_of_guides_are_accepted_as_one_message_says(
    tmp_path: Path, name: str
) -> None:
    path, file = tmp_path / "ds.json", deepcopy(GUIDES[name])
    options = [*ON_GPU, f"engine.deepspeed_config={path}"]
    path.write_text(json.dumps(file))
    if name == "in bf16, left to the run file":
        assert settings(*options)["torch_autocast"]["enabled"]
        assert "elasticity" not in settings(*options)
        return
    with pytest.raises(UserError) as caught:
        settings(*options)
    overrides = follow(str(caught.value), file)
    path.write_text(json.dumps(file))
    found = settings(*options, *overrides)
    for key in ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"):
        assert found[key] == file.get(key, found[key])
    zero, asked = found["zero_optimization"], file["zero_optimization"]
    assert {key: zero[key] for key in asked} == asked
    if "optimizer" in file:
        assert found["optimizer"] == file["optimizer"]
    if "scheduler" in file:
        given = file["scheduler"]["params"] | {"warmup_type": "linear"}
        del given["warmup_min_lr"]  # 0, as always
        assert found["scheduler"] == {**file["scheduler"], "params": given}
    is_fp16 = file.get("fp16", {}).get("enabled", False)
    assert found["torch_autocast"]["dtype"] == ("float16" if is_fp16 else "bfloat16")
    assert not found["fp16"]["enabled"]  # DeepSpeed's own would round the weights


def test_the_message_in_the_docs_is_the_printed_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    path = tmp_path / "ds.json"
    file = {"train_batch_size": 64, "fp16": {"enabled": True, "loss_scale_window": 1000}}
    path.write_text(json.dumps(file))
    with pytest.raises(UserError) as caught:
        settings(*ON_GPU, f"engine.deepspeed_config={path}")
    assert str(caught.value).replace(str(path), "ds.json") == shown


def test_two_fields_that_ask_for_different_values_of_a_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    file = {
        "optimizer": {"params": {"lr": 1e-4}},
        "scheduler": {"params": {"warmup_max_lr": 2e-4}},
    }
    path.write_text(json.dumps(file))
    for lr in (1e-4, 2e-4, 3e-4):
        with pytest.raises(UserError, match=r"0\.0002 needs train\.lr = 0\.0002, but optimizer"):
            settings(f"engine.deepspeed_config={path}", f"train.lr={lr}")


@pytest.mark.parametrize(
    "file",
    [
        {"train_batch_size": 7},
        {"train_batch_size": "many"},
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
        },
        {"zero_optimization": True},
        {"zero_optimization": {"stage": "two", "reduce_bucket_size": "big"}},
        {"zero_optimization": {"stage": 9}},
        {"zero_optimization": {"stage": "3"}},
        {"gradient_clipping": "1"},
        {"train_bach_size": "auto"},
        {"zero_optimization": {"stge": None}},
        {"scheduler": {"type": ["WarmupLR"]}},
        {"fp16": {"enabled": True}},  # on a CPU
        {"torch_autocast": {"enabled": True, "dtype": "int8"}},
    ],
)
def test_values_that_no_run_can_have_are_refused(tmp_path: Path, file: dict[str, Any]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    with pytest.raises(UserError, match="disagree"):
        settings(f"engine.deepspeed_config={path}", "engine.reduce_bucket_size=10")


def test_every_field_that_deepspeed_has_is_known() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    run = load_run(None, [*SMALL, "engine.name=deepspeed"], world=2)
    known = deepspeed_fields(run, run.layout.resolve(2), 3, {})
    for table, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "csv_monitor": CSVConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
    }.items():
        for name, field in model.model_fields.items():
            full = f"{table}.{field.alias or name}"
            assert full in known or any(key.startswith(f"{full}.") for key in known), full


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
        {"communication_data_type": "bf16"},
        {"prescale_gradients": True},
    ],
)
def test_a_file_may_not_change_what_is_computed(tmp_path: Path, added: dict[str, object]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match="disagree on 1 setting "):
        settings(f"engine.deepspeed_config={tmp_path / 'ds.json'}")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN', '{"gradient_clipping": NaN}'])
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


@slow("parity")
@pytest.mark.parametrize("mode", ["fsdp2", "deepspeed"])
def test_a_mode_that_accelerate_replaces_is_refused(
    mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["engine.name=accelerate", f"engine.mode={mode}", "--nproc", "2"]
    assert main(["train", *SMALL, *options, "--run-dir", str(tmp_path / "run")]) == 2
    assert "it set up MULTI_CPU: its sharded modes need a GPU" in capfd.readouterr().err


@slow("parity")
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


def accelerate(world: int, *overrides: str) -> dict[str, Any]:
    run = load_run(None, [*SMALL, "engine.name=accelerate", *overrides], world=world)
    return accelerate_settings(run, run.layout.resolve(world))


def accept(world: int, path: Path, file: dict[str, Any], *options: str) -> dict[str, Any]:
    """Accelerate's settings once `file` and the overrides are changed as one message says."""
    options = (*options, f"engine.accelerate_config={path}")
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(UserError) as caught:
        accelerate(world, *options)
    overrides = follow(str(caught.value), file)
    path.write_text(yaml.safe_dump(file))
    return accelerate(world, *options, *overrides)


def test_accelerate_s_own_file_is_accepted_as_one_message_says(tmp_path: Path) -> None:
    guide = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": 1,
        "num_processes": 8,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
    }
    options = ["train.device=cuda", "train.precision=fp32", "train.global_batch=32"]
    found = accept(8, tmp_path / "a.yaml", guide, *options)
    assert guide["gradient_accumulation_steps"] == 4
    assert {key: found[key] for key in guide if key in found} == {
        key: value for key, value in guide.items() if key in found
    }
    sharded = {
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "downcast_bf16": "no",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "SHARD_GRAD_OP",
            "fsdp_activation_checkpointing": True,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
        "main_process_port": 29501,
    }
    options = ["train.device=cuda", "train.precision=fp32", "layout.zero=0"]
    text = yaml.safe_dump(sharded)
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        accelerate(2, *options, f"engine.accelerate_config={tmp_path / 'b.yaml'}")
    lines = dict(line.split(maxsplit=1) for line in str(caught.value).splitlines()[1:])
    assert lines.keys() == {
        "distributed_type",
        "mixed_precision",
        "dynamo_config.dynamo_backend",
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_sharding_strategy",
        "fsdp_config.fsdp_activation_checkpointing",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_state_dict_type",
        "main_process_port",
    }
    assert 'set engine.mode = "fsdp2"' in lines["distributed_type"]


def test_fsdp2_of_accelerate_follows_the_layout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("accelerate")
    for name in ("OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING", "ACTIVATION_CHECKPOINTING_OFFLOAD"):
        monkeypatch.setenv(f"FSDP_{name}", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # which the plugin sets itself
    plugin = fsdp_plugin(library, Layout(zero=2, gradient_compression="bf16"), ["Block"])
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16
    assert plugin.activation_checkpointing is plugin.reshard_after_forward is False
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    exact = fsdp_plugin(library, Layout(), ["Block"])
    assert exact.mixed_precision_policy.reduce_dtype is torch.float32
    assert exact.reshard_after_forward


def test_every_field_that_accelerate_has_is_known() -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig

    run = load_run(None, [*SMALL, "engine.name=accelerate", "layout.zero=0"], world=2)
    ranks = run.layout.resolve(2)
    known = accelerate_fields(run, ranks, "plain", is_launched=False)
    for name in ClusterConfig.__dataclass_fields__:
        assert name in known or any(key.startswith(f"{name}.") for key in known), name


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, 'mixed_precision  "bf16", but train.precision'),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps  4, but"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_config.dynamo_backend"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
    ],
)
def test_what_accelerate_launch_passes_on_must_agree(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(
        None,
        [
            *SMALL,
            "engine.name=accelerate",
            "layout.zero=0",
            "train.precision=fp32",
            "train.device=cpu",
        ],
        world=2,
    )
    for name in [*FSDP_ENVIRONMENT, "ACCELERATE_USE_FSDP"]:  # Accelerate itself sets some
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    accelerate_settings(run, run.layout.resolve(2))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(message)):
        accelerate_settings(run, run.layout.resolve(2))


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
    assert ("needs a multiple of 2 processes, but there is 1" in done.stderr) == (ranks == 2)
