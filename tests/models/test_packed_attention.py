"""Projection, RoPE and attention as one operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longspan.attention import attend
from longspan.attention.custom_op import flatten
from longspan.attention.functional import Backend
from longspan.attention.pattern import Dilated
from longspan.config import Rope
from longspan.models import build_decoder, decoder, packed_attention
from longspan.nn import RotaryEmbedding, apply_rope, products
from longspan.nn.products import chosen_products
from longspan.parallel.apply import apply_to_blocks
from longspan.runfile import load_run
from tests.attention.context_parallel.test_chunks import doubling
from tests.attention.kernels.test_whole_segments import interpreter  # noqa: F401

dispatch = pytest.importorskip("longspan.attention.kernels.dispatch")

PATTERN = Dilated((16, 32), (1, 2))


def separate(
    x: Tensor, weight: Tensor, table: Tensor, heads: int, dims: int, pattern: Dilated
) -> Tensor:
    kv_heads = len(weight) // dims - heads
    parts = weight.split([heads * dims, kv_heads // 2 * dims, kv_heads // 2 * dims])
    q, k, v = (linear(x, part).unflatten(-1, (-1, dims)) for part in parts)
    backend = "reference"
    return attend(apply_rope(q, table), apply_rope(k, table), v, pattern, backend=backend)


def check(
    shape: tuple[int, int, int],
    heads: int,
    kv_heads: int,
    dims: int,
    pattern: Dilated,
    like: Tensor,
    epsilons: float = 4,
) -> None:
    """The operator in the dtype of `like` against its parts in float64, forward and backward."""
    batch, tokens, hidden = shape
    device, dtype = like.device, like.dtype
    x = torch.randn(shape, device=device).to(dtype)
    width = (heads + 2 * kv_heads) * dims
    weight = (torch.randn(width, hidden, device=device) / hidden**0.5).to(dtype)
    table = RotaryEmbedding(dims, 10_000.0, Rope()).table(torch.arange(tokens, device=device))
    grad = torch.randn(batch, tokens, heads, dims, device=device).to(dtype)
    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [tensor.double().requires_grad_() for tensor in (x, weight)]
    out, *_ = packed_attention.packed_attention(
        ours[0].flatten(0, 1), ours[1], table, heads, dims, *flatten(pattern)
    )
    exact = separate(*theirs, table.double(), heads, dims, pattern)
    found = [out, *torch.autograd.grad(out, ours, grad)]
    wanted = [exact, *torch.autograd.grad(exact, theirs, grad.double())]
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= epsilons * torch.finfo(dtype).eps * b.norm()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_equals_its_parts_in_float64(kv_heads: int) -> None:
    check((2, 64, 32), 4, kv_heads, 16, PATTERN, torch.empty(0))


def rounded_once(function: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> list[Tensor]:
    inputs = (x.float() if isinstance(x, Tensor) else x for x in arguments)
    out, *others = function(*inputs)
    return [out.bfloat16(), *(x.bfloat16() if x.dim() == 4 else x for x in others)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of the operator's attention, in blocks compiled as where products are chosen."""
    monkeypatch.setattr(products, "_are_chosen", True)
    monkeypatch.setattr(products, "LEAST_TOKENS", 8)
    monkeypatch.setattr(products, "FEATURES", range(8, 512))
    found, forward, backward = list[Any](), dispatch.forward, dispatch.backward

    # Triton's interpreter multiplies bf16 as integers.
    def forward_in_float32(*arguments: Any) -> list[Tensor]:
        found.append(arguments)
        return rounded_once(forward, *arguments)

    def backward_in_float32(*arguments: Any, into: tuple[Tensor, ...]) -> None:
        for gradient, exact in zip(into, rounded_once(backward, *arguments), strict=True):
            gradient.copy_(exact)

    monkeypatch.setattr(dispatch, "forward", forward_in_float32)
    monkeypatch.setattr(dispatch, "backward", backward_in_float32)
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", partialmethod(compile_block, backend="aot_eager_decomp_partition")
    )
    return found


def loss_of(is_compiled: bool, mode: str = "none") -> tuple[Tensor, nn.Module]:
    sizes = ["model.hidden=32", "model.layers=1", "model.heads=2", "data.context=64"]
    sizes += ["attention.segment_lengths=[16,64]", "attention.dilation_rates=[1,2]"]
    rounded = ["train.precision=bf16", "train.residual_precision=bf16"]
    run = load_run(None, [*sizes, *rounded, f"train.activation_checkpointing={mode}"], world=1)
    torch.manual_seed(0)
    model = build_decoder(run, torch.device("cpu"))
    apply_to_blocks(model, run.train.model_copy(update={"compile": is_compiled}))
    tokens = torch.randint(256, (1, 64))
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens, tokens), model


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_take_it(
    mode: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention runs again only if all activations are recomputed."""
    monkeypatch.setattr(packed_attention, "choose_backend", lambda *_: Backend("triton", ""))
    found = []
    for is_compiled in (False, True):
        loss, model = loss_of(is_compiled, mode)
        assert len(calls) == is_compiled
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert len(calls) == 1 + (mode == "full")
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()


def test_attention_of_another_backend_stays_apart(calls: list[Any]) -> None:
    """Here strided views, the choice on a CPU."""
    loss_of(is_compiled=True)
    assert not calls


@pytest.mark.usefixtures("interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels")
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize(
    "pattern",
    [
        Dilated((256, 512), (1, 2)),
        Dilated((512, 1024), (2, 4)),  # rows that no branch keeps
        doubling(256, 2048),
    ],
    ids=["two branches", "without rate 1", "beyond the sequence"],
)
def test_it_equals_its_parts_by_the_kernels_for_whole_segments(
    kv_heads: int, dims: int, pattern: Dilated
) -> None:
    check((1, 1024, 64), 2, kv_heads, dims, pattern, torch.empty(0), epsilons=16)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles its kernels")
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_it_equals_its_parts_in_slabs(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.attention.kernels.schedule.PARTIAL_BYTES", 1)
    monkeypatch.setattr(dispatch, "_calls", dispatch.Call)  # the cached one remembers its slabs
    like = torch.empty(0)
    check((2, 1024, 64), 2, kv_heads, 64, Dilated((256, 512), (1, 2)), like, epsilons=16)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dims", [64, 128])
def test_it_equals_its_parts_on_a_gpu(kv_heads: int, dims: int) -> None:
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    check((2, 2048, 512), 8, kv_heads, dims, Dilated((512, 1024, 2048), (1, 2, 4)), like)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_a_compiled_block_equals_its_parts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, backward_packed = [], dispatch.backward_packed

    def spy(*arguments: Any) -> Tensor:
        calls.append(arguments)
        gradient: Tensor = backward_packed(*arguments)
        return gradient

    monkeypatch.setattr(dispatch, "backward_packed", spy)
    device, found = torch.device("cuda"), []
    sizes = ["model.hidden=768", "model.layers=1", "model.heads=12", "data.context=8192"]
    sizes += ["attention.segment_lengths=[2048,8192]", "attention.dilation_rates=[1,4]"]
    rounded = ["train.precision=bf16", "train.residual_precision=bf16", "train.compile=true"]
    run = load_run(None, [*sizes, *rounded], world=1)
    for is_packed in (True, False):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = build_decoder(run, device)
        apply_to_blocks(model, run.train)
        tokens = torch.randint(256, (4, 8192), device=device)
        if not is_packed:
            monkeypatch.setattr(decoder, "packs", lambda *_: False)
        with chosen_products(run.train, device), torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens)
            loss.backward()
        assert len(calls) == 1
        found.append([loss, *(p.grad for p in model.parameters())])
    torch.compiler.reset()
    for packed, apart in zip(*found, strict=True):
        assert (packed - apart).norm() <= 0.02 * apart.norm()
