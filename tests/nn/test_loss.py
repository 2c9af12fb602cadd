"""The chunked cross-entropy against torch's, and its peak memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.constants import IGNORE_INDEX
from longspan.nn import cross_entropy_sum
from tests.harness import Ranks

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def inputs(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    hidden = torch.randn(2, tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (2, tokens))
    targets[torch.rand(2, tokens) < 0.3] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_equals_torch_with_gradients(rows: int) -> None:
    hidden, weight, targets = inputs(13, 8, 11, torch.float64)
    ours = cross_entropy_sum(hidden, weight, targets, chunk_elements=rows * 11)
    expected = cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(ours, expected)
    # The factor makes the incoming gradient differ from 1.
    found = torch.autograd.grad(ours * 0.37, (hidden, weight))
    wanted = torch.autograd.grad(expected * 0.37, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [7, 1000])
def test_z_loss_adds_to_the_gradient_alone(rows: int) -> None:
    hidden, weight, targets = inputs(13, 8, 11, torch.float64)
    c = 0.1
    ours = cross_entropy_sum(hidden, weight, targets, z_loss=c, chunk_elements=rows * 11)
    logits, valid = hidden @ weight.T, targets != -100
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(ours, expected)
    whole = expected + c * (logits.logsumexp(-1)[valid] ** 2).sum()
    found = torch.autograd.grad(ours * 0.37, (hidden, weight))
    wanted = torch.autograd.grad(whole * 0.37, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_z_loss_in_bf16_rounds_the_gradient_once() -> None:
    hidden, weight, targets = inputs(40, 16, 32, torch.float32)
    exact = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets, z_loss=0.1), hidden)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, targets, z_loss=0.1)
    found = torch.autograd.grad(loss, hidden)[0]
    assert (found - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "vocab", "tolerance"),
    [(torch.float32, 11, 1e-6), (torch.float32, 5000, 1e-6), (torch.float16, 300, 5e-4)],
)
def test_the_kernel_equals_torch(
    dtype: torch.dtype, vocab: int, tolerance: float, device: str, z_loss: float
) -> None:
    from longspan.nn.loss_kernel import losses_and_dlogits

    logits = (4 * torch.randn(9, vocab)).to(dtype)
    targets = torch.randint(vocab, (9,))
    logits[0, targets[0]] = 30.0  # p is 1
    exact = logits.double().requires_grad_()
    expected = -exact.log_softmax(-1).gather(1, targets[:, None])
    whole = expected + z_loss * exact.logsumexp(-1, keepdim=True) ** 2
    wanted = torch.autograd.grad(whole[:-1].sum(), exact)[0]
    targets[-1], logits[-1, 0] = IGNORE_INDEX, math.nan
    losses, found = losses_and_dlogits(logits.to(device), targets.to(device), z_loss, True)
    expected = torch.cat([expected[:-1].detach(), torch.zeros(1, 1)])
    torch.testing.assert_close(losses.double().cpu(), expected, rtol=1e-5, atol=1e-6)
    assert (found.double().cpu() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.gpu
def test_the_chunks_of_a_gpu_equal_those_of_a_cpu() -> None:
    hidden, weight, targets = inputs(700, 64, 1000, torch.float32)
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (hidden, 0.1 * weight)]
    exact = cross_entropy_sum(*rounded, targets, z_loss=0.01)
    wanted = torch.autograd.grad(exact, rounded)
    there = [x.detach().cuda().bfloat16().requires_grad_() for x in rounded]
    options = {"z_loss": 0.01, "chunk_elements": 300 * 1000}
    loss = cross_entropy_sum(*there, targets.cuda(), **options)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
    for a, b in zip(torch.autograd.grad(loss, there), wanted, strict=True):
        assert (a.double().cpu() - b).norm() < 1e-2 * b.norm()


def test_retain_graph_gives_the_same_gradients_again() -> None:
    hidden, weight, targets = inputs(5, 4, 6, torch.float32)
    loss = 3 * cross_entropy_sum(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, (hidden, weight))


def test_ignored_targets_give_zero_loss_and_gradients() -> None:
    hidden, weight, targets = inputs(5, 4, 6, torch.float32)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in grads)


def test_autocast_multiplies_in_bf16_and_sums_in_fp32() -> None:
    hidden, weight, targets = inputs(40, 16, 32, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, targets, chunk_elements=320)
    exact = cross_entropy_sum(hidden.double(), weight.double(), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest operator output."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("tokens", [64, 512])
def test_no_tensor_has_tokens_times_vocabulary_elements(tokens: int) -> None:
    vocab, width, rows = 500, 4, 16
    hidden, weight, targets = inputs(tokens, width, vocab, torch.float32)
    with LargestTensor() as mode:
        cross_entropy_sum(hidden, weight, targets, chunk_elements=rows * vocab).backward()
    assert mode.largest == max(rows * vocab, 2 * tokens * width)
    assert mode.largest < tokens * vocab


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 3, 4\), \(7, 5\) and \(2, 3\)"):
        cross_entropy_sum(
            torch.zeros(2, 3, 4), torch.zeros(7, 5), torch.zeros(2, 3, dtype=torch.int64)
        )


def test_negative_targets_other_than_the_ignored_one_are_errors() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(16, 8)
    assert cross_entropy_sum(hidden, weight, torch.full((4,), -100)) == 0
    for target in (-1, -2, 16):
        with pytest.raises((RuntimeError, IndexError)):
            cross_entropy_sum(hidden, weight, torch.full((4,), target))


def sharded_loss(rank: int, world: int, z_loss: float) -> tuple[list[Tensor], list[bool]]:
    """The loss and gradients with rows of the vocabulary on two ranks; which targets fail."""
    mesh = init_device_mesh("cpu", (world,))
    hidden, weight, targets = inputs_of_two_ranks()
    rows = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    loss = cross_entropy_sum(hidden, rows, targets, chunk_elements=64, z_loss=z_loss)
    of_hidden, of_rows = torch.autograd.grad(loss, [hidden, rows])
    assert isinstance(of_rows, DTensor)
    failed = []
    for target in (-1, -101, 16):
        try:
            cross_entropy_sum(hidden, rows, torch.full_like(targets, target))
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    return [loss.detach(), of_hidden, of_rows.full_tensor()], failed


def inputs_of_two_ranks() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (20, 16))
    targets = torch.randint(16, (20,), generator=generator)
    targets[::3] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_a_sharded_vocabulary_gives_the_same(ranks: Ranks, z_loss: float) -> None:
    """Targets that no rank has are errors there too."""
    hidden, weight, targets = inputs_of_two_ranks()
    loss = cross_entropy_sum(hidden, weight, targets, z_loss=z_loss)
    expected = [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]
    for found, failed in ranks.run(sharded_loss, 2, z_loss):
        assert failed == [True] * 3
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z)
