"""ZeRO-Infinity: parameters and optimizer state on NVMe. `make nvme` runs it and compiles once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longspan.cli import main

SETTINGS = {
    "zero_optimization": {
        # By default DeepSpeed keeps a billion parameters in memory and has five buffers.
        "offload_param": {"max_in_cpu": 0, "buffer_size": 4_000_000, "buffer_count": 12}
    }
}
OPTIONS = [
    "model.hidden=1024",  # only tensors of at least 1 MiB per rank are swapped
    "model.layers=1",
    "model.heads=4",
    "data.source=recall",
    "data.recall_pairs=4",
    "data.context=64",
    "train.lr=0.001",
    "train.warmup_steps=1",
    "train.schedule=constant",
    "train.eps=1e-6",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.grad_clip=0.5",
    "train.eval_samples=1",
    "track.log_every=1",
    "track.prompt=",
    "engine.param_persistence_threshold=0",
]
ON_DISK = ["engine.name=deepspeed", "engine.offload_optimizer=nvme"]

needs_libaio = pytest.mark.skipif(
    "LONGSPAN_NVME" not in os.environ, reason="runs by `make nvme`, with libaio-dev and g++"
)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "ds.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "disk").mkdir()
    disk = [f"engine.nvme_path={tmp_path}/disk", f"engine.deepspeed_config={tmp_path}/ds.json"]
    return [*OPTIONS, *ON_DISK, "engine.offload_param=nvme", *disk]


@needs_libaio
def test_a_run_offloaded_to_nvme_is_the_same(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options, "--nproc", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"]
    folder = tmp_path / "disk" / "zero_stage_3"
    assert list(folder.glob("float32params/rank0/*.swp"))
    assert list(folder.glob("optimizer/rank1/exp_avg-*.swp"))


@needs_libaio
def test_it_resumes_from_and_to_other_engines(options: list[str], tmp_path: Path) -> None:
    def train(name: str, steps: int, *more: str) -> dict[int, float]:
        run_dir = tmp_path / name
        where = "--resume" if run_dir.exists() else "--run-dir"
        items = [*options, f"train.steps={steps}", *more]
        assert main(["train", *items, where, str(run_dir)]) == 0
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    whole = train("whole", 4, "engine.name=native")
    train("resumed", 1, "engine.name=native")
    train("resumed", 3, "--nproc", "2")
    resumed = train("resumed", 4, "engine.name=native")
    assert resumed == pytest.approx(whole, rel=1e-5)
