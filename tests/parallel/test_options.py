"""Options of a layout: gradient compression, CPU offload, loss scaling and mixed precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.checkpoint import TensorShard
from longspan.data import Batch
from longspan.device import resolve
from longspan.parallel.dtensor import to_local
from longspan.training import train
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.parallel.test_apply import (
    MEGATRON,
    assert_same_run,
    ids,
    run_of,
    steps_of,
    train_rank,
    trained,
)
from tests.steps import CPU, Steps, full_weights, open_state, run_steps


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    train(run_of(1), run_dir)
    return run_dir


@pytest.mark.parametrize("layout", ["layout.zero=1", "layout.zero=3", "layout.tensor=2"])
def test_offloading_changes_nothing(
    ranks: Ranks, single: Path, tmp_path: Path, layout: str
) -> None:
    ranks.run(train_rank, 2, [layout, "layout.offload=true"], str(tmp_path / "run"), False)
    assert_same_run(tmp_path / "run", single)


def test_one_process_offloads_and_resumes_without_and_changes_no_bit(
    single: Path, tmp_path: Path
) -> None:
    for name, first, then in (("on", [], OFFLOAD), ("off", OFFLOAD, [])):
        train(run_of(1, *first, "train.steps=2"), tmp_path / name)
        train(run_of(1, *then), tmp_path / name, resume=True)
        assert final_shards(tmp_path / name) == final_shards(single)
    assert not torch.distributed.is_initialized()


OFFLOAD = ["layout.offload=true"]


def final_shards(run_dir: Path) -> dict[str, bytes]:
    files = (run_dir / "checkpoints" / "step-00000003").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in files}


REPLICAS = ["layout.replicate=2", "layout.shard=1"]


@pytest.mark.parametrize(
    ("layout", "method", "tolerance"),
    [
        (REPLICAS, "bf16", 1e-3),
        (REPLICAS, "powersgd", 0.1),
        (["layout.shard=2", "layout.zero=2"], "bf16", 1e-3),
    ],
)
def test_gradient_compression_changes_losses_little(
    ranks: Ranks, single: Path, tmp_path: Path, layout: list[str], method: str, tolerance: float
) -> None:
    overrides = [*layout, f"layout.gradient_compression={method}"]
    if method == "powersgd":  # which starts after ten exact steps
        overrides.append("train.steps=15")
        single = tmp_path / "single"
        train(run_of(1, "train.steps=15"), single)
    ranks.run(train_rank, 2, overrides, str(tmp_path / "run"), False)
    losses, expected = losses_of(tmp_path / "run"), losses_of(single)
    difference = ((losses - expected) / expected).abs()
    assert 0 < difference.max() < tolerance
    if method == "powersgd":
        assert difference[:10].max() < 1e-5 < difference[11:].min()


def losses_of(run_dir: Path) -> torch.Tensor:
    steps = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    return trained(run_dir, steps)[0][:, 0]


@torch.backends.mkldnn.flags(enabled=False)
def fp16_steps(rank: int, world: int, overrides: list[str]) -> tuple[Steps, list[float]]:
    """Four steps in fp16, and the loss scale after each.

    The first overflows because of its scale; in the third, only the last rank has an infinite
    gradient. Without oneDNN, which sums products in fp16 where a CPU has instructions for it.
    """
    run = resolve(run_of(world, *overrides), CPU)  # which refuses fp16 on a CPU
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "fp16"})})
    losses, scales = [], []
    with open_state(run, rank, world) as (state, source):
        engine, backward = state.engine, state.engine.backward
        saved = engine.scaler_state()

        def overflow(batch: Batch, scale: Tensor) -> Tensor:
            loss = backward(batch, scale)
            if rank == world - 1:
                gradient = next(p.grad for p in engine.model.parameters() if p.grad is not None)
                to_local(gradient).view(-1)[0] = torch.inf
            return loss

        engine.load_scaler_state({**saved, "scale": 2.0**40, "backoff_factor": 2.0**-24})
        for step in range(4):
            if step == 1:
                engine.load_scaler_state(saved)
            engine.backward = overflow if step == 2 else backward  # type: ignore[method-assign]
            losses.append([float(x) for x in train_step(state, source, run.train, CPU)])
            scales.append(engine.scaler_state()["scale"])
        shards = {k: v for k, v in state.tensor_shards().items() if k.startswith("model/")}
        shards = {k: TensorShard(v.values.clone(), v.shape, v.region) for k, v in shards.items()}
    return Steps(torch.tensor(losses).double(), None, shards), scales


@cache
def single_fp16_steps(*options: str) -> tuple[Steps, list[float]]:
    return fp16_steps(0, 1, list(options))


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3"]),
        (2, ["layout.tensor=2"]),
        (4, ["layout.tensor=2", "layout.shard=2", MEGATRON]),
        (4, ["layout.tensor=2", "layout.pipeline=2"]),
    ],
    ids=ids,
)
def test_fp16_takes_the_same_steps_and_skips_the_same(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    options = ["train.global_batch=4", "train.micro_batch=2"]
    options += ["data.context=32", "data.recall_pairs=4"]
    expected, scales = single_fp16_steps(*options)
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert expected.losses[:, 1].isfinite().tolist() == [False, True, False, True]
    assert expected.losses[0, 0] != expected.losses[3, 0]
    found = ranks.run(fp16_steps, world, [*options, *layout])
    for steps, found_scales in found:
        assert found_scales == scales
        torch.testing.assert_close(steps.losses[:, 0], expected.losses[:, 0], rtol=1e-3, atol=0)
        torch.testing.assert_close(steps.losses[1::2], expected.losses[1::2], rtol=1e-2, atol=0)
        assert not steps.losses[::2, 1].isfinite().any()
    weights, single = full_weights([steps for steps, _ in found]), full_weights([expected])
    for name, weight in weights.items():
        assert (weight - single[name]).norm() <= 1e-2 * single[name].norm(), name


BF16 = ["train.precision=bf16", "model.sub_layer_norm=true", "train.global_batch=2"]
BF16 += ["data.context=32", "data.recall_pairs=4", "train.eval_samples=1"]


@pytest.mark.parametrize("option", ["layout.zero=1", "layout.zero=3", "model.linear=sketched"])
def test_weights_gathered_in_bf16_give_the_losses_of_autocast(ranks: Ranks, option: str) -> None:
    model = [option] if option.startswith("model.") else []
    expected = run_steps(0, 1, run_of(1, *BF16, *model), 2).losses[:, 0]
    for rank in ranks.run(steps_of, 2, [*BF16, option]):
        torch.testing.assert_close(rank.losses[:, 0], expected, rtol=1e-5, atol=0)
