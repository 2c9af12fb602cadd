"""RoPE against complex multiplication, and its relative-position property."""

from __future__ import annotations

import torch

from longspan.config import Model
from longspan.nn import RotaryEmbedding, apply_rope


def test_equals_complex_rotation() -> None:
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    positions = torch.arange(5, 14)
    found = apply_rope(x.float(), RotaryEmbedding(8, 100.0).table(positions)).double()
    frequencies = 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    rotation = torch.polar(torch.ones(9, 4, dtype=torch.float64), positions[:, None] * frequencies)
    expected = torch.complex(x[..., :4], x[..., 4:]) * rotation[:, None]
    torch.testing.assert_close(
        found, torch.cat([expected.real, expected.imag], -1), rtol=1e-5, atol=1e-6
    )


def test_scores_depend_only_on_relative_position() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at_q: int, at_k: int) -> float:
        tables = [RotaryEmbedding(16, 1e4).table(torch.tensor([p])) for p in (at_q, at_k)]
        return float((apply_rope(q, tables[0]) * apply_rope(k, tables[1])).sum())

    assert abs(score(7, 3) - score(100_004, 100_000)) < 1e-4
    assert max(abs(score(7, 3) - score(7, 7 - distance)) for distance in range(7)) > 0.1


def test_theta_grows_with_the_context() -> None:
    model = Model(hidden=1024, heads=8)  # head_dim 128
    for context in (4096, 131_072, 1_048_576):
        theta = model.rope_theta_for(context)
        slowest = context * theta ** (-126 / 128)
        assert slowest <= 0.25 + 1e-9
    assert 5e5 < model.rope_theta_for(131_072) < 1e6
    assert Model(rope_theta=123.0).rope_theta_for(4096) == 123.0
