"""The built-in runs follow the layout, and nothing that the user has given is changed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from longspan.config import AXES, Run
from longspan.errors import UserError
from longspan.runfile import dump_run, load_run


def resolved(*overrides: str, builtin: str = "cpu") -> Run:
    """Return the built-in run on as many processes as its layout needs."""
    given = load_run(None, overrides, builtin=builtin, world=None)
    return load_run(None, overrides, builtin=builtin, world=given.layout.min_world_size)


@pytest.mark.parametrize("builtin", ["cpu", "cuda", "drill"])
@pytest.mark.parametrize("axis", AXES)
def test_every_axis_alone_is_accepted(builtin: str, axis: str) -> None:
    for ranks in (2, 3, 4, 5, 8, 64):
        resolved(f"layout.{axis}={ranks}", builtin=builtin)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_products_of_axes_are_accepted(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.rules.layout.version", lambda _: "2.13.0")
    for ranks in itertools.product((1, 2), (1, 3), (1, 2), (1, 3), (1, 2, 3)):
        layout = [f"layout.{axis}={n}" for axis, n in zip(AXES, ranks, strict=True)]
        resolved(*layout, f"layout.schedule={schedule}", "layout.megatron_sequence_parallel=true")


def test_the_run_grows_only_as_far_as_the_layout_needs() -> None:
    assert resolved() == load_run(None)
    shard = resolved("layout.shard=3", "train.micro_batch=2")
    assert (shard.train.global_batch, shard.data.context) == (6, 4096)
    zbv = resolved("layout.pipeline=2", "layout.schedule=zbv", "layout.shard=2")
    assert (zbv.model.layers, zbv.train.global_batch, zbv.layout.zero) == (4, 4, 2)
    assert resolved("layout.sequence=3").data.context == 4098
    tensor = resolved("layout.tensor=8").model
    assert (tensor.heads, tensor.kv_heads, tensor.hidden, tensor.ffn) == (8, 8, 256, 768)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["layout.shard=2", "train.global_batch=1"], "train.global_batch"),
        (["layout.sequence=3", "data.context=64"], "data.context"),
        (["layout.tensor=8", "model.heads=4"], "model.heads"),
        (["layout.tensor=8", "model.preset=125m"], "model.heads"),
        (["layout.pipeline=4", "model.layers=2"], "model.layers"),
        (["layout.pipeline=2", "layout.schedule=zbv", "layout.shard=2", "layout.zero=3"], "use 2"),
    ],
)
def test_what_the_user_has_given_is_refused_not_changed(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=key):
        resolved(*overrides)


def test_a_run_file_is_never_changed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_run(load_run(None)))
    with pytest.raises(UserError, match="use 2"):
        load_run(tmp_path / "run.toml", ["layout.shard=2"], world=2)
