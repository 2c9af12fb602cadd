"""`train.residual_precision`: the residual stream in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.device import autocast, resolve
from longspan.errors import UserError
from longspan.models import build_decoder
from longspan.runfile import load_run

SMALL = ["model.hidden=32", "model.heads=2", "model.layers=2", "data.context=64"]
BF16 = ["train.precision=bf16", "train.residual_precision=bf16"]


def loss_and_streams(*options: str) -> tuple[Tensor, list[torch.dtype]]:
    """The loss of one sequence, and the dtypes of what the blocks and the last norm are given."""
    run = load_run(None, [*SMALL, "train.device=cpu", *options])
    model = build_decoder(run, torch.device("cpu"))
    found: list[torch.dtype] = []
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].dtype))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.model.vocab, (1, 64), generator=generator)
    with autocast(run.train):
        loss = model(tokens, tokens.roll(-1)) / 64
    loss.backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.dtype == torch.float32
    return loss.detach(), found


def test_the_residual_stream_is_rounded_on_request_alone() -> None:
    exact, streams = loss_and_streams("train.precision=bf16")
    rounded, rounded_streams = loss_and_streams(*BF16)
    assert set(streams) == {torch.float32}
    assert set(rounded_streams) == {torch.bfloat16}
    assert rounded != exact
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["train.precision=fp32"], 1, 'needs train.precision = "bf16", but it is "fp32"'),
        (["layout.tensor=2"], 2, "not supported with layout.tensor = 2"),
        (["layout.pipeline=2"], 2, "not supported with layout.pipeline = 2"),
        (["engine.name=accelerate"], 1, 'needs engine.name = "native"'),
    ],
)
def test_what_does_not_honour_it_is_refused(options: list[str], world: int, message: str) -> None:
    with pytest.raises(UserError, match=f"(?m)^  train.residual_precision .*{message}"):
        load_run(None, [*SMALL, *BF16, *options], world=world)


def test_a_device_without_bf16_is_refused() -> None:
    run = load_run(None, [*SMALL, "train.residual_precision=bf16"], world=1)
    with pytest.raises(UserError, match=r'needs train.precision = "bf16", but it is "fp32"'):
        resolve(run, torch.device("cpu"))
