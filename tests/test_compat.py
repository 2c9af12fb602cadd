"""The names of the guides compute what the real things compute in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan import (
    BlockSparse,
    DilatedAttention,
    MultiheadDilatedAttention,
    SKLinear,
    UserError,
    compat,
    create_model,
)
from tests.harness import Ranks
from tests.test_docs import ROOT

BRANCHES = ([16, 64], [1, 4])
MULTIHEAD = (32, 4, *BRANCHES)
BLOCKS = BlockSparse(4, density=0.25)
RING = {
    "RingDistributedDilatedAttention": {},
    "RingMultiheadDilatedAttention": {"use_gradient_checkpointing": True},
    "BlockSparseRingDistributedDilatedAttention": {"sparsity_ratio": 0.25, "block_size": 4},
    "DistributedImprovedMultiheadDilatedAttention": {"sequence_parallel": True},
}
WHOLE = {
    "DistributedMultiheadDilatedAttention": {},
    "DistributedImprovedMultiheadDilatedAttention": {
        "model_parallel": True,
        "use_gradient_checkpointing": True,
        "use_deepspeed": False,
    },
}


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def result(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output of causal self-attention, and the gradient of its sum of squares by x."""
    x = x.clone().requires_grad_()
    out, weights = module(x, x, x, is_causal=True)
    assert weights is None
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def multihead(rank: int, world: int, state: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for names, splits in ((RING, True), (WHOLE, False)):
        for name, options in names.items():
            module = getattr(compat, name)(*MULTIHEAD, **options)
            module.load_state_dict(state)
            x = tokens(2, 64, 32)
            found[f"{name} {splits}"] = result(module, x.chunk(world, 1)[rank] if splits else x)
    return found


def test_multihead_modules_equal_the_real_one_in_one_process(ranks: Ranks) -> None:
    real = MultiheadDilatedAttention(*MULTIHEAD)
    sparse = MultiheadDilatedAttention(*MULTIHEAD, blocks=BLOCKS)
    sparse.load_state_dict(real.state_dict())
    x = tokens(2, 64, 32)
    alone = multihead(0, 1, real.state_dict())
    for world in (1, 2):
        by_rank = ranks.run(multihead, world, real.state_dict()) if world > 1 else [alone]
        for name in by_rank[0]:
            expected = result(sparse if "BlockSparse" in name else real, x)
            splits = name.endswith("True")
            for index, values in enumerate(expected):
                found = [rank[name][index] for rank in by_rank]
                whole = torch.cat(found, 1) if splits else found[-1]
                torch.testing.assert_close(whole, values, msg=lambda text, name=name: name + text)


def ring(rank: int, world: int) -> Tensor:
    q, k, v = (x.chunk(world, 1)[rank] for x in tokens(3, 2, 64, 4, 8))
    out: Tensor = compat.RingDilatedAttention(*BRANCHES)(q, k, v, is_causal=True)
    return out


def test_ring_attention_equals_dilated_attention(ranks: Ranks) -> None:
    expected = DilatedAttention(*BRANCHES)(*tokens(3, 2, 64, 4, 8), is_causal=True)
    torch.testing.assert_close(ring(0, 1), expected)
    torch.testing.assert_close(torch.cat(ranks.run(ring, 2), 1), expected)


def sketched(rank: int, world: int, in_pairs: bool) -> list[Tensor]:
    """Output, gradient of x and of S1 and S2 in the equivalent weight."""
    group = None
    if in_pairs:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[rank // 2]
    torch.manual_seed(0)
    layer = compat.TensorParallelSKLinear(16, 24, 2, group, seed=3)
    return [x.detach() for x in sketched_step(layer, layer.local_sklinear)]


def sketched_step(layer: nn.Module, factors: SKLinear) -> list[Tensor]:
    x = tokens(5, 7, 16).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    gradients = [factors.s1.grad, factors.s2.grad]
    full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return [out, x.grad, *full]  # type: ignore[list-item]


@pytest.mark.parametrize(("world", "in_pairs"), [(1, False), (2, False), (4, True)])
def test_tensor_parallel_sketched_layers_equal_one(
    ranks: Ranks, world: int, in_pairs: bool
) -> None:
    torch.manual_seed(0)
    layer = SKLinear(16, 24, sketch_size=2, seed=3)
    expected = sketched_step(layer, layer)
    for found in ranks.run(sketched, world, in_pairs):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.detach())


SIZES = (32, 4, 2, *BRANCHES, 256, 64)
ITEMS = ["model.hidden=32", "data.context=64", "attention.segment_lengths=[16,64]"]
ITEMS += ["attention.dilation_rates=[1,4]"]


def distributed_loss(rank: int, world: int) -> list[tuple[float, int, bool]]:
    """Loss, tokens of this rank, and whether it holds shards of the parameters."""
    text = torch.arange(65).square().remainder(256).unsqueeze(0)
    inputs, targets = text[:, :-1], text[:, 1:]
    losses = []
    for options in (
        {},
        {"use_model_parallel": True, "use_gradient_checkpointing": True},
        {"use_sequence_parallel": 2},
        {"use_sequence_parallel": True, "use_model_parallel": 1},
        {"cpu_offload": True},
        {"use_deepspeed": True},
    ):
        model = compat.create_distributed_model(*SIZES, **options)  # type: ignore[arg-type]
        positions = getattr(model, "positions", None)
        local = [x if positions is None else x[:, positions] for x in (inputs, targets)]
        loss = model(*local).detach() / local[0].numel()
        dist.all_reduce(loss)
        is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
        losses.append((float(loss) / world, local[0].numel(), is_sharded))
    return losses


def test_a_distributed_model_is_the_run_s(ranks: Ranks) -> None:
    text = torch.arange(65).square().remainder(256).unsqueeze(0)
    expected = float(create_model(*ITEMS)(text[:, :-1], text[:, 1:]).detach()) / 64
    for found in ranks.run(distributed_loss, 2):
        losses, local_tokens, sharded = zip(*found, strict=True)
        assert losses == pytest.approx([expected] * 6, rel=1e-5)
        assert local_tokens == (64, 64, 32, 32, 64, 64)
        assert sharded == (False, True, True, True, True, False)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        ("RingDilatedAttention", BRANCHES, {"ring_size": 8}, "one rank per process"),
        ("RingDistributedDilatedAttention", MULTIHEAD, {"cpu_offload": True}, "layout.offload"),
        (
            "DistributedImprovedMultiheadDilatedAttention",
            MULTIHEAD,
            {"use_deepspeed": True},
            "does not support use_deepspeed=True: pass the model to deepspeed.initialize",
        ),
        (
            "DistributedImprovedMultiheadDilatedAttention",
            MULTIHEAD,
            {"sequence_parallel": True, "model_parallel": True},
            "a mesh of two dimensions",
        ),
        ("create_distributed_model", SIZES, {"use_fp16": True}, "train.precision"),
        ("create_distributed_model", SIZES, {"enterprise": 1}, "docs/from-the-guides.md"),
        (
            "create_distributed_model",
            SIZES,
            {"use_deepspeed": True, "cpu_offload": True},
            "DeepSpeed replicates and shards",
        ),
        (
            "create_distributed_model",
            SIZES,
            {"use_model_parallel": True, "use_sequence_parallel": True},
            "such as use_model_parallel=2",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        getattr(compat, name)(*arguments, **options)


def test_the_page_of_the_guides_has_every_name() -> None:
    page = (ROOT / "docs" / "from-the-guides.md").read_text()
    values = {name: value for name, value in vars(compat).items() if not name.startswith("_")}
    names = {n for n, v in values.items() if getattr(v, "__module__", "") == compat.__name__}
    assert len(names) == 8
    for name in names | compat.INSTEAD.keys() - {"ring_size"}:
        assert name in page, name
