"""Parameters and FLOPs of linear layers, and the parameters of a model. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from longspan.config import Model, Train

Shape = tuple[int, ...]
ADAPTERS = (".lora_a", ".lora_b")


def rank_for(in_features: int, out_features: int, keep: float) -> int:
    """Return the largest rank at which a layer stores at most `keep` of a dense layer's parameters.

    Ranks from 256 on are multiples of 8, so that rows of 16-bit factors are aligned to 16 bytes,
    as the fast matrix products of GPUs need.
    """
    full = in_features * out_features / (in_features + out_features)
    rank = int(keep * full + 1e-9)  # 0.58 · 50 is slightly less than 29 in floating point
    return rank if rank < 256 else rank - rank % 8


@dataclass(frozen=True)
class Cost:
    """Parameters and FLOPs of a linear layer without its bias."""

    stored: int
    """Trained parameters, which a checkpoint stores."""
    forward: int
    """FLOPs per token of the forward pass."""
    backward: int
    """FLOPs per token of the backward pass: gradients of the input and of the parameters."""

    @staticmethod
    def dense(in_features: int, out_features: int) -> Cost:
        size = in_features * out_features
        return Cost(size, 2 * size, 4 * size)

    @staticmethod
    def low_rank(in_features: int, out_features: int, rank: int) -> Cost:
        size = rank * (in_features + out_features)
        return Cost(size, 2 * size, 4 * size)

    @staticmethod
    def sketched(in_features: int, out_features: int, rank: int) -> Cost:
        """Return the cost for `rank` summed over all terms; the fixed factors get no gradient."""
        size = rank * (in_features + out_features)
        return Cost(size, 4 * size, 6 * size)

    def excess_over(self, other: Cost) -> list[str]:
        """List in what this cost exceeds `other`, with both figures."""
        figures = [
            ("stores", self.stored, other.stored, "parameters"),
            ("computes", self.forward, other.forward, "FLOPs per token forward"),
            (
                "computes",
                self.forward + self.backward,
                other.forward + other.backward,
                "FLOPs per token in training",
            ),
        ]
        return [
            f"{verb} {ours:,} {what} where nn.Linear has {theirs:,}"
            for verb, ours, theirs, what in figures
            if ours > theirs
        ]

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.stored + other.stored,
            self.forward + other.forward,
            self.backward + other.backward,
        )


def linear_sizes(model: Model) -> dict[str, tuple[int, int]]:
    """In and out features of a block's linear layers, by name."""
    q_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "attention.query": (model.hidden, q_dim),
        "attention.key": (model.hidden, kv_dim),
        "attention.value": (model.hidden, kv_dim),
        "attention.out": (q_dim, model.hidden),
        "mlp.gate": (model.hidden, model.ffn),
        "mlp.up": (model.hidden, model.ffn),
        "mlp.down": (model.ffn, model.hidden),
    }


def rank_of(model: Model, name: str, in_features: int, out_features: int) -> int:
    """The rank of each term of the linear layer `name` (blocks.3.mlp.up), 0 if it is dense.

    The first glob of `sketch.ranks` that matches wins.
    """
    sketch = model.sketch
    if model.linear == "dense" or not fnmatchcase(name, sketch.layers):
        return 0
    matching = (rank for glob, rank in sketch.ranks.items() if fnmatchcase(name, glob))
    rank = next(matching, sketch.rank)
    if rank is not None:
        return rank
    return max(1, rank_for(in_features, out_features, sketch.keep) // sketch.terms)


def lora_rank_of(model: Model, name: str) -> int:
    """The rank of the trained update of the linear layer `name` (blocks.3.mlp.up), 0 without."""
    return model.lora.rank if fnmatchcase(name, model.lora.layers) else 0


def block_shapes(model: Model, block: int) -> dict[str, Shape]:
    """The shapes of a block's parameters, by their names in it."""
    norms = {"attention_norm": model.hidden, "mlp_norm": model.hidden}
    if model.sub_layer_norm:
        norms |= {"attention.norm": model.heads * model.head_dim, "mlp.norm": model.ffn}
    if model.qk_norm:
        norms |= {f"attention.{name}_norm": model.head_dim for name in ("query", "key")}
    shapes: dict[str, Shape] = {f"{name}.weight": (width,) for name, width in norms.items()}
    if model.learnable_sinks:
        shapes["attention.sinks"] = (model.heads,)
    for name, (inputs, outputs) in linear_sizes(model).items():
        rank = rank_of(model, f"blocks.{block}.{name}", inputs, outputs)
        rank *= model.sketch.terms if model.linear == "sketched" else 1
        if rank:
            shapes |= {f"{name}.s1": (inputs, rank), f"{name}.s2": (rank, outputs)}
        else:
            shapes[f"{name}.weight"] = (outputs, inputs)
        if model.has_bias(name):
            shapes[f"{name}.bias"] = (outputs,)
        if lora := lora_rank_of(model, f"blocks.{block}.{name}"):
            shapes |= {f"{name}.lora_a": (lora, inputs), f"{name}.lora_b": (outputs, lora)}
    return shapes


def named_shapes(model: Model) -> Iterator[tuple[str, Shape]]:
    """The name and shape of every parameter of a model."""
    yield "embedding.weight", (model.vocab, model.hidden)
    for block in range(model.layers):
        for name, shape in block_shapes(model, block).items():
            yield f"blocks.{block}.{name}", shape
    yield "norm.weight", (model.hidden,)
    if not model.tie_embeddings:
        yield "head.weight", (model.vocab, model.hidden)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of A or B of a LoRA layer."""
    return name.endswith(ADAPTERS)


def trains(model: Model, freeze: Sequence[str], name: str) -> bool:
    """Whether a parameter is trained: not if a glob of `train.freeze` matches it, with LoRA only
    if it belongs to an update.
    """
    if model.lora.rank:
        return is_adapter(name)
    return not any(fnmatchcase(name, glob) for glob in freeze)


def head_name(model: Model) -> str:
    """The name of the output head's weight."""
    return "embedding.weight" if model.tie_embeddings else "head.weight"


def count_trained(model: Model, freeze: Sequence[str]) -> int:
    """The number of parameters that are trained."""
    if not freeze:
        return count_adapters(model) or count_parameters(model)
    shapes = (shape for name, shape in named_shapes(model) if trains(model, freeze, name))
    return sum(map(math.prod, shapes))


def count_frozen_products(model: Model, freeze: Sequence[str]) -> int:
    """The elements of those matrices that a token is multiplied by and `freeze` matches."""
    if not freeze:
        return 0
    head = head_name(model)
    return sum(
        math.prod(shape)
        for name, shape in named_shapes(model)
        if len(shape) == 2 and (name == head or name.startswith("blocks."))
        if not trains(model, freeze, name)
    )


def count_adapters(model: Model) -> int:
    """The number of parameters of LoRA's updates."""
    if not model.lora.rank:
        return 0
    return sum(
        lora_rank_of(model, f"blocks.{block}.{name}") * sum(size)
        for block in range(model.layers)
        for name, size in linear_sizes(model).items()
    )


def count_parameters(model: Model) -> int:
    """The number of parameters of a model."""
    if model.linear == "dense":
        linear = model.layers * sum(i * o for i, o in linear_sizes(model).values())
    else:
        linear = linear_costs(model)[1].stored
    sizes = linear_sizes(model)
    biases = sum(out for name, (_, out) in sizes.items() if model.has_bias(name))
    q_dim = model.heads * model.head_dim
    norms = 2 * model.hidden + (q_dim + model.ffn if model.sub_layer_norm else 0)
    norms += 2 * model.head_dim if model.qk_norm else 0
    norms += model.heads if model.learnable_sinks else 0
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab * model.hidden
    rest = model.layers * (biases + norms) + model.hidden + embeddings
    return linear + rest + count_adapters(model)


def linear_costs(model: Model) -> tuple[Cost, Cost]:
    """The cost of the blocks' linear layers: if they were dense, and as they are."""
    if model.linear == "dense":  # all blocks are the same
        sizes = linear_sizes(model).values()
        dense = Cost.dense(1, model.layers * sum(i * o for i, o in sizes))
        if not model.lora.rank:
            return dense, dense
        adapters = count_adapters(model)
        frozen = Cost(0, dense.forward, dense.backward // 2)  # the gradient of its input alone
        return dense, frozen + Cost(adapters, 2 * adapters, 4 * adapters)
    dense_total = total = Cost(0, 0, 0)
    for block in range(model.layers):
        for name, size in linear_sizes(model).items():
            dense = Cost.dense(*size)
            rank = rank_of(model, f"blocks.{block}.{name}", *size) * model.sketch.terms
            form = Cost.low_rank if model.linear == "low_rank" else Cost.sketched
            dense_total += dense
            total += form(*size, rank) if rank else dense
    return dense_total, total


def checkpoint_bytes(model: Model, train: Train) -> int:
    """Bytes of a checkpoint: weights, and of those trained Adam's float32 moments and averages."""
    stored = count_adapters(model) or count_parameters(model)
    per_weight = 4 if train.parameter_precision == "fp32" else 2
    return per_weight * stored + (12 if train.ema else 8) * count_trained(model, train.freeze)
