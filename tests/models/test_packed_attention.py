"""Projection, RoPE and attention as one operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
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
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles its kernels, which take no tensors of a CPU"
)


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
    """The operator in the dtype of `like` against its parts in float64, forward and backward.

    In 16 bits with at most thrice the error of the parts in 16 bits.
    """
    batch, tokens, hidden = shape
    device, dtype = like.device, like.dtype
    x = torch.randn(shape, device=device).to(dtype)
    width = (heads + 2 * kv_heads) * dims
    weight = (torch.randn(width, hidden, device=device) / hidden**0.5).to(dtype)
    table = RotaryEmbedding(dims, 10_000.0, Rope()).table(torch.arange(tokens, device=device))
    grad = torch.randn(batch, tokens, heads, dims, device=device).to(dtype)
    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [tensor.double().requires_grad_() for tensor in (x, weight)]
    weights = ours[1].split([heads * dims, kv_heads * dims, kv_heads * dims])
    out, *_ = packed_attention.packed_attention(
        ours[0].flatten(0, 1), *weights, table, heads, dims, *flatten(pattern)
    )
    exact = separate(*theirs, table.double(), heads, dims, pattern)
    found = [out, *torch.autograd.grad(out, ours, grad)]
    wanted = [exact, *torch.autograd.grad(exact, theirs, grad.double())]
    bounds = [epsilons * torch.finfo(dtype).eps * b.norm() for b in wanted]
    if dtype.itemsize == 2:
        parts = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        plain = separate(*parts, table, heads, dims, pattern)
        rounded = [plain, *torch.autograd.grad(plain, parts, grad)]
        bounds = [3 * (a - b).norm() for a, b in zip(rounded, wanted, strict=True)]
    for a, b, bound in zip(found, wanted, bounds, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= bound


@interpreted
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_equals_its_parts_in_float64(kv_heads: int) -> None:
    check((2, 64, 32), 4, kv_heads, 16, PATTERN, torch.empty(0))


def rounded_once(function: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> list[Tensor]:
    inputs = (x.float() if isinstance(x, Tensor) else x for x in arguments)
    out, *others = function(*inputs)
    return [out.bfloat16(), *(x.bfloat16() if x.dim() == 4 else x for x in others)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Any]:
    """Those of the operator's attention, in blocks compiled as where products are chosen."""
    backend = getattr(request, "param", "eager")
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
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compile_block, backend=backend))
    return found


@pytest.fixture
def _is_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "choose_backend", lambda *_: Backend("triton", ""))


SIZES = ["model.hidden=32", "model.layers=1", "model.heads=2", "data.context=64"]
SIZES += ["attention.segment_lengths=[16,64]", "attention.dilation_rates=[1,2]"]
SIZES += ["train.precision=bf16", "train.residual_precision=bf16"]


def new_model(is_compiled: bool, *options: str) -> nn.Module:
    run = load_run(None, [*SIZES, *options], world=1)
    torch.manual_seed(0)
    model = build_decoder(run, torch.device("cpu"))
    apply_to_blocks(model, run.train.model_copy(update={"compile": is_compiled}))
    return model


def loss_of(model: nn.Module, **options: Any) -> Tensor:
    tokens = torch.arange(64)[None] * 37 % 256
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(tokens, tokens, **options)
    return loss


@interpreted
@pytest.mark.usefixtures("_is_by_kernels")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("calls", ["aot_eager_decomp_partition"], indirect=True, ids=[""])
def test_compiled_blocks_take_it(mode: str, calls: list[Any]) -> None:
    """Attention runs again only if all activations are recomputed."""
    found = []
    for is_compiled in (False, True):
        model = new_model(is_compiled, f"train.activation_checkpointing={mode}")
        loss = loss_of(model)
        assert len(calls) == is_compiled
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert len(calls) == 1 + (mode == "full")
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()


@interpreted
@pytest.mark.usefixtures("_is_by_kernels")
@pytest.mark.parametrize("calls", ["aot_eager_decomp_partition"], indirect=True, ids=[""])
def test_it_keeps_parameters_of_16_bits_themselves(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no copy of all three, which the plan would not know."""
    rounded = ["train.parameter_precision=bf16", "train.optimizer=adamw8bit"]
    kept = []
    for is_packed in (True, False):
        if not is_packed:
            monkeypatch.setattr(decoder, "packs", lambda *_: False)
        model = new_model(True, *rounded).to(torch.bfloat16)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def keep(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss_of(model)
        kept.append(sum(size for place, size in saved.items() if place not in parameters))
    assert len(calls) == 1
    assert kept[0] <= kept[1]


def test_attention_of_another_backend_stays_apart(calls: list[Any]) -> None:
    """Here strided views, the choice on a CPU."""
    loss_of(new_model(True))
    assert not calls


@pytest.mark.usefixtures("_is_by_kernels")
@pytest.mark.parametrize(
    "options",
    [
        ["model.learnable_sinks=true"],
        ["model.family=qwen3"],  # with norms of queries and keys
        ["model.attention_bias=true"],
        ["model.lora.rank=4"],
        ["model.linear=low_rank", "model.sketch.rank=4"],
        ["train.freeze=['*attention.query*']"],
        ["train.residual_precision=fp32"],
    ],
    ids=lambda options: options[0],
)
def test_what_the_operator_does_not_know_stays_apart(options: list[str], calls: list[Any]) -> None:
    loss_of(new_model(True, *options))
    assert not calls


@pytest.mark.usefixtures("_is_by_kernels")
@pytest.mark.parametrize(
    "kind", ["documents", "hook", "subclass", "attend", "few tokens", "not chosen"]
)
def test_what_replaces_its_parts_keeps_them_apart(
    kind: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(True)
    attention = model.blocks[0].attention  # type: ignore[index, union-attr]
    given: dict[str, Any] = {}
    match kind:
        case "documents":
            given["documents"] = torch.arange(64)[None] // 20
        case "hook":
            attention.value.register_forward_hook(lambda _layer, _inputs, out: 2 * out)
        case "subclass":
            attention.key.__class__ = type("Other", (nn.Linear,), {})
        case "attend":
            attention.attend = partial(attend, backend="reference")
        case "few tokens":
            monkeypatch.setattr(products, "LEAST_TOKENS", 128)
        case _:
            monkeypatch.setattr(products, "_are_chosen", False)
    loss_of(model, **given)
    assert not calls


TWO_BRANCHES = Dilated((256, 512), (1, 2))
WITHOUT_RATE_1 = Dilated((512, 1024), (2, 4))  # rows that no branch keeps
BEYOND_THE_SEQUENCE = doubling(256, 2048)


@pytest.mark.usefixtures("interpreter")
@interpreted
@pytest.mark.parametrize(
    ("pattern", "dims", "kv_heads"),
    [
        (TWO_BRANCHES, 64, 2),
        (TWO_BRANCHES, 128, 1),
        (WITHOUT_RATE_1, 64, 2),
        (WITHOUT_RATE_1, 64, 1),
        (BEYOND_THE_SEQUENCE, 128, 2),
    ],
)
def test_it_equals_its_parts_by_the_kernels_for_whole_segments(
    pattern: Dilated, dims: int, kv_heads: int
) -> None:
    check((1, 1024, 64), 2, kv_heads, dims, pattern, torch.empty(0), epsilons=16)


@pytest.mark.usefixtures("interpreter")
@interpreted
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_it_equals_its_parts_in_slabs(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.attention.kernels.schedule.PARTIAL_BYTES", 1)
    monkeypatch.setattr(dispatch, "_calls", dispatch.Call)  # the cached one remembers its slabs
    like = torch.empty(0)
    check((2, 1024, 64), 2, kv_heads, 64, TWO_BRANCHES, like, epsilons=16)


@pytest.mark.usefixtures("interpreter")
@interpreted
def test_deterministic_algorithms_sum_dq_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.attention.kernels.whole_segments import WholeSegments

    monkeypatch.delattr(WholeSegments, "backward")  # sums in any order
    torch.use_deterministic_algorithms(True)
    try:
        check((1, 512, 64), 2, 2, 64, TWO_BRANCHES, torch.empty(0), epsilons=16)
    finally:
        torch.use_deterministic_algorithms(False)


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
