"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from longspan.nn import RMSNorm


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_its_formula_in_the_dtype_of_the_input(
    dtype: torch.dtype, tolerance: float, eps: float
) -> None:
    norm = RMSNorm(16, eps)
    torch.nn.init.normal_(norm.weight)
    x = (3 * torch.randn(5, 16)).to(dtype)
    found = norm(x)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= tolerance * exact.norm()
