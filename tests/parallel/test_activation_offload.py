"""What activation offload copies, when it is back, and what it leaves on the device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from longspan.config import Run
from longspan.models import build_decoder
from longspan.parallel import activation_offload
from longspan.parallel.activation_offload import MIN_BYTES, _Host, _Pass, _unpack, _View
from longspan.parallel.apply import apply_to_blocks
from longspan.runfile import load_run
from longspan.training.step import forward_context_of

LARGE = MIN_BYTES // 4
"""Elements of a float32 tensor that is just large enough."""


def pack(of_pass: _Pass, x: Tensor) -> _View:
    packed = of_pass.pack(x)
    assert isinstance(packed, _View)
    return packed


def test_tensors_that_share_a_storage_are_copied_once_and_share_it_again() -> None:
    of_pass = _Pass(_Host())
    x = torch.randn(4, LARGE)
    views = [x, x.t(), x[1:], x.view(LARGE, 4), x.expand(2, 4, LARGE)]
    packed = [pack(of_pass, view) for view in views]
    assert len({id(p.saved) for p in packed}) == 1
    more = [pack(of_pass, torch.randn(LARGE)) for _ in range(4)]
    assert len(more) == 4  # so that the first must leave
    assert packed[0].saved.values is None
    found = [_unpack(p) for p in packed]
    assert len({y.untyped_storage().data_ptr() for y in found}) == 1
    for y, view in zip(found, views, strict=True):
        assert y.stride() == view.stride()
        assert torch.equal(y, view)
    assert found[0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_small_part_of_a_large_buffer_is_copied_alone() -> None:
    buffer = torch.randn(8, LARGE)
    packed = pack(_Pass(_Host()), buffer[2])
    assert packed.saved.get().numel() == 4 * LARGE
    assert torch.equal(_unpack(packed), buffer[2])


def test_weights_and_small_tensors_stay() -> None:
    of_pass, weight = _Pass(_Host()), nn.Parameter(torch.randn(LARGE, 2))
    frozen = nn.Parameter(torch.randn(LARGE, 2), requires_grad=False)
    cast = weight.to(torch.bfloat16)
    for x in (weight, weight.t(), frozen, frozen.t(), cast, cast.t(), torch.randn(LARGE - 1)):
        assert of_pass.pack(x) is x
    assert isinstance(of_pass.pack((2 * weight).to(torch.bfloat16)), _View)


def test_the_newest_are_never_copied_and_what_is_needed_next_is_fetched_ahead() -> None:
    of_pass, tensors = _Pass(_Host()), [torch.randn(LARGE) for _ in range(9)]
    packed = [pack(of_pass, x) for x in tensors]
    on_device = [p.saved.values is not None for p in packed]
    assert on_device == [False] * 5 + [True] * 4  # two on their way out, two untouched
    assert [p.saved._buffer is not None for p in packed] == [True] * 7 + [False] * 2
    assert torch.equal(_unpack(packed[6]), tensors[6])
    assert [p.saved.values is not None for p in packed] == [False] * 4 + [True] * 5
    for p, x in zip(packed[::-1], tensors[::-1], strict=True):
        assert torch.equal(_unpack(p), x)


def test_buffers_are_used_again() -> None:
    host = _Host()
    for _ in range(3):
        of_pass = _Pass(host)
        packed = [pack(of_pass, torch.randn(LARGE)) for _ in range(6)]
        for p in reversed(packed):
            _unpack(p)
        del packed, p
    assert [len(free) for free in host._free.values()] == [4]


def test_the_first_are_offloaded_where_memory_is_limited() -> None:
    host = _Host(limit=2.5 * MIN_BYTES)
    for _ in range(2):  # the second time with buffers of the first
        of_pass, tensors = _Pass(host), [torch.randn(LARGE) for _ in range(9)]
        packed = [pack(of_pass, x) for x in tensors]
        assert [p.saved.values is not None for p in packed] == [False] * 2 + [True] * 7
        assert all(torch.equal(_unpack(p), x) for p, x in zip(packed, tensors, strict=True))
        del packed


def test_copies_take_their_time_where_later_storages_stay() -> None:
    """Of 48, 8 fit into CPU memory: 40 is what the device must have room for at any time.

    The first forward pass cannot know that.
    """
    host = _Host(limit=8 * MIN_BYTES)

    def on_device() -> list[bool]:
        return [p.saved.values is not None for p in packed]

    for soonest in (4, 39):  # and room for the next one
        of_pass, packed = _Pass(host), []
        tensors = [torch.randn(LARGE) for _ in range(48)]
        for place, x in enumerate(tensors):
            packed.append(pack(of_pass, x))
            assert host.on_device == sum(on_device()) * MIN_BYTES
            assert sum(on_device()) == max(min(place + 1, soonest), place + 1 - 8)
        assert on_device() == [False] * 8 + [True] * 40
        back = []
        for place in reversed(range(48)):
            assert packed[place].saved.values is not None  # before it is asked for
            assert torch.equal(_unpack(packed[place]), tensors[place])
            assert sum(on_device()) <= max(39 * min(1, place / 48 + 1 / 8), place - 8 + 1)
            back.append(sum(on_device()[:8]))
            packed.pop()
        assert back[::8] == [0, 4, 6, 7, 8, 8]
    assert host.on_device == 0


def test_a_storage_that_all_blocks_use_does_not_end_the_fetching_ahead() -> None:
    """As the table of RoPE, whose place is in the first block: the last block asks for it first."""
    of_pass, table = _Pass(_Host()), torch.randn(LARGE)
    tensors = [torch.randn(LARGE) for _ in range(12)]
    packed = [(pack(of_pass, x), pack(of_pass, table)) for x in tensors]
    for (p, of_table), x in zip(reversed(packed), reversed(tensors), strict=True):
        assert torch.equal(_unpack(of_table), table)
        assert torch.equal(_unpack(p), x)
        before = packed[: packed.index((p, of_table))]
        assert all(q.saved.values is not None for q, _ in before[-1:])
        assert all(q.saved.values is None for q, _ in before[:-4])


def test_what_waits_to_leave_does_not_grow_with_steps() -> None:
    """A large step has made more room than later ones need, and a graph is kept for good."""
    host = _Host()
    for size, steps in ((8 * LARGE, 1), (LARGE, 1), (LARGE, 20)):
        for _ in range(steps):
            of_pass = _Pass(host)
            packed = [pack(of_pass, torch.randn(size)) for _ in range(6)]
        if steps == 1:
            kept = packed[0]
    del packed, of_pass
    assert list(host._leaving) == [id(kept.saved)]
    assert host.on_device == kept.saved.size == MIN_BYTES


def test_buffers_serve_other_sizes_too() -> None:
    """Chunks of documents have ever other sizes: what is allocated does not grow with their number.

    The largest size comes last, for which a limit leaves room.
    """
    host = _Host(limit=16 * MIN_BYTES)
    for size in (*range(LARGE + 1, 2 * LARGE, LARGE // 7), 2 * LARGE):
        of_pass, tensors = _Pass(host), [torch.randn(size) for _ in range(9)]
        packed = [pack(of_pass, x) for x in tensors]
        assert [p.saved.values is not None for p in packed] == [False] * 5 + [True] * 4
        assert all(torch.equal(_unpack(p), x) for p, x in zip(packed, tensors, strict=True))
        del packed
    assert host._allocated == 14 * MIN_BYTES  # seven buffers


def test_a_storage_is_told_from_a_later_one_at_its_address() -> None:
    of_pass, packed, sums = _Pass(_Host()), [], []
    for _ in range(8):
        x = torch.randn(LARGE)
        packed.append(pack(of_pass, x))
        sums.append(x.sum())
        del x
    assert [_unpack(p).sum() for p in packed] == sums


def test_an_activation_that_changes_before_its_copy_is_an_error() -> None:
    of_pass, x = _Pass(_Host()), torch.randn(LARGE)
    first = pack(of_pass, x)
    x += 1
    second = pack(of_pass, x)
    assert first.saved is not second.saved
    with pytest.raises(RuntimeError, match="modified in place"):
        pack(of_pass, torch.randn(LARGE))


def run_of(*overrides: str) -> Run:
    model = ["model.layers=12", "model.hidden=256", "model.heads=4", "data.context=16384"]
    return load_run(None, [*model, "attention.kind=dilated", *overrides])


def step(run: Run, *, steps: int = 3) -> tuple[list[Tensor], int]:
    """The gradients of the last of a few passes, and the peak of allocated bytes."""
    gc.collect()
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = build_decoder(run, device)
    apply_to_blocks(model, run.train)
    tokens = torch.randint(256, (1, 16384), device=device)
    context = forward_context_of(run.train)
    for _ in range(steps):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with context():
            loss = model(tokens, tokens)
        loss.backward()
    peak = torch.cuda.max_memory_allocated()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], peak


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Embeddings and some attention kernels otherwise add gradients in any order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_on_a_gpu_gradients_are_equal_and_memory_is_less(
    mode: str, compiled: str, precision: str
) -> None:
    options = [f"train.activation_checkpointing={mode}", f"train.compile={compiled}"]
    options += ["train.device=cuda", f"train.precision={precision}"]
    expected, without = step(run_of(*options))
    found, peak = step(run_of(*options, "train.offload_activations=true"))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert peak < without


@pytest.mark.gpu
def test_on_a_gpu_copies_that_nobody_asks_for_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is dropped, or used in part: its prefetched storages are freed in time."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    context = activation_offload.activation_offload(enabled=True)()
    xs = [torch.randn(1 << 22, device="cuda", requires_grad=True) for _ in range(8)]
    for _ in range(20):
        with context:
            ys = [(x * 2).exp() for x in xs]
        (gradient,) = torch.autograd.grad(ys[5].sum(), xs[5])
        del ys
        torch.testing.assert_close(gradient, 2 * (2 * xs[5]).exp())
        assert torch.randn(1 << 22, device="cuda").isfinite().all()
