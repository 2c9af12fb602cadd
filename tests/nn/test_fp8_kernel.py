"""Transposes of matrices in fp8: the kernels equal torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.nn.fp8 import FORWARD, rounded_weight, transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(200, 48), (128, 128), (7, 304), (33, 1)]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8).cpu()


def bytes_of(rows: int, columns: int) -> Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8)


def expected_of(x: Tensor) -> Tensor:
    """Filled up to a multiple of 16 columns."""
    rows, columns = x.shape
    found = torch.zeros(columns, -(-rows // 16) * 16, dtype=torch.uint8)
    found[:, :rows] = x.T
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_transposed_and_filled_up(device: str, shape: tuple[int, int]) -> None:
    x = bytes_of(*shape)
    found = transposed(x.to(device).view(FORWARD))
    assert found.dtype == FORWARD
    assert torch.equal(bits(found), expected_of(x))
    assert transposed(x.view(FORWARD).to("meta")).shape == found.shape  # as torch.compile sees it


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_transposes_bytes(shape: tuple[int, int]) -> None:
    """In Triton's interpreter, or on a GPU."""
    pytest.importorskip("triton")
    from longspan.nn.fp8_kernel import transpose

    x = bytes_of(*shape)
    width = -(-len(x) // 16) * 16
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch.equal(transpose(x.to(device), width).cpu(), expected_of(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposes", [False, True])
def test_weights_are_rounded_to_16_bits_before(
    device: str, dtype: torch.dtype, held: torch.dtype, transposes: bool
) -> None:
    weight = torch.randn(80, 272, dtype=held)
    weight[0, 0] = 6.25 + 2**-10  # times 64 halfway between two numbers of fp8, but for this bit
    scale = torch.tensor(64.0)
    found = rounded_weight(weight.to(device), scale.to(device), dtype, transposes)
    expected = (weight.to(dtype).float() * 64).to(FORWARD)
    expected = expected.T.contiguous() if transposes else expected
    assert torch.equal(bits(found), bits(expected))
    assert found[0, 0].float() == (416 if held == dtype == torch.float32 else 384)


@pytest.mark.gpu
def test_a_matrix_may_have_more_bytes_than_32_bits_count() -> None:
    x = torch.zeros((1 << 20) + 16, 2176, dtype=torch.uint8, device="cuda")
    x[-1], x[:, -1] = 7, 9
    found = transposed(x.view(FORWARD)).view(torch.uint8)
    assert torch.equal(found, x.T)
