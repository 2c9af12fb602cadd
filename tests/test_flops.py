"""FLOPs of a decoder against those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspan.attention import Dense, Window, patterns_of
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
    patterns = patterns_of(run.attention, run.model.layers)
    matmuls, _ = flops_per_sample(run.model, patterns, run.data.context)
    assert counter.get_total_flops() == matmuls / 3


def test_attention_flops_are_those_of_the_pattern_of_each_layer() -> None:
    """By the masks themselves: 4·head_dim FLOPs a pair, and three times that in training."""
    layers = 'attention.layers=[{kind="window",window=9,sinks=2,repeat=2},{kind="dense"}]'
    run = load_run(None, [layers, "model.layers=4", "data.context=64"])
    patterns = patterns_of(run.attention, 4)
    assert patterns == (Window(9, 2), Window(9, 2), Dense(), Window(9, 2))
    position = torch.arange(64)
    causal = position[:, None] >= position[None, :]
    pairs = sum(int((x.counts(position, position, 0) * causal).sum()) for x in patterns)
    heads, dims = run.model.heads, run.model.head_dim
    assert flops_per_sample(run.model, patterns, 64)[1] == 3 * 4 * dims * heads * pairs
