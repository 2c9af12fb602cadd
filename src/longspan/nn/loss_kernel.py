"""The softmax of the loss as one Triton kernel: logits in, their gradient out, in place.

A row of logits is read twice, the second time from the GPU's cache, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.constants import IGNORE_INDEX

# mypy: ignore-errors

BLOCK = 8192
"""Columns at a time."""
WARPS = 8


def losses_and_dlogits(
    logits: Tensor, targets: Tensor, z_loss: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """−log p of the target of each row, float32 (rows, 1), and `logits`.

    logits: (rows, vocab), which d loss / d logits replaces if `needs_grad`; targets: int64 (rows,).
    Both are 0 in rows whose target is IGNORE_INDEX.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    losses = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    # Fails for a target outside of the vocabulary, as other negative ones are.
    at_target = logits.gather(1, targets.where(targets != IGNORE_INDEX, 0)[:, None])
    _softmax[(rows,)](
        logits, targets, at_target, losses, vocab, 2 * z_loss, IGNORE=IGNORE_INDEX,
        HAS_Z_LOSS=z_loss != 0, NEEDS_GRAD=needs_grad, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses, logits


@triton.jit
def _softmax(
    logits, targets, at_target, losses, vocab, slope_of_lse,
    IGNORE: tl.constexpr, HAS_Z_LOSS: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if NEEDS_GRAD:
            for start in range(0, vocab, BLOCK):
                at = start + column
                tl.store(logits + at, tl.zeros([BLOCK], logits.dtype.element_ty), at < vocab)
        return
    top = -3e38  # finite: −inf − (−inf) is not a number
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + column
        x = tl.load(logits + at, at < vocab, float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)  # NaN if any logit is
        top = new_top
    log_sum = tl.log(tl.sum(total, 0))
    target_log_p = (tl.load(at_target + row).to(tl.float32) - top) - log_sum
    tl.store(losses + row, -target_log_p)
    if NEEDS_GRAD:
        target_p = tl.exp(target_log_p)
        target_grad = target_p - 1.0  # rounded to 16 bits only now: p may be near 1
        lse = top + log_sum
        factor = 1.0
        if HAS_Z_LOSS:
            slope = slope_of_lse * lse
            factor = 1.0 + slope
            target_grad += slope * target_p
        for start in range(0, vocab, BLOCK):
            at = start + column
            x = tl.load(logits + at, at < vocab, float("-inf")).to(tl.float32)
            grad = tl.exp(x - lse) * factor
            tl.store(logits + at, tl.where(at == target, target_grad, grad), at < vocab)
