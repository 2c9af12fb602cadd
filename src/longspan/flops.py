"""What a decoder computes and holds: FLOPs and activations, from its configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from longspan.attention import Pattern
from longspan.config import Model, Train
from longspan.constants import MUON_ITERATIONS
from longspan.costs import count_frozen_products, linear_costs, linear_sizes


class StageFlops(NamedTuple):
    """Forward FLOPs per token of the parts that pipeline stages are made of."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def stage_flops(model: Model, patterns: Sequence[Pattern], context: int) -> StageFlops:
    """Forward FLOPs per token of the embedding, of each block and of the head.

    `patterns` are those of the layers. Of linear layers that differ between blocks it is the mean.
    An embedding is looked up: it costs its row, not its matrix.
    """
    linear = linear_costs(model)[1].forward / model.layers
    attention = _by_layer(model, patterns, context)
    blocks = tuple(linear + flops / context for flops in attention)
    return StageFlops(2.0 * model.hidden, blocks, 2.0 * model.hidden * model.vocab)


def flops_per_sample(
    model: Model, patterns: Sequence[Pattern], context: int, freeze: Sequence[str] = ()
) -> tuple[float, float]:
    """Training FLOPs of one sequence: of matrix products (6 per weight and token), of attention.

    `patterns` are those of the layers.
    As is usual for MFU, the backward pass counts twice the forward pass, and recomputation does not
    count. An untied embedding is looked up, not multiplied by. The fixed factors of sketched layers
    are multiplied by, but have no gradient, nor do weights that a glob of `freeze` matches.
    """
    _, linear = linear_costs(model)
    head = 4 if model.lora.rank else 6  # a frozen weight has no gradient
    matrices = linear.forward + linear.backward + head * model.hidden * model.vocab
    matrices -= 2 * count_frozen_products(model, freeze)
    return float(matrices * context), 3.0 * sum(_by_layer(model, patterns, context))


def _by_layer(model: Model, patterns: Sequence[Pattern], context: int) -> list[int]:
    """Of each layer. Layers share their pattern, and to hash it for each would take longer."""
    shared = {id(pattern): pattern for pattern in patterns}
    flops = {key: attention_flops(model, x, context) for key, x in shared.items()}
    return [flops[id(pattern)] for pattern in patterns]


def attention_flops(model: Model, pattern: Pattern, context: int) -> int:
    """Forward FLOPs of one sequence in one layer."""
    return _attention_flops(pattern, context, model.heads, model.head_dim)


@lru_cache(maxsize=256)
def _attention_flops(pattern: Pattern, context: int, heads: int, head_dim: int) -> int:
    """Cached, since a search for a layout asks a thousand times, and to count blocks takes long."""
    return pattern.flops(context, heads, head_dim, is_causal=True)


def activation_bytes(model: Model, train: Train, width: int, tokens: float) -> float:
    """Bytes that one block saves of `tokens` for the backward pass, in round terms.

    `width`: bytes of an element in the run's precision.
    """
    stream = (4 if train.residual_precision == "fp32" else width) * model.hidden
    ffn = 0 if train.tile_of(tokens) else model.ffn  # tiles save nothing of it
    saved = {
        "none": width * (10 * model.hidden + 4 * ffn),
        "selective": width * (6 * model.hidden + 2 * ffn),
        "full": stream,  # before the block
    }
    modes = [train.checkpointing_of(block) for block in range(model.layers)]
    return tokens * sum(saved[mode] for mode in modes) / model.layers


def muon_flops(model: Model) -> float:
    """FLOPs of Muon's iterations in a step, which every rank of a pipeline stage computes."""
    sizes = [sorted(size) for size in linear_sizes(model).values()]
    one = sum(4 * short**2 * long + 2 * short**3 for short, long in sizes)
    return float(MUON_ITERATIONS * model.layers * one)
