"""`train.mlp_tile_tokens` and `train.offload_limit_gib`: what is refused, and what is planned."""

from __future__ import annotations

import pytest

from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import devices
from longspan.planning.ladder import ladder
from longspan.planning.memory import memory_per_rank
from longspan.planning.run_time import predict
from longspan.runfile import load_run

TILES = "train.mlp_tile_tokens=8192"
FULL = "train.activation_checkpointing=full"
OFFLOAD = "train.offload_activations=true"
GIB = 2**30


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["engine.name=deepspeed"], 1, 'needs engine.name = "native"'),
        (["model.linear=low_rank"], 1, 'needs model.linear = "dense"'),
        (["model.lora.rank=4"], 1, "with model.lora"),
        (["train.fp8=true", "train.precision=bf16"], 1, "with train.fp8 = true"),
        (["layout.tensor=2"], 2, "with layout.tensor = 2"),
        (["layout.pipeline=2", "layout.schedule=zbv"], 2, 'with layout.schedule = "zbv"'),
        (["model.factory=m:f"], 1, "with model.factory"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    options: list[str], world: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"(?m)^  train.mlp_tile_tokens .*{message}"):
        load_run(None, [TILES, *options], world=world)


def test_a_limit_of_what_is_not_offloaded_is_refused() -> None:
    with pytest.raises(UserError, match=r"train.offload_limit_gib .*has no effect"):
        load_run(None, ["train.offload_limit_gib=4"])


def run_of(*options: str) -> Run:
    return load_run(None, ["model.preset=1.3b", "data.context=65536", "train.micro_batch=1",
                           "train.global_batch=1", "train.precision=bf16", *options],
                    builtin="cuda", world=1)  # fmt: skip


def test_tiles_take_the_hidden_activations_out_of_the_plan() -> None:
    run, tiled = run_of(FULL), run_of(FULL, TILES)
    whole, in_tiles = (memory_per_rank(x, 1)[0].peak["block workspace"] for x in (run, tiled))
    hidden = 2 * run.model.ffn * 65536  # one tensor of them
    sums = 3 * 4 * run.model.hidden * run.model.ffn
    assert 3 * hidden < whole - in_tiles < 6 * hidden - sums
    h200 = devices()["h200"]
    of_full = predict(tiled, 1, h200).step_s / predict(run, 1, h200).step_s
    of_none = predict(run_of(TILES), 1, h200).step_s / predict(run_of(), 1, h200).step_s
    assert 1 < of_full < 1.03 < of_none < 1.25  # gate and up are recomputed


def test_tiles_are_on_the_ladder() -> None:
    run = run_of(FULL)
    found = ladder(run, 1, devices()["h200"], 1 * GIB)
    assert found is not None
    (rung,) = (rung for rung in found.rungs if rung["setting"] == "train.mlp_tile_tokens=8192")
    assert rung["saves"] > 0
    for refused in ("model.lora.rank=4", "train.chunk_tokens=8192"):
        found = ladder(run_of(FULL, refused), 1, devices()["h200"], 1 * GIB)
        assert found is not None
        assert not any("mlp_tile" in rung["setting"] for rung in found.rungs)


def test_a_tile_of_all_tokens_is_planned_as_none() -> None:
    whole, tiled = (run_of(OFFLOAD, f"train.mlp_tile_tokens={tile}") for tile in (0, 65536))
    assert memory_per_rank(whole, 1) == memory_per_rank(tiled, 1)
    h200 = devices()["h200"]
    assert predict(whole, 1, h200) == predict(tiled, 1, h200)


def test_activations_beyond_the_limit_are_planned_on_the_device() -> None:
    block = 4 * 2048 * 65536  # an input
    none, some, every = (
        memory_per_rank(run_of(FULL, TILES, *more), 1)[0]
        for more in ([], [OFFLOAD, f"train.offload_limit_gib={10.9 * block / GIB}"], [OFFLOAD])
    )
    assert none.kept["block inputs"] == every.offloaded == 24 * block
    assert some.offloaded == 10 * block  # whole buffers
    assert none.allocated - some.allocated == 10 * block
    assert every.allocated < some.allocated
