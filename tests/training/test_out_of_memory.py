"""Out of memory: the report, and a retry that changes no loss."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import faults
from longspan.config import Run
from longspan.errors import OutOfMemory
from longspan.planning.ladder import halved
from longspan.planning.memory import needed_by
from longspan.runfile import load_run
from longspan.training import train
from longspan.training.out_of_memory import (
    expandable_segments,
    is_out_of_memory,
    requested_bytes,
    suggestions,
)
from tests.parallel.test_apply import run_of

BATCH = ["train.steps=4", "train.global_batch=8", "train.micro_batch=4", "track.log_every=1"]
SAVED = ["checkpoint.every=2", "checkpoint.async_save=false"]


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def out_of_memory_in_step_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_visits", Counter())
    monkeypatch.setenv(faults.FAULT, "oom@backward:0:4")
    monkeypatch.setenv(faults.FAULT_LOG, str(tmp_path / "fault"))


@pytest.mark.usefixtures("out_of_memory_in_step_4")
def test_the_report_counts_every_class(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as caught:
        train(run_of(1, *BATCH), tmp_path / "run")
    first, *rest = str(caught.value).splitlines()
    assert first == "out of memory in step 4: Tried to allocate 1 GiB (injected)"
    names = ["parameters", "gradients", "optimizer state", "activations and workspace"]
    assert [line.strip().split("  ")[0] for line in rest[:4]] == names
    assert rest[4] == "settings that would free memory, cheapest first:"
    assert rest[5].strip().startswith("train.micro_batch=2")
    assert "not enough; costs smaller matrix products" in rest[5]
    history = (tmp_path / "run" / "history.jsonl").read_text()
    assert '"cause": "MemoryError: Tried to allocate 1 GiB (injected)"' in history
    assert not (tmp_path / "run" / "micro_batch").exists()


@pytest.mark.usefixtures("out_of_memory_in_step_4")
def test_half_the_micro_batch_gives_the_same_losses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(run_of(1, *BATCH, *SAVED, "train.halve_on_oom=true"), tmp_path / "halved")
    assert "retrying with half the micro-batch" in capfd.readouterr().err
    train(run_of(1, *BATCH, *SAVED), tmp_path / "whole")
    assert losses(tmp_path / "halved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert (tmp_path / "halved" / "micro_batch").read_text() == "2\n"


def test_what_checkpointing_frees_in_an_own_model_is_unknown() -> None:
    used = {"optimizer state": 1, "activations and workspace": 100}
    run = load_run(None, ["model.factory=a:b"])
    found = {s.setting: s.frees for s in suggestions(used, run, 1)}
    assert found["train.activation_checkpointing=full"] is None
    assert found["train.offload_activations=true"] == 80


def test_only_settings_that_are_not_in_use_are_suggested() -> None:
    used = {
        "parameters": 40,
        "gradients": 40,
        "optimizer state": 80,
        "activations and workspace": 1000,
    }

    def suggested(run: Run) -> dict[str, Any]:
        return {s.setting: s.frees for s in suggestions(used, run, 1)}

    found = suggested(run_of(1, *BATCH))
    now = needed_by(run_of(1, *BATCH), 1)
    for setting in list(found)[:5]:  # the numbers of the plan
        assert found[setting] == now - needed_by(run_of(1, *BATCH, setting), 1)
    assert (
        0
        < found["train.activation_checkpointing=selective"]
        < found["train.activation_checkpointing=full"]
    )
    saving = [
        "train.micro_batch=1",
        "train.activation_checkpointing=full",
        "train.optimizer=adamw8bit",
        "layout.offload=true",
    ]
    left = suggested(run_of(1, *BATCH, *saving, "train.offload_activations=true"))
    axes = ("shard", "sequence", "tensor")
    assert list(left) == [f"twice the ranks of layout.{axis}" for axis in axes]
    for world in (1, 2):
        assert "layout.offload=true" in {
            x.setting for x in suggestions(used, run_of(world, *BATCH), world)
        }
    deepspeed = {s.setting for s in suggestions(used, run_of(1, "engine.name=deepspeed"), 1)}
    assert not deepspeed & {"train.optimizer=adamw8bit", "layout.offload=true"}
    assert "train.activation_checkpointing=selective" not in deepspeed


def test_torch_s_error_messages_are_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 4e14
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")
    assert is_out_of_memory(gpu)
    assert requested_bytes(gpu) == 2.5 * 2**30
    assert not is_out_of_memory(RuntimeError("no"))
    assert requested_bytes(MemoryError()) is None


def test_free_memory_in_pieces_can_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    pieces = "Of the allocated memory 132.50 GiB is allocated by PyTorch, and 3.25 GiB is reserved "
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.38 GiB. GPU 0 has a total capacity of 139.80 GiB "
        f"of which 635.12 MiB is free. {pieces}by PyTorch but unallocated."
    )
    (found,) = expandable_segments(error)
    assert found.setting == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert found.frees == pytest.approx(3.25 * 2**30 + 635.12 * 2**20)
    assert requested_bytes(error) == 1.38 * 2**30
    more = str(error).replace("1.38 GiB", "3.80 GiB"), str(error).replace("1.38 GiB", "3.95 GiB")
    enough, too_much = (expandable_segments(torch.OutOfMemoryError(text)) for text in more)
    assert enough == [found]
    assert too_much == []
    assert expandable_segments(MemoryError()) == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert expandable_segments(error) == []


def test_a_half_still_divides_the_batch() -> None:
    assert [halved(n) for n in (2, 3, 4, 6, 12, 35)] == [1, 1, 2, 3, 6, 7]


@pytest.mark.gpu
def test_a_full_gpu_is_reported_and_retried_with_a_smaller_micro_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["train.device=cuda", "train.precision=fp32", "data.context=2048", "model.hidden=256"]
    batch = ["train.steps=2", "train.global_batch=64", "train.micro_batch=64"]
    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests left in the allocator counts too
    share = 2**30 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(OutOfMemory, match=r"train\.micro_batch=32"):
            train(run_of(1, *options, *batch), tmp_path / "full")
        train(run_of(1, *options, *batch, "train.halve_on_oom=true"), tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert "activations and workspace" in capfd.readouterr().err
    assert int((tmp_path / "run" / "micro_batch").read_text()) < 64
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
