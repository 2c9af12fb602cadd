"""What a checkpoint holds besides tensors keeps its types, and everything is checked on resume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.checkpoint import TensorShard, open_checkpoint, save
from longspan.config import Attention, Model
from longspan.errors import UserError
from longspan.runfile import load_run
from longspan.training.state import SavedState, TrainState
from longspan.training.step import train_step
from tests.steps import open_state


def test_the_scaler_s_state_round_trips() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
    before = scaler.state_dict()
    text = SavedState(samples=3, scaler=before, resume_key={}).model_dump_json()
    after = SavedState.model_validate_json(text).scaler
    assert after == before
    assert {key: type(value) for key, value in after.items()} == {
        key: type(value) for key, value in before.items()
    }
    scaler.load_state_dict(after)


SMALL = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.ffn=16", "data.source=recall",
    "model.vocab=256", "data.context=66", "attention.kind=dense", "train.global_batch=2",
    "train.steps=9", "train.warmup_steps=1",
]  # fmt: skip
NAME = "blocks.0.mlp.up.weight"
U8 = torch.uint8


def rewritten(path: Path, tensors: dict[str, Tensor | None], state: dict[str, Any]) -> Path:
    """Save a checkpoint again with some tensors and values of its state replaced, by our writer."""
    saved = open_checkpoint(path)
    found = {name: saved.read(name) for name in saved.manifest.tensors} | tensors
    shards = {name: TensorShard.full(x) for name, x in found.items() if x is not None}
    kept = {key: x for key, x in {**saved.state, **state}.items() if x is not None}
    return save(path.parent / "changed", saved.step, shards, kept)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainState, Path]]:
    """The state of a tiny run after three steps, and its checkpoint."""
    run = load_run(None, SMALL, world=1)
    with open_state(run) as (state, data):
        for _ in range(3):
            train_step(state, data, run.train, torch.device("cpu"))
        folder = tmp_path_factory.mktemp("run")
        yield state, save(folder, 3, state.tensor_shards(), state.saved_state())


def test_an_unchanged_checkpoint_is_restored(trained: tuple[TrainState, Path]) -> None:
    state, path = trained
    before = {name: shard.values.clone() for name, shard in state.tensor_shards().items()}
    state.restore(open_checkpoint(rewritten(path, {}, {})))
    after = state.tensor_shards()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], shard.values) for name, shard in after.items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"rng/cpu": None}, "the cpu random number generator has shape None"),
        ({"rng/cpu": torch.zeros(5056, dtype=U8)}, "the cpu generator is all zeros"),
        ({"rng/cpu": torch.zeros(16, dtype=U8)}, "has shape"),
        ({"rng/cpu": torch.full((5056,), 255, dtype=U8)}, "random number generator: Invalid"),
        ({"rng/cpu": torch.ones(5056)}, "has shape"),
        ({"rng/mps": torch.ones(16, dtype=U8)}, "unknown generator: mps"),
        ({"other/x": torch.ones(1)}, "unknown kind: other"),
        ({f"optimizer/{NAME}.exp_avg": None}, r"up\.weight\.exp_avg has shape None"),
        ({f"optimizer/{NAME}.step": None}, r"up\.weight\.step has shape None"),
        ({f"optimizer/{NAME}.step": torch.tensor(-1.0)}, r"step is -1"),
        ({f"optimizer/{NAME}.step": torch.tensor(1e30)}, r"step is 1e\+30"),
        ({f"optimizer/{NAME}.step": torch.tensor(float("nan"))}, r"step is nan"),
        ({f"optimizer/{NAME}.exp_avg": torch.ones(2, 2)}, r"has shape \(2, 2\)"),
        ({f"optimizer/{NAME}.exp_avg": torch.ones(16, 16, dtype=U8)}, "not floating point"),
        ({f"optimizer/{NAME}.momentum": torch.ones(16, 16)}, "expected None"),
        ({"optimizer/nodots": torch.ones(1)}, "nodots has shape"),
        ({"model/nodots": torch.ones(1)}, "differ at nodots"),
        ({f"model/{NAME}": torch.ones(16, 16, dtype=torch.int64)}, "not floating point"),
    ],
)
def test_tensors_are_checked_against_the_run(
    trained: tuple[TrainState, Path], tensors: dict[str, Tensor | None], message: str
) -> None:
    state, path = trained
    with pytest.raises(UserError, match=message):
        state.restore(open_checkpoint(rewritten(path, tensors, {})))


def test_a_checkpoint_without_moments_is_refused_after_a_step(
    trained: tuple[TrainState, Path],
) -> None:
    state, path = trained
    moments = [f"optimizer/{name}" for name in open_checkpoint(path).shapes("optimizer")]
    with pytest.raises(UserError, match=r"optimizer state .* has shape None"):
        state.restore(open_checkpoint(rewritten(path, dict.fromkeys(moments), {})))


SCALER = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2**62}, "samples: Input should be less than"),
        ({"samples": -1}, "samples: Input should be greater"),
        ({"samples": 2}, "step 3 does not fit 2 samples"),
        ({"samples": None}, "samples: Field required"),
        ({"skips": [[0, 10**15]]}, "less than or equal to"),
        ({"skips": [[0, 10**11]]}, "cannot be skipped after"),
        ({"skips": [[10**11, 10**11 + 2]]}, "cannot be skipped after"),
        ({"skips": [[-5, 3]]}, "greater than or equal to 0"),
        ({"skips": [[5, 3]]}, "cannot be skipped"),
        ({"skips": [[0, 1]] * 1001}, "at most 1000 items"),
        ({"skips": [[0, 1, 2]]}, "at most 2 items"),
        ({"resume_key": {}}, "data.context was None"),
        ({"resume_key": None}, "Field required"),
        ({"norm_average": {"norm": -1.0, "steps": 2}}, "greater than or equal to 0"),
        ({"norm_average": {"norm": 1e300, "steps": 2}}, "less than or equal to"),
        ({"norm_average": {"norm": 1.0, "steps": 10**9}}, "steps with a gradient norm"),
        ({"scaler": SCALER}, "_growth_tracker is None"),
        ({"scaler": {**SCALER, "_growth_tracker": 0, "scale": 0}}, "scaler.scale is 0"),
        ({"scaler": {**SCALER, "_growth_tracker": 0, "x": 0}}, "scaler.x is unknown"),
        ({"unknown": 1}, "unknown: Extra inputs"),
    ],
)
def test_the_state_is_checked_against_the_run(
    trained: tuple[TrainState, Path], changes: dict[str, Any], message: str
) -> None:
    state, path = trained
    with pytest.raises(UserError, match=message):
        state.restore(open_checkpoint(rewritten(path, {}, changes)))


def test_each_setting_that_a_checkpoint_was_trained_with_is_compared(
    trained: tuple[TrainState, Path],
) -> None:
    """A key that a checkpoint does not have was added later: it had its default."""
    state, path = trained
    key = open_checkpoint(path).state["resume_key"]
    for name in key:
        without = {other: value for other, value in key.items() if other != name}
        changed = open_checkpoint(rewritten(path, {}, {"resume_key": without}))
        section, _, field = name.partition(".")
        defaults = {"model": Model(), "attention": Attention()}
        is_default = name in ("data.documents", "train.freeze", "train.ema") or (
            section in defaults and defaults[section].model_dump(mode="json")[field] == key[name]
        )
        if is_default:
            state.restore(changed)
        else:
            with pytest.raises(UserError, match=f"{name} was"):
                state.restore(changed)


@pytest.mark.parametrize("skips", [[], [(3, 5)], [(0, 4), (3, 6), (8, 9)], [(4, 10**15), (4, 5)]])
def test_skipped_samples_are_left_out(
    trained: tuple[TrainState, Path], skips: list[tuple[int, int]]
) -> None:
    state = replace(trained[0], samples=3, skips=skips)
    candidates = [*range(3, 20), *range(10**15, 10**15 + 9)]
    expected = [i for i in candidates if not any(a <= i < b for a, b in skips)]
    assert state.next_samples(6) == expected[:6]
