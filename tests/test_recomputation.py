"""`train.recompute_layers`: what it is refused with, and what a plan makes of it."""

from __future__ import annotations

import pytest

from longspan.errors import UserError
from longspan.hardware import devices
from longspan.planning.run_time import predict
from longspan.runfile import load_run

FULL = "train.activation_checkpointing=full"


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (["train.recompute_layers=1"], 1, 'needs train.activation_checkpointing = "full"'),
        ([FULL, "train.recompute_layers=9", "model.layers=8"], 1, "is more than model.layers = 8"),
        ([FULL, "train.recompute_layers=1", "engine.name=deepspeed"], 1, 'needs engine.name = "na'),
        ([FULL, "train.recompute_layers=1", "layout.pipeline=2"], 2, "with the 2 stages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    options: list[str], world: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"(?m)^  train.recompute_layers .*{message}"):
        load_run(None, options, world=world)


def test_chunks_take_the_same_forward_pass_for_rows_whatever_is_recomputed() -> None:
    chunks = ["model.preset=125m", "data.context=131072", "train.chunk_tokens=32768", FULL]
    gpu = devices()["h200"]
    some, every = (
        predict(load_run(None, [*chunks, *more], builtin="cuda", world=1), 1, gpu)
        for more in (["train.recompute_layers=3"], [])
    )
    assert some.parts["forward pass for rows"] == pytest.approx(
        every.parts["forward pass for rows"]
    )
    assert some.parts["recomputation"] < every.parts["recomputation"]
