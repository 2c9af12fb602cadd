"""The multihead modules equal nn.MultiheadAttention for a dense pattern and replace it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from longspan.attention import BlockSparse, Dilated, attend, attend_oracle
from longspan.attention.modules import (
    BlockSparseAttention,
    DilatedAttention,
    MultiheadBlockSparseAttention,
    MultiheadDilatedAttention,
)
from tests.collectives import Collectives
from tests.harness import Ranks


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


BRANCHES = (4, 16), (1, 4)  # a rate with which the second half of the heads keeps other rows
BLOCKS = BlockSparse(2, local_window=2, density=0.3)


def multihead(name: str, **options: Any) -> MultiheadDilatedAttention:
    """A module by its name, with the same random weights in every process."""
    torch.manual_seed(1)
    options = {"dtype": torch.float64, **options}
    if name == "block-sparse":
        module: Any = MultiheadBlockSparseAttention(
            16, 4, 4, local_window=4, density=0.3, seed=2, **options
        )
    elif name == "blocks":
        module = MultiheadDilatedAttention(16, 4, *BRANCHES, blocks=BLOCKS, **options)
    else:
        norm = {"sub_layer_norm": name == "magneto"}
        module = MultiheadDilatedAttention(16, 4, *BRANCHES, **norm, **options)
    if module.in_proj_bias is not None and not isinstance(module.in_proj_bias, DTensor):
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    return module  # type: ignore[no-any-return]


PATTERNS = {
    "dilated": Dilated(*BRANCHES),
    "blocks": Dilated(*BRANCHES, BLOCKS),
    "block-sparse": BlockSparse(4, local_window=4, density=0.3, seed=2),
}


@pytest.mark.parametrize("is_self", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_follows_the_pattern(name: str, is_self: bool) -> None:
    """With one matrix product for q, k and v, and with one for each."""
    module = multihead(name)
    x = torch.randn(1, 13, 16, dtype=torch.float64)
    y, z = (x, x) if is_self else torch.randn(2, 1, 13, 16, dtype=torch.float64)
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (4, 4))
        for x, weight, bias in zip((x, y, z), weights, biases, strict=True)
    )
    inner = attend_oracle(q, k, v, PATTERNS[name], is_causal=True)
    found = module(x, y, z, is_causal=True)[0]
    torch.testing.assert_close(found, module.out_proj(inner.flatten(-2)))


def step(module: MultiheadDilatedAttention, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of x, of self-attention if there are no others."""
    x = x.detach().requires_grad_()
    out = module(x, *(others or (x, x)), is_causal=True)[0]
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def inputs(is_self: bool) -> Tensor:
    """Query, or query, key and value: (1 or 3, batch, tokens, embed_dim)."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1 if is_self else 3, 2, 16, 16, dtype=torch.float64, generator=generator)


def split_on_a_rank(rank: int, world: int, name: str, is_self: bool, state: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("tensor", "sequence"))
    group = mesh["sequence"].get_group() if world > 2 else None
    module = multihead(name, tensor_parallel=mesh["tensor"], sequence_parallel=group)
    fresh = {key: x.full_tensor() for key, x in module.state_dict().items()}
    module.load_state_dict(state)
    tokens = 16 // mesh["sequence"].size()
    first = tokens * mesh["sequence"].get_local_rank()
    with Collectives() as collectives:
        out, dx = step(module, *inputs(is_self)[:, :, first : first + tokens])
    gradients = {}
    for key, p in module.named_parameters():
        assert isinstance(p.grad, DTensor)
        gradients[key] = p.grad.full_tensor()
        if group is not None:
            torch.distributed.all_reduce(gradients[key], group=group)
    return out, dx, gradients, fresh, dict(collectives.counts)


@pytest.mark.parametrize(
    ("name", "is_self", "world"),
    [
        ("dilated", True, 2),
        ("dilated", False, 2),
        ("blocks", True, 2),
        ("block-sparse", True, 2),
        ("magneto", True, 2),
        ("dilated", True, 4),
        ("block-sparse", True, 4),
    ],
)
def test_ranks_that_split_heads_and_tokens_equal_one_process(
    ranks: Ranks, name: str, is_self: bool, world: int
) -> None:
    module = multihead(name)
    out, dx = step(module, *inputs(is_self))
    found = ranks.run(split_on_a_rank, world, name, is_self, module.state_dict())
    row = found[: world // 2]  # the ranks of the mesh's first row: all tokens
    torch.testing.assert_close(torch.cat([part[0] for part in row], 1), out)
    torch.testing.assert_close(torch.cat([part[1] for part in row], 1), dx)
    for part in found:
        for key, p in module.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(part[2][key].view_as(p), p.grad)
    for key, initial in multihead(name).state_dict().items():
        if key.endswith("weight"):  # the biases of `multihead` were drawn after the split
            torch.testing.assert_close(found[1][3][key].view_as(initial), initial)
    if world == 2 and name != "magneto":  # the output, and the gradient of x
        assert found[0][4] == {"all_reduce": 2}


def dropped_heads(rank: int, world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world,))
    module = multihead("dilated", tensor_parallel=mesh, dropout=0.5, bias=False)
    q = torch.zeros(1, 16, 2, 4, dtype=torch.float64)
    torch.manual_seed(3)  # ranks that must agree in other layers have the same random state
    return module.attention(q, q, torch.ones_like(q))  # type: ignore[no-any-return]


def test_ranks_that_split_heads_drop_different_weights(ranks: Ranks) -> None:
    first, second = ranks.run(dropped_heads, 2)
    assert not torch.equal(first, second)


def refused_meshes(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"a multiple of the 2 ranks of tensor_parallel, got 1"):
        MultiheadDilatedAttention(16, 1, [8], [1], tensor_parallel=init_device_mesh("cpu", (2,)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"a mesh of one dimension, got 2: .*\('a', 'b'\)"):
        MultiheadBlockSparseAttention(16, 4, 4, tensor_parallel=mesh)


def test_meshes_that_cannot_split_heads_are_refused(ranks: Ranks) -> None:
    ranks.run(refused_meshes, 2)


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
