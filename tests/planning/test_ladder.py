"""What to change where a run does not fit."""

from __future__ import annotations

import json

import pytest

from longspan.cli import main
from longspan.hardware import devices
from longspan.planning.ladder import ladder, needed_by
from longspan.runfile import load_run

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
    assert needed_by(load_run(None, [*OPTIONS, *found.together], world=4), 4) <= needed // 5
    assert len({x.split("=")[0] for x in found.together}) == len(found.together)


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
