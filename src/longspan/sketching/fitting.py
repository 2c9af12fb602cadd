"""Fit factors to a weight W (in, out), y = x W + b: truncated SVD and least squares.

With calibration inputs X (n, in) the fit minimises the error of the layer's output,
‖X (W − Ŵ)‖² = n ‖Lᵀ (W − Ŵ)‖², where L Lᵀ = C = XᵀX / n: the same problem for Lᵀ W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.sketching.layers import SKLinear


def fit_low_rank(weight: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A (in, rank), B (rank, out) that minimise ‖Lᵀ (W − A B)‖, for an nn.Linear weight (out, in).

    The truncated SVD Lᵀ W ≈ P Σ Qᵀ gives A = L⁻ᵀ P √Σ and B = √Σ Qᵀ. `moment` is C (in, in); L is
    the identity without it.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"expected 1 <= rank <= {min(weight.shape)}, got {rank}")
    w = weight.detach().T.double()
    root = _root(moment, w)
    p, values, q = torch.linalg.svd(root.T @ w, full_matrices=False)
    half = values[:rank].sqrt()
    a = torch.linalg.solve_triangular(root.T, p[:, :rank] * half, upper=True)
    return a.to(weight.dtype), (half[:, None] * q[:rank]).to(weight.dtype)


@torch.no_grad()
def fit_sketched(weight: Tensor, layer: SKLinear, moment: Tensor | None = None) -> None:
    """Set s1 and s2 to minimise ‖Lᵀ (W − S1 V1 − V2 S2)‖, for an nn.Linear weight (out, in).

    V1 and V2 are the layer's scaled signs. S2 fits Lᵀ W by least squares in the column space of
    Lᵀ V2; T1 = Lᵀ S1 then fits the residual in the row space of V1. With P2 and P1 the projections
    onto these spaces, the residual is (1 − P2) Lᵀ W (1 − P1).
    """
    w = weight.detach().T.double()
    root = _root(moment, w)
    s2, residual = _least_squares(root.T @ layer.u2.double() * layer.scale, root.T @ w)
    t1, _ = _least_squares(layer.u1.T.double() * layer.scale, residual.T)
    layer.s1.copy_(torch.linalg.solve_triangular(root.T, t1.T, upper=True))
    layer.s2.copy_(s2)


@torch.no_grad()
def random_sketch(weight: Tensor, layer: SKLinear) -> None:
    """Set S1 = W U1ᵀ and S2 = U2ᵀ W, for nn.Linear's weight (out, in).

    The expectation of U1ᵀ U1 and U2 U2ᵀ over signs is the identity, so the layer is an unbiased
    estimate of W. Its relative error is about √((in + out − 2) / 4R), R = terms · rank: with a
    fraction f of W's parameters at least 1/√f, more than the error 1 of a layer of zeros.
    """
    w = weight.detach().T.double() * layer.low_rank**-0.5
    layer.s1.copy_(w @ layer.u1.T.double())
    layer.s2.copy_(layer.u2.T.double() @ w)


def _root(moment: Tensor | None, w: Tensor) -> Tensor:
    """The Cholesky factor L of C + ε, with ε = 1e-6 of C's mean diagonal; the identity without C.

    A moment accumulated in low precision may have eigenvalues below −ε: ε then grows tenfold.
    """
    identity = torch.eye(len(w), dtype=w.dtype, device=w.device)
    if moment is None or not moment.any():
        return identity
    if moment.shape != identity.shape or not moment.isfinite().all():
        raise ValueError(
            f"expected a finite moment XᵀX / n of shape {tuple(identity.shape)}, got "
            f"{tuple(moment.shape)}; check the calibration inputs for inf and NaN"
        )
    c, ridge = moment.to(w), 1e-6
    while True:
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(c + ridge * c.diagonal().mean() * identity)
        if not failed:
            return root
        ridge *= 10


def _least_squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum-norm x that minimises ‖a x − b‖, and b − a x; by SVD, as `a` may be singular."""
    p, values, q = torch.linalg.svd(a, full_matrices=False)
    nonzero = values > values[0] * max(a.shape) * torch.finfo(a.dtype).eps
    p, values, q = p[:, nonzero], values[nonzero], q[nonzero]
    projected = p.T @ b
    return q.T @ (projected / values[:, None]), b - p @ projected
