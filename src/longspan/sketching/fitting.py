"""Factors for a weight W (in, out), y = x W + b, that are near it.

With calibration inputs X (n, in), "near" is measured on what the layer computes,
‖X (W − Ŵ)‖² = n ‖Lᵀ (W − Ŵ)‖², where L Lᵀ = C = XᵀX / n: the same problem for Lᵀ W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.sketching.layers import SKLinear


def fit_low_rank(weight: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A (in, rank), B (rank, out) that minimise ‖Lᵀ (W − A B)‖, for nn.Linear's weight (out, in).

    With Lᵀ W = P Σ Qᵀ: A = L⁻ᵀ P √Σ and B = √Σ Qᵀ, of the `rank` largest singular values. L is 1
    without `moment`, which is C (in, in).
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"expected a rank of 1 to {min(weight.shape)}, got {rank}")
    w = weight.detach().T.double()
    root = _root(moment, w)
    p, values, q = torch.linalg.svd(root.T @ w, full_matrices=False)
    half = values[:rank].sqrt()
    a = torch.linalg.solve_triangular(root.T, p[:, :rank] * half, upper=True)
    return a.to(weight.dtype), (half[:, None] * q[:rank]).to(weight.dtype)


@torch.no_grad()
def fit_sketched(weight: Tensor, layer: SKLinear, moment: Tensor | None = None) -> None:
    """Set s1 and s2 so that ‖Lᵀ (W − S1 V1 − V2 S2)‖ is least, for nn.Linear's weight (out, in).

    V1, V2 are the layer's signs with its scales. S2 takes, by least squares, all of Lᵀ W that lies
    in the columns of Lᵀ V2; then T1 = Lᵀ S1 takes of the rest what lies in the rows of V1. With
    P2, P1 the projections on these, (1 − P2) Lᵀ W (1 − P1) is left.
    """
    w = weight.detach().T.double()
    root = _root(moment, w)
    s2, rest = _solve(root.T @ layer.u2.double() * layer.scale, root.T @ w)
    t1, _ = _solve(layer.u1.T.double() * layer.scale, rest.T)
    layer.s1.copy_(torch.linalg.solve_triangular(root.T, t1.T, upper=True))
    layer.s2.copy_(s2)


@torch.no_grad()
def random_sketch(weight: Tensor, layer: SKLinear) -> None:
    """Set S1 = W U1ᵀ and S2 = U2ᵀ W, for nn.Linear's weight (out, in).

    A term's U1ᵀ U1 and U2 U2ᵀ are 1 on average over signs, so the layer is W on average. Its
    relative error is about √((in + out − 2) / 4R), R = terms · rank: with a share f of W's numbers
    at least 1/√f, so more than the error 1 of a layer that is 0.
    """
    w = weight.detach().T.double() * layer.low_rank**-0.5
    layer.s1.copy_(w @ layer.u1.T.double())
    layer.s2.copy_(layer.u2.T.double() @ w)


def _root(moment: Tensor | None, w: Tensor) -> Tensor:
    """The lower triangular L with L Lᵀ = C + ε, of ε = 1e-6 of C's mean diagonal; 1 without C.

    A moment summed in low precision may have eigenvalues below −ε: then ε grows tenfold.
    """
    one = torch.eye(len(w), dtype=w.dtype, device=w.device)
    if moment is None or not moment.any():
        return one
    if moment.shape != one.shape or not moment.isfinite().all():
        raise ValueError(
            f"expected a moment XᵀX / n of shape {tuple(one.shape)} and finite numbers, got "
            f"{tuple(moment.shape)}; look for inf and nan in the calibration inputs"
        )
    c, share = moment.to(w), 1e-6
    while True:
        root: Tensor
        root, failed = torch.linalg.cholesky_ex(c + share * c.diagonal().mean() * one)
        if not failed:
            return root
        share *= 10


def _solve(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest x that minimises ‖a x − b‖, and b − a x. By SVD, as `a` may have any rank."""
    p, values, q = torch.linalg.svd(a, full_matrices=False)
    kept = values > values[0] * max(a.shape) * torch.finfo(a.dtype).eps
    p, values, q = p[:, kept], values[kept], q[kept]
    inside = p.T @ b
    return q.T @ (inside / values[:, None]), b - p @ inside
