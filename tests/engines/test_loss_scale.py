"""The loss scale of an engine that unscales gradients itself follows torch's GradScaler."""

from __future__ import annotations

import random

import torch

from longspan.engines.loss_scale import LossScale


def test_it_follows_gradscaler() -> None:
    rng = random.Random(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    ours = LossScale(enabled=True, growth_interval=3)
    theirs.scale(torch.zeros(1))  # initialises its state
    for _ in range(200):
        overflows = rng.random() < 0.3
        parameter.grad = torch.tensor([float("inf") if overflows else 1.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflows=overflows)
        assert ours.state() == theirs.state_dict()
    other = LossScale(enabled=True)
    other.load(theirs.state_dict())
    assert other == ours


def test_a_disabled_loss_scale_is_one() -> None:
    off = LossScale(enabled=False)
    off.load({"scale": 4.0})
    assert (off.factor, off.state()) == (1.0, {})
