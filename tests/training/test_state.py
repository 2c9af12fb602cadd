"""What a checkpoint holds beside tensors keeps its types."""

from __future__ import annotations

import torch

from longspan.training.state import Scalars


def test_the_scaler_s_state_comes_back_as_it_was() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1024.0)
    before = scaler.state_dict()
    text = Scalars(samples=3, scaler=before, trained_with={}).model_dump_json()
    after = Scalars.model_validate_json(text).scaler
    assert after == before
    assert {key: type(value) for key, value in after.items()} == {
        key: type(value) for key, value in before.items()
    }
    scaler.load_state_dict(after)
