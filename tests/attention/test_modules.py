"""MultiheadDilatedAttention equals nn.MultiheadAttention for a dense pattern and replaces it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from longspan.attention import (
    BlockSparse,
    BlockSparseAttention,
    Dilated,
    DilatedAttention,
    MultiheadDilatedAttention,
    attend,
    attend_oracle,
)


def pair(**options: bool) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    """torch's module and ours with its weights, and one segment longer than any test's input."""
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64, **options)
    ours = MultiheadDilatedAttention(16, 4, [64], [1], dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_equals_torch_s_module_on_one_dense_branch(
    bias: bool, is_causal: bool, padded: bool
) -> None:
    theirs, ours = pair(bias=bias)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, 7:] = padded
    causal = torch.ones(11, 11, dtype=torch.bool).triu(1) if is_causal else None
    options = {"key_padding_mask": padding if padded else None, "attn_mask": causal}
    expected, _ = theirs(x, x, x, need_weights=False, is_causal=is_causal, **options)
    found, weights = ours(x, x, x, is_causal=is_causal, **options)
    torch.testing.assert_close(found, expected)
    assert weights is None
    assert set(ours.state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_torch_s_encoder_layer_runs_it(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, dtype=torch.float64)
    swapped = MultiheadDilatedAttention(16, 4, [4, 8], [1, 2], dtype=torch.float64)
    swapped.load_state_dict(layer.self_attn.state_dict())
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    dense = layer.train(training)(x)
    layer.self_attn = swapped
    layer.train(training)
    with torch.no_grad():  # torch would use its fused path
        found = layer(x)
        expected = layer.norm1(x + swapped(x, x, x)[0])
        expected = layer.norm2(expected + layer.linear2(layer.linear1(expected).relu()))
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, dense)


def test_it_follows_the_pattern() -> None:
    module = MultiheadDilatedAttention(16, 4, [4, 8], [1, 2], dtype=torch.float64)
    x = torch.randn(1, 13, 16, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (4, 4)) for part in (x @ module.in_proj_weight.T).chunk(3, -1))
    inner = attend_oracle(q, k, v, Dilated((4, 8), (1, 2)), is_causal=True)
    torch.testing.assert_close(
        module(x, x, x, is_causal=True)[0], module.out_proj(inner.flatten(-2))
    )


def test_sub_layer_norm_adds_the_norm_and_init_of_magneto() -> None:
    module = MultiheadDilatedAttention(
        256, 4, [8], [1], sub_layer_norm=True, magneto_gain=math.sqrt(math.log(2 * 12))
    )
    assert isinstance(module.norm, nn.LayerNorm)
    query, _, value = module.in_proj_weight.chunk(3)
    xavier = math.sqrt(2 / 512)
    assert query.std().item() == pytest.approx(xavier, rel=0.02)
    assert value.std().item() == pytest.approx(xavier * 1.7827, rel=0.02)
    assert module.out_proj.weight.std().item() == pytest.approx(xavier * 1.7827, rel=0.02)
    x = torch.randn(1, 8, 256)
    assert module(x, x, x)[0].shape == x.shape


def test_unsupported_arguments_are_errors() -> None:
    module = MultiheadDilatedAttention(16, 4, [8], [1])
    x = torch.randn(1, 8, 16)
    with pytest.raises(ValueError, match="attention weights are never computed"):
        module(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="or the causal mask with is_causal=True"):
        module(x, x, x, attn_mask=torch.zeros(8, 8))
    with pytest.raises(ValueError, match="multiple of num_heads, got 16 and 3"):
        MultiheadDilatedAttention(16, 3, [8], [1])
    with pytest.raises(ValueError, match="multiple of num_heads, got 16 and 0"):
        MultiheadDilatedAttention(16, 0, [8], [1])
    with pytest.raises(TypeError, match=r"embed_dim must be an integer, got 16\.0"):
        MultiheadDilatedAttention(16.0, 4, [8], [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"segment_lengths must be a sequence .* got 8"):
        DilatedAttention(8, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and below 1, got 1\.5"):
        DilatedAttention([8], [1], dropout=1.5)
    for wrong in (x[0], torch.randn(1, 8, 12)):
        with pytest.raises(ValueError, match=r"query must be \(batch, tokens, embed_dim = 16\)"):
            module(wrong, x, x)
    with pytest.raises(TypeError, match=r"key is torch\.float16 but the parameters are .*float32"):
        module(x, x.half(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x, x.bfloat16(), x)


def test_a_key_padding_mask_of_another_kind_is_an_error() -> None:
    """An integer mask was read as 0 and -inf, and hid nothing."""
    module = MultiheadDilatedAttention(16, 4, [8], [1])
    x, padding = torch.randn(1, 8, 16), torch.zeros(1, 8, dtype=torch.bool)
    padding[:, 5:] = True
    expected = module(x, x, x, key_padding_mask=padding)[0]
    with pytest.raises(TypeError, match=r"True for padding, .* got torch\.int64: use mask\.bool"):
        module(x, x, x, key_padding_mask=padding.long())
    with pytest.raises(ValueError, match=r"0 for keys and -inf for padding, got 1\.0"):
        module(x, x, x, key_padding_mask=padding.float())
    for value in (-torch.inf, -1e9):
        mask = torch.zeros(1, 8).masked_fill(padding, value)
        assert torch.equal(module(x, x, x, key_padding_mask=mask)[0], expected)


def test_patterns_as_modules() -> None:
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    dilated = DilatedAttention([4, 8], [1, 2], softmax_scale=0.2)
    expected = attend(q, k, v, Dilated((4, 8), (1, 2)), is_causal=False, scale=0.2)
    assert torch.equal(dilated(q, k, v), expected)
    sparse = BlockSparseAttention(4, local_window=4, density=0.3, seed=2)
    pattern = BlockSparse(4, local_window=4, density=0.3, seed=2)
    assert torch.equal(sparse(q, k, v, is_causal=True), attend(q, k, v, pattern))
    assert "BlockSparse(block_size=4" in repr(sparse)


def test_dropout_acts_in_training_and_follows_the_random_state() -> None:
    module = DilatedAttention([4], [1], dropout=0.5)
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(module(q, k, v))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    plain = attend(q, k, v, module.pattern, is_causal=False)
    assert torch.equal(module.eval()(q, k, v), plain)
    assert not torch.equal(runs[0], plain)
