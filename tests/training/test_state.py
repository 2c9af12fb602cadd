"""What a checkpoint holds besides tensors keeps its types."""

from __future__ import annotations

import torch

from longspan.training.state import SavedState


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
