"""Learning-rate schedules compared with their formulas."""

from __future__ import annotations

import math

import pytest

from longspan.config import Train
from longspan.training.schedule import learning_rate

BASE = {"steps": 100, "warmup_steps": 10, "lr": 1.0, "min_lr_ratio": 0.1}


def rates(**options: object) -> list[float]:
    train = Train(**{**BASE, **options})  # type: ignore[arg-type]
    return [learning_rate(train, step) for step in range(train.steps)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warmup_rises_linearly_to_the_peak(schedule: str) -> None:
    found = rates(schedule=schedule, decay_steps=20)
    assert found[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert max(found) == pytest.approx(1.0)


def test_cosine_and_linear_decay_to_the_minimum() -> None:
    cosine, linear = rates(schedule="cosine"), rates(schedule="linear")
    for step in range(10, 100):
        done = (step - 10) / 90
        assert cosine[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        assert linear[step] == pytest.approx(1 - 0.9 * done)


def test_wsd_is_constant_and_then_decays() -> None:
    found = rates(schedule="wsd", decay_steps=20)
    assert found[10:80] == pytest.approx([1.0] * 70)
    assert found[90] == pytest.approx(0.55)
    assert found[99] == pytest.approx(1 - 0.9 * 19 / 20)


def test_constant_stays_at_the_peak() -> None:
    assert rates(schedule="constant")[10:] == pytest.approx([1.0] * 90)


def test_rate_scales_with_the_batch() -> None:
    def peak(scaling: str) -> float:
        return Train(lr=0.1, lr_scaling=scaling, base_batch=4, global_batch=16).peak_lr  # type: ignore[arg-type]

    assert peak("none") == pytest.approx(0.1)
    assert peak("linear") == pytest.approx(0.4)
    assert peak("sqrt") == pytest.approx(0.2)


def test_no_warmup_starts_at_the_peak() -> None:
    assert rates(schedule="cosine", warmup_steps=0)[0] == pytest.approx(1.0)
