"""What to change where a run does not fit."""

from __future__ import annotations

import json

import pytest

from longspan.cli import main
from longspan.hardware import devices
from longspan.planning.ladder import ladder
from longspan.planning.memory import memory_per_rank, needed_by
from longspan.planning.plan import plan
from longspan.planning.run_time import predict
from longspan.runfile import load_run

GIB = 2**30
GPU = devices()["h100"]
OPTIONS = [
    *["model.preset=1.3b", "data.context=65536", "train.micro_batch=2", "train.global_batch=8"],
    *["train.precision=bf16", "train.device=cuda", "layout.zero=2"],
]


def test_each_rung_is_the_plan_of_the_changed_run_and_the_path_fits() -> None:
    run = load_run(None, OPTIONS, world=4)
    needed = needed_by(run, 4)
    assert ladder(run, 4, GPU, needed) is None
    found = ladder(run, 4, GPU, needed // 5)
    assert found is not None
    assert found.needed == needed
    rows = {row["setting"]: row for row in found.rungs}
    for setting, row in rows.items():
        if "=" in setting:
            changed = load_run(None, [*OPTIONS, setting], world=4)
            assert row["needed"] == needed_by(changed, 4) == needed - row["saves"]
    twice = load_run(None, [*OPTIONS, "layout.sequence=2", "layout.shard=4"], world=8)
    assert rows["twice the ranks of layout.sequence"]["needed"] == needed_by(twice, 8)
    assert rows["train.activation_checkpointing=full"]["speed"] < 0.9
    assert found.together is not None
    assert (
        needed_by(load_run(None, [*OPTIONS, *found.together.settings], world=4), 4) <= needed // 5
    )
    assert len({x.split("=")[0] for x in found.together.settings}) == len(found.together.settings)


def test_a_plan_that_does_not_fit_shows_the_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", *OPTIONS, "--gpus", "4", "--gpu"]
    assert main([*arguments, "rtx4090"]) == 0
    text = capsys.readouterr().out
    assert "does not fit: the fullest device must have" in text
    assert "  train.activation_checkpointing=full" in text
    assert main([*arguments, "rtx4090", "--json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["ladder"]["rungs"]
    assert {"setting", "cost", "needed", "saves", "speed"} == rungs[0].keys()
    small = ["train.micro_batch=1", "train.activation_checkpointing=full"]
    assert main([*arguments, "b200", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ladder"] is None


LONG = ["model.preset=125m", "data.context=262144", "train.global_batch=2", "train.micro_batch=2"]
LONG += ["train.precision=bf16", "train.device=cuda", "data.documents=join"]
ROUNDINGS = ("train.residual_precision=bf16", "train.optimizer=adamw8bit")


@pytest.mark.parametrize(
    ("gib", "is_rounded", "is_offloaded"),
    [(40, False, False), (8, False, False), (4, True, False), (3, True, True)],
)
def test_what_fits_together_is_told_with_its_price(
    gib: int, is_rounded: bool, is_offloaded: bool
) -> None:
    run = load_run(None, LONG, world=1)
    found = ladder(run, 1, GPU, gib * GIB)
    assert found is not None
    assert found.together is not None
    changed = load_run(None, [*LONG, *found.together.settings], world=1)
    assert found.together.needed == needed_by(changed, 1) <= gib * GIB
    (memory,) = memory_per_rank(changed, 1)
    assert found.together.offloaded == memory.offloaded
    assert (memory.offloaded > 0) == is_offloaded
    assert any(x in found.together.settings for x in ROUNDINGS) == is_rounded
    speeds = [predict(x, 1, GPU).tokens_per_s for x in (changed, run)]
    assert found.together.speed == pytest.approx(speeds[0] / speeds[1])
    price = f"{found.together.needed / GIB:,.1f} GiB"
    if is_offloaded:
        price += f" and {memory.offloaded / GIB:,.1f} in CPU memory"
    text = f"the fastest that fits ({price}, {found.together.speed - 1:+.0%}): "
    assert text + " ".join(found.together.settings) in str(found)


def test_a_run_that_recomputes_already_is_not_told_to_recompute_less() -> None:
    own = [*LONG, "train.activation_checkpointing=full", "train.recompute_layers=3"]
    found = ladder(load_run(None, own, world=1), 1, GPU, 12 * GIB)
    assert found is not None
    assert found.together is not None
    load_run(None, [*own, *found.together.settings], world=1)
    assert not any("activation_checkpointing" in x for x in found.together.settings)
    few = ladder(load_run(None, own, world=1), 1, GPU, GIB)
    assert few is not None
    assert few.together is None
    assert "together on these devices: not enough" in str(few)


def test_what_is_faster_with_other_rounding_is_named_where_a_run_fits() -> None:
    small = ["model.preset=1.3b", "data.context=8192", "train.micro_batch=4", *LONG[4:]]
    small += ["train.global_batch=4"]
    h200 = devices()["h200"]
    found = plan(load_run(None, small, world=1), 1, h200)
    rows = {row["setting"]: row for row in found.roundings}
    assert rows.keys() == {"train.residual_precision=bf16", "train.fp8=true"}
    now = predict(load_run(None, small, world=1), 1, h200).tokens_per_s
    for setting, row in rows.items():
        changed = load_run(None, [*small, setting], world=1)
        assert row["speed"] > 1
        assert row["speed"] == pytest.approx(predict(changed, 1, h200).tokens_per_s / now)
        assert row["needed"] == needed_by(changed, 1)
        assert f"  {setting:<40}{row['speed'] - 1:+.1%} tokens/s" in str(found)
    both = plan(load_run(None, [*small, *rows], world=1), 1, h200)
    assert not both.roundings
    assert "rounded otherwise" not in str(both)
    a100 = plan(load_run(None, small, world=1), 1, devices()["a100"])
    assert [x["setting"] for x in a100.roundings] == ["train.residual_precision=bf16"]
