"""FLOPs of a decoder against those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspan.attention import pattern_of
from longspan.flops import flops_per_sample
from longspan.models import build_decoder
from longspan.runfile import load_run


@pytest.mark.parametrize("tied", [True, False])
def test_matmul_flops_equal_those_that_torch_counts(tied: bool) -> None:
    """Of the forward pass; torch counts no FLOPs of attention on CPU."""
    options = ["model.hidden=32", "model.heads=4", "data.context=64"]
    run = load_run(None, [*options, f"model.tie_embeddings={str(tied).lower()}"])
    model = build_decoder(run, torch.device("cpu"))
    tokens = torch.zeros(1, run.data.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.hidden(tokens) @ model.head_weight.T
    matmuls, _ = flops_per_sample(run.model, pattern_of(run.attention), run.data.context)
    assert counter.get_total_flops() == matmuls / 3
