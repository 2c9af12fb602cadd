"""`attend` equals the float64 oracle, which is checked by hand and against torch."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.attention import (
    BlockSparse,
    Dense,
    Dilated,
    Mask,
    Pattern,
    Window,
    attend,
    attend_oracle,
    choose_backend,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@st.composite
def dilated_patterns(draw: st.DrawFn) -> Dilated:
    branches = draw(
        st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4])), min_size=1, max_size=3
        )
    )
    return Dilated(tuple(n * r for n, r in branches), tuple(r for _, r in branches))


def random_qkv(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int = 8, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(batch, tokens, h, head_dim, **options)  # type: ignore[call-overload]
        for h in (heads, kv_heads, kv_heads)
    )
    return tuple(x.requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def output_and_gradients(
    function: object, qkv: tuple[Tensor, ...], grad: Tensor, *args: object, **options: object
) -> list[Tensor]:
    out = function(*qkv, *args, **options)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, qkv, grad.to(out.dtype))]


@st.composite
def block_sparse_patterns(draw: st.DrawFn) -> BlockSparse:
    block = draw(st.integers(1, 6))
    return BlockSparse(
        block,
        local_window=block * draw(st.integers(0, 3)),
        global_tokens=block * draw(st.integers(0, 2)),
        stride=draw(st.sampled_from([0, 2, 3])),
        density=draw(st.sampled_from([0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def dilated_block_sparse_patterns(draw: st.DrawFn) -> Dilated:
    return replace(draw(dilated_patterns()), blocks=draw(block_sparse_patterns()))


@st.composite
def window_patterns(draw: st.DrawFn) -> Window:
    return Window(draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.integers(1, 4)))


PATTERNS = st.one_of(
    window_patterns(),
    st.just(Dense()),
    dilated_patterns(),
    block_sparse_patterns(),
    dilated_block_sparse_patterns(),
)
HEADS = st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)])


def assert_equals_oracle(
    qkv: tuple[Tensor, Tensor, Tensor], pattern: Pattern, backend: str | None, **options: Any
) -> None:
    grad, sinks = torch.randn_like(qkv[0]), options.get("sink_logits")
    inputs = qkv if sinks is None else (*qkv, sinks)
    outputs = (
        attend(*qkv, pattern, backend=backend, **options),
        attend_oracle(*qkv, pattern, **options),
    )
    ours, oracle = ([out, *torch.autograd.grad(out, inputs, grad)] for out in outputs)
    for found, expected in zip(ours, oracle, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(
    pattern=PATTERNS,
    tokens=st.integers(1, 29),
    heads=HEADS,
    batch=st.integers(1, 2),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    backend=st.sampled_from([None, "reference"]),
)
def test_equals_the_oracle_with_gradients_through_the_merge(
    pattern: Pattern,
    tokens: int,
    heads: tuple[int, int],
    batch: int,
    is_causal: bool,
    scale: float | None,
    backend: str | None,
) -> None:
    qkv = random_qkv(batch, tokens, *heads, dtype=torch.float64)
    assert_equals_oracle(qkv, pattern, backend, is_causal=is_causal, scale=scale)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), pattern=PATTERNS, tokens=st.integers(1, 29), heads=HEADS)
def test_equals_the_oracle_with_documents_padding_dropout_and_sinks(
    data: st.DataObject, pattern: Pattern, tokens: int, heads: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"is_causal": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        borders = torch.rand(2, tokens) < 0.2
        options["documents"] = borders.cumsum(1)
    if data.draw(st.booleans()):
        options["key_padding_mask"] = torch.rand(2, tokens) < 0.3
    if data.draw(st.booleans()):
        options |= {"dropout_p": 0.4, "dropout_seed": data.draw(st.integers(0, 99))}
    if data.draw(st.booleans()):
        options["sink_logits"] = torch.randn(heads[0], dtype=torch.float64).requires_grad_()
    assert_equals_oracle(
        random_qkv(2, tokens, *heads, dtype=torch.float64), pattern, None, **options
    )


@settings(max_examples=40, deadline=None)
@given(pattern=PATTERNS, keys=st.integers(1, 29), data=st.data(), heads=HEADS)
def test_last_queries_give_the_last_rows_of_the_full_output(
    pattern: Pattern, keys: int, data: st.DataObject, heads: tuple[int, int]
) -> None:
    queries = data.draw(st.integers(1, keys))
    documents = (torch.rand(1, keys) < 0.1).cumsum(1)
    q, k, v = (x.detach() for x in random_qkv(1, keys, *heads, dtype=torch.float64))
    whole = attend(q, k, v, pattern, documents=documents)
    last = attend(q[:, -queries:], k, v, pattern, documents=documents)
    torch.testing.assert_close(last, whole[:, -queries:], rtol=1e-10, atol=1e-11)


def test_cross_attention_equals_torch() -> None:
    q, _, _ = random_qkv(2, 5, 4, 4, dtype=torch.float64)
    _, k, v = random_qkv(2, 11, 4, 2, dtype=torch.float64)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)
    out = attend(q, k, v, Dense(), is_causal=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(attend_oracle(q, k, v, Dense(), is_causal=False), expected)


def test_reference_backend_stays_in_float32_under_autocast() -> None:
    qkv = random_qkv(1, 24, 2, 2)
    grad, documents = torch.randn_like(qkv[0]), (torch.arange(24) // 9)[None]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = attend(*qkv, Dense(), documents=documents)
        results.append(
            [out, *torch.autograd.grad(out, qkv, grad)]
        )  # outside autocast, as torch recommends
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reference_backend_runs_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.attention.reference.CHUNK", 7)
    qkv = random_qkv(1, 40, 2, 2, dtype=torch.float64)
    pattern = BlockSparse(4, local_window=8, density=0.2)
    documents = (torch.arange(40) // 17)[None]
    assert_equals_oracle(qkv, pattern, None, documents=documents, dropout_p=0.2)


def test_changing_a_document_leaves_the_others_unchanged() -> None:
    documents = torch.tensor([[0] * 13 + [1] * 9 + [2] * 10])
    q, k, v = (x.detach() for x in random_qkv(1, 32, 4, 4))
    for pattern in (Dense(), Dilated((8, 16), (1, 4)), BlockSparse(4, density=0.5)):
        before = attend(q, k, v, pattern, documents=documents, is_causal=False)
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, 13:22] = torch.randn(1, 9, 4, 8)
        after = attend(*changed, pattern, documents=documents, is_causal=False)
        same = documents[0] != 1
        assert torch.equal(after[:, same], before[:, same])
        assert not torch.equal(after[:, ~same], before[:, ~same])


@settings(max_examples=60, deadline=None)
@given(pattern=PATTERNS, data=st.data(), heads=HEADS, is_causal=st.booleans())
def test_packed_documents_equal_each_document_alone(
    pattern: Pattern, data: st.DataObject, heads: tuple[int, int], is_causal: bool
) -> None:
    """Also where a document begins in the middle of a segment or block."""
    lengths = data.draw(st.lists(st.integers(1, 19), min_size=1, max_size=4))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    qkv = random_qkv(2, sum(lengths), *heads, dtype=torch.float64)
    grad = torch.randn_like(qkv[0])
    options = {"is_causal": is_causal}
    packed = output_and_gradients(
        attend, qkv, grad, pattern, documents=ids.expand(2, -1), **options
    )
    alone = []
    for *parts, part_grad in zip(*(x.split(lengths, dim=1) for x in (*qkv, grad)), strict=True):
        inputs = tuple(x.detach().requires_grad_() for x in parts)
        alone.append(output_and_gradients(attend, inputs, part_grad, pattern, **options))
    for found, expected in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-12, atol=1e-13)


def test_dropout_has_its_rate_and_follows_its_seed() -> None:
    q, k = torch.zeros(1, 200, 2, 8), torch.zeros(1, 200, 2, 8)
    v = torch.ones(1, 200, 2, 8)
    out, again, other = (
        attend(q, k, v, Dense(), is_causal=False, dropout_p=0.3, dropout_seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    # Each output is the mean of 200 kept-or-dropped ones: kept share / 0.7.
    assert abs(out.mean().item() - 1) < 0.01
    assert not torch.equal(out[:, :, 0], out[:, :, 1])


def test_the_backend_is_explained_and_can_be_forced() -> None:
    q, k, v = random_qkv(1, 8, 2, 2)
    padding = torch.zeros(1, 8, dtype=torch.bool)
    assert choose_backend(q, k, Mask(Dense())).name == "sdpa"
    assert choose_backend(q, k, Mask(Dilated((4,), (1,)))).name == "strided"
    chosen = choose_backend(q, k, Mask(Dense(), key_padding_mask=padding))
    assert (chosen.name, chosen.reason) == ("reference", "there is padding, on a CPU")
    with pytest.raises(
        ValueError, match=r"'strided' does not support this: .* padding, on a CPU; use 'ref"
    ):
        attend(q, k, v, Dense(), key_padding_mask=padding, backend="strided")


def plain_low_precision(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, is_causal: bool
) -> Tensor:
    """The oracle's formula as plain PyTorch code in the precision of the inputs."""
    outputs = []
    position = torch.arange(q.shape[1])
    for head in range(q.shape[2]):
        counts = pattern.counts(position, position, head)
        counts = (counts.tril() if is_causal else counts).to(q.device)
        scores = q[:, :, head] @ k[:, :, head].mT * q.shape[3] ** -0.5 + counts.log().to(q.dtype)
        outputs.append(scores.softmax(-1) @ v[:, :, head])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [96, 133])
def test_low_precision_is_within_twice_the_error_of_plain_code(
    device: str, dtype: torch.dtype, is_causal: bool, tokens: int
) -> None:
    pattern = Dilated((16, 32, 64), (1, 2, 4))
    qkv = random_qkv(2, tokens, 4, 4, head_dim=32, dtype=dtype, device=device)
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in qkv)
    grad = torch.randn_like(qkv[0])
    ours = output_and_gradients(attend, qkv, grad, pattern, is_causal=is_causal)
    plain = output_and_gradients(plain_low_precision, qkv, grad, pattern, is_causal=is_causal)
    oracle = output_and_gradients(attend_oracle, exact, grad.cpu(), pattern, is_causal=is_causal)
    for index, (found, usual, expected) in enumerate(zip(ours, plain, oracle, strict=True)):
        allowed = (2 if index == 0 else 3) * (usual.double().cpu() - expected).norm()
        assert (found.double().cpu() - expected).norm() <= allowed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [96, 133])
def test_float32_is_within_rounding_of_the_oracle(
    device: str, is_causal: bool, tokens: int
) -> None:
    pattern = Dilated((16, 32, 64), (1, 2, 4))
    qkv = random_qkv(2, tokens, 4, 2, head_dim=32, device=device)
    exact = tuple(x.detach().double().cpu().requires_grad_() for x in qkv)
    grad = torch.randn_like(qkv[0])
    ours = output_and_gradients(attend, qkv, grad, pattern, is_causal=is_causal)
    oracle = output_and_gradients(attend_oracle, exact, grad.cpu(), pattern, is_causal=is_causal)
    for found, expected in zip(ours, oracle, strict=True):
        assert (found.double().cpu() - expected).norm() <= 1e-6 * expected.norm()


def test_oracle_equals_a_multiset_softmax_written_out_by_hand() -> None:
    # Two heads, w = 2 r = 1 and w = 4 r = 2. Query 2 of head 0 sees key 2 (branch 1), and keys
    # 0 and 2 (branch 2): {2, 0, 2}. Query 3 of head 0 is in branch 1 only: {2, 3}.
    pattern = Dilated((2, 4), (1, 2))
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64) for _ in range(3))
    out = attend_oracle(q, k, v, pattern, scale=1.0)
    for query, keys in [(2, [2, 0, 2]), (3, [2, 3])]:
        weights = torch.stack([q[0, query, 0] @ k[0, key, 0] for key in keys]).softmax(0)
        expected = sum(w * v[0, key, 0] for w, key in zip(weights, keys, strict=True))
        torch.testing.assert_close(out[0, query, 0], expected)


@pytest.mark.parametrize("is_causal", [True, False])
def test_dense_oracle_equals_torch(is_causal: bool) -> None:
    q, k, v = random_qkv(2, 17, 4, 2, dtype=torch.float64)
    expected = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=is_causal,
        enable_gqa=True,
    ).transpose(1, 2)
    out = attend_oracle(q, k, v, Dense(), is_causal=is_causal)
    torch.testing.assert_close(out, expected)


def test_a_query_in_no_branch_gives_zeros_and_no_gradient() -> None:
    qkv = random_qkv(1, 8, 2, 2, dtype=torch.float64)
    out = attend(*qkv, Dilated((4,), (2,)))
    assert (out[0, 1::2, 0] == 0).all()
    assert (out[0, 0::2, 1] == 0).all()
    assert (out[0, 0::2, 0] != 0).any()
    grads = torch.autograd.grad(out.sum(), qkv)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][0, 1::2, 0] == 0).all()


@pytest.mark.parametrize(
    "pattern", [Dense(), Dilated((8, 16), (1, 4)), BlockSparse(4, density=0.5)]
)
def test_causality_changing_the_future_changes_nothing_before_it(pattern: Pattern) -> None:
    q, k, v = (x.detach() for x in random_qkv(1, 37, 4, 4))
    before = attend(q, k, v, pattern)
    for border in (1, 8, 19, 36):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, border:] = torch.randn_like(x[:, border:])
        after = attend(*changed, pattern)
        torch.testing.assert_close(after[:, :border], before[:, :border], rtol=0, atol=0)
        assert not torch.equal(after[:, border:], before[:, border:])


@pytest.mark.parametrize("backend", [None, "reference", "triton"])
def test_some_of_the_heads_give_that_part_of_the_output(backend: Any) -> None:
    pattern = Dilated((8, 32), (1, 4))
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    q, k, v = random_qkv(1, 40, 6, 6, device=device)
    whole = attend(q, k, v, pattern, backend=backend)
    for first, last in ((0, 2), (2, 5), (5, 6)):
        heads = [x[:, :, first:last] for x in (q, k, v)]
        part = attend(*heads, replace(pattern, first_head=first), backend=backend)  # type: ignore[arg-type]
        torch.testing.assert_close(part, whole[:, :, first:last])
    pairs = [
        replace(pattern, first_head=first).pairs(40, last - first, is_causal=True)
        for first, last in ((0, 2), (2, 5), (5, 6))
    ]
    assert sum(pairs) == pattern.pairs(40, 6, is_causal=True)


def test_extra_memory_is_linear_in_tokens() -> None:
    """Bytes saved for the backward pass, beyond the inputs, double with the tokens."""

    def saved_bytes(tokens: int) -> int:
        qkv = random_qkv(1, tokens, 4, 4)
        inputs = {x.data_ptr() for x in qkv}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if x.data_ptr() not in inputs:
                kept[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            attend(*qkv, Dilated((64, 256), (1, 4)))
        return sum(kept.values())

    assert saved_bytes(2048) == 2 * saved_bytes(1024) > 0


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8, 4), (2, 8, 4), (2, 8, 4)), "q must be"),
        (((2, 8, 4, 8), (2, 8, 4, 16), (2, 8, 4, 16)), "agree in batch and head_dim"),
        (
            ((2, 9, 4, 8), (2, 8, 4, 8), (2, 8, 4, 8)),
            "as many keys as queries, got 9 queries and 8",
        ),
        (((2, 8, 4, 8), (2, 8, 4, 8), (2, 8, 2, 8)), "k and v must have the same shape"),
        (((2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)), "must divide the 4 query heads, got 3"),
    ],
)
def test_wrong_shapes_are_errors(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes), Dense())  # type: ignore[misc]


HEADLESS = r"at least one head .* got \(2, 8, 4, 8\) and \(2, 8, 0, 8\)"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 8, 4, 8).long()}, TypeError, r"q must be floating .*torch\.int64"),
        ({"v": torch.zeros(2, 8, 4, 8).bool()}, TypeError, r"v must be floating .*torch\.bool"),
        ({"k": [[1.0]]}, TypeError, r"k must be a torch\.Tensor, got list"),
        ({"k": torch.zeros(2, 8, 0, 8), "v": torch.zeros(2, 8, 0, 8)}, ValueError, HEADLESS),
        ({"pattern": (4, 1)}, TypeError, r"must be Dense\(\), Dilated\(\.\.\.\), .* got tuple"),
        ({"pattern": Dense}, TypeError, "got the <class '.*Dense'>"),
        ({"is_causal": None}, TypeError, "is_causal must be True or False, got None"),
        ({"scale": math.nan}, ValueError, "scale must be a finite number .* got nan"),
        ({"scale": "1"}, ValueError, "scale must be a finite number .* got '1'"),
        ({"backend": "flash"}, ValueError, "backend must be one of .*'sdpa'.* got 'flash'"),
        ({"dropout_p": "0.1"}, TypeError, r"dropout_p must be a number, got '0\.1'"),
        ({"dropout_seed": 1.5}, TypeError, r"dropout_seed must be an integer, got 1\.5"),
        ({"documents": [0, 1]}, TypeError, r"documents must be a torch\.Tensor, got list"),
        ({"cu_seqlens": [0, 8]}, TypeError, r"cu_seqlens must be a torch\.Tensor, got list"),
        ({"cu_seqlens": torch.tensor([4, 4])}, ValueError, r"from 0 to 8.* got \[4, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"from 0 to 8.* got \[0, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 6, 4, 8])}, ValueError, r"from 0 to 8.* got \[0, 6"),
    ],
)
def test_clumsy_arguments_are_errors(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {name: torch.zeros(2, 8, 4, 8) for name in "qkv"} | {"pattern": Dilated((4,), (1,))}
    attend(**given)
    with pytest.raises(error, match=message):
        attend(**given | change)


def test_heads_first_gives_a_warning() -> None:
    x = torch.zeros(1, 4, 256, 8)  # (batch, heads, tokens, head_dim)
    with pytest.warns(UserWarning, match=r"4 tokens and 256 heads.* use q\.transpose\(1, 2\)"):
        attend(x, x, x, Dense())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*[x.transpose(1, 2)] * 3, Dense())
        attend(*[torch.zeros(1, 8, 32, 8)] * 3, Dense())  # a short prompt
        attend(x[:, :1], x, x, Dense(), is_causal=False)  # decoding


def test_wrong_options_are_errors() -> None:
    x, pattern = torch.zeros(1, 8, 2, 8), Dilated((4,), (1,))
    with pytest.raises(ValueError, match=r"Dilated.* got 4 queries and 8 keys: set is_causal"):
        attend(x[:, :4], x, x, pattern, is_causal=False)
    with pytest.raises(ValueError, match=r"documents must be \(batch, keys\) = \(1, 8\)"):
        attend(x, x, x, pattern, documents=torch.zeros(1, 7))
    with pytest.raises(ValueError, match="below 1, got 1"):
        attend(x, x, x, pattern, dropout_p=1)
    with pytest.raises(ValueError, match="documents and cu_seqlens exclude each other"):
        attend(
            x, x, x, pattern, documents=torch.zeros(1, 8).long(), cu_seqlens=torch.tensor([0, 8])
        )
    with pytest.raises(ValueError, match=r"one dimension, got \(1, 2\)"):
        attend(x, x, x, pattern, cu_seqlens=torch.tensor([[0, 8]]))

    with pytest.raises(ValueError, match=r"documents must be integers, got torch\.float32"):
        attend(x, x, x, pattern, documents=torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"key_padding_mask must be bool, got torch\.int64"):
        attend(x, x, x, pattern, key_padding_mask=torch.zeros(1, 8, dtype=torch.int64))


@pytest.mark.parametrize("pattern", [Dense(), Dilated((8, 16), (1, 2))])
def test_any_strides_and_any_scale(pattern: Pattern) -> None:
    for scale in (0.3, 0.0, -0.5):
        qkv = tuple(
            torch.randn(1, 2, 8, 20, dtype=torch.float64).permute(0, 3, 1, 2).requires_grad_()
            for _ in range(3)
        )
        assert_equals_oracle(qkv, pattern, None, scale=scale)  # type: ignore[arg-type]


def test_cu_seqlens_equal_documents() -> None:
    q, k, v = random_qkv(2, 12, 2, 2)
    documents = torch.tensor([0] * 5 + [1] * 4 + [2] * 3).expand(2, -1)
    expected = attend(q, k, v, Dilated((4, 8), (1, 2)), documents=documents)
    borders = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    out = attend(q, k, v, Dilated((4, 8), (1, 2)), cu_seqlens=borders)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_mixed_dtypes_are_errors() -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"k is torch\.float64"):
        attend(x, x.double(), x, Dense())
