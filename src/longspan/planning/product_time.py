"""How long the matrix products of a block take, in the precision that a run computes them in."""

from __future__ import annotations

from dataclasses import replace

from longspan.config import Run, Train
from longspan.costs import linear_sizes, lora_rank_of, rank_of, trains
from longspan.errors import UserError
from longspan.hardware import Device
from longspan.planning.rates import RunRates
from longspan.planning.step_time import matmul_s


def product_peak(train: Train, device: Device) -> float:
    """FLOP/s of matrix products in `train.precision`, or in TF32 by `train.matmul_precision`."""
    uses_tf32 = train.precision == "fp32" and train.matmul_precision in ("high", "medium")
    if uses_tf32 and (tf32 := device.peak("tf32")):
        return tf32
    return precision_peak(train.precision, device)


def precision_peak(precision: str, device: Device) -> float:
    """FLOP/s of `train.precision` without TF32, which attention does not use."""
    if (peak := device.peak(precision)) is None:
        known = (repr(p) for p in device.flops if p in ("fp16", "fp32", "bf16"))
        raise UserError(
            f"train.precision = {precision!r} is not supported by {device.title}: use "
            f"{' or '.join(known)}"
        )
    return peak


def block_products(
    run: Run, tokens: float, tensor: int, device: Device, rates: RunRates
) -> tuple[float, float, float]:
    """Seconds of the linear layers of the average block: forward, backward, and casts to fp8."""
    model, freeze = run.model, run.train.freeze
    peak, casts = product_peak(run.train, device), 0.0
    if run.train.fp8:
        if (fp8 := device.peak("fp8")) is None:
            raise UserError(f"train.fp8 = true is not supported by {device.title}: use false")
        peak, features = fp8, sum(i + o for i, o in linear_sizes(model).values())
        moved = rates.fp8_traffic * tokens * features
        casts = moved / (device.bandwidth * rates.bandwidth)
        rates = replace(rates, matmul=rates.fp8_matmul)
    forward = backward = 0.0
    are_same = model.linear == "dense" and not model.lora.rank and not freeze
    same = model.layers if are_same else 1  # blocks that have the same layers
    for block in range(0, model.layers, same):
        for name, (into, out) in linear_sizes(model).items():
            # Split by rows after the attention and the activation function, else by columns.
            splits_input = name in ("attention.out", "mlp.down")
            i, o = (into / tensor, out) if splits_input else (into, out / tensor)
            rank = rank_of(model, f"blocks.{block}.{name}", into, out) * model.sketch.terms
            if not rank:
                product = matmul_s(tokens, o, i, peak, rates)
                # A frozen weight has no gradient.
                is_trained = trains(model, freeze, f"blocks.{block}.{name}.weight")
                gradients = 2 if is_trained else 1
                forward, backward = forward + same * product, backward + gradients * same * product
                rank = lora_rank_of(model, f"blocks.{block}.{name}")
            if not rank:
                continue
            product = matmul_s(tokens, float(rank), i, peak, rates)
            product += matmul_s(tokens, o, float(rank), peak, rates)
            # Fixed factors of a sketch double the products, and have no gradient.
            forward += product * (2 if model.linear == "sketched" else 1)
            backward += product * (3 if model.linear == "sketched" else 2)
    return forward / model.layers, backward / model.layers, casts
