"""What must hold between the values of [model], [attention] and [data]."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from longspan.checks import block_problem, branch_problems
from longspan.config import (
    BLOCK_SPARSE,
    BLOCK_SPARSE_KEYS,
    DILATED,
    DILATED_KEYS,
    WINDOW_KEYS,
    Attention,
    Data,
    Engine,
    LayerAttention,
    Lora,
    Model,
    Rope,
    Sketch,
    Train,
    attention_keys,
)
from longspan.costs import linear_sizes, named_shapes, trains
from longspan.rules.problem import Problem, Problems
from longspan.wording import did_you_mean, toml_value


def model_rules(model: Model) -> Problems:
    hidden, heads = model.hidden, model.heads
    if model.head_dim == 0 and hidden % heads:
        above = math.ceil(hidden / heads / 2) * heads * 2
        yield Problem(
            "model.heads",
            f"{heads} does not divide model.hidden = {hidden}: use "
            f"{_largest_divisor(hidden, heads)}, or set model.hidden = {above} or model.head_dim",
        )
    elif model.head_dim * heads == hidden and model.head_dim % 2:
        yield Problem(
            "model.heads",
            f"hidden / heads = {model.head_dim} must be even for RoPE: "
            f"change model.heads = {heads} or model.hidden = {hidden}",
        )
    elif model.head_dim == 0 or model.head_dim % 2:
        message = f"must be positive and even for RoPE, got {model.head_dim}"
        yield Problem("model.head_dim", f"{message}: use {max(2, model.head_dim + 1)}")
    if heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"{model.kv_heads} does not divide model.heads = {heads}: "
            f"use {_largest_divisor(heads, model.kv_heads)}",
        )


MAX_BLOCKS = 1 << 20
"""Blocks of a block-sparse pattern in a context: they are counted and listed."""

BIASES = {"attention_bias": ("llama", "qwen3", "gemma"), "mlp_bias": ("llama",)}
"""The families whose models may have each kind of bias."""

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_context"),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_context", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""The keys of [model.rope] that have an effect, by its type."""


def family_rules(model: Model) -> Problems:
    for key, families in BIASES.items():
        if getattr(model, key) and model.family not in families:
            *others, last = (f'"{family}"' for family in families)
            names = " or ".join(filter(None, [", ".join(others), last]))
            message = f'true is not supported with model.family = "{model.family}"'
            yield Problem(f"model.{key}", f"{message}: use false, or the family {names}")
    if model.family == "gemma" and model.activation == "gelu":
        message = '"gelu" is not supported with model.family = "gemma", for which transformers'
        yield Problem("model.activation", f'{message} computes "gelu_tanh": use "gelu_tanh"')
    rope, default = model.rope, Rope()
    for key in Rope.model_fields:
        is_used = key == "type" or key in ROPE_KEYS[rope.type]
        if not is_used and getattr(rope, key) != getattr(default, key):
            message = f'has no effect with model.rope.type = "{rope.type}": remove it'
            yield Problem(f"model.rope.{key}", message)
    if "original_context" in ROPE_KEYS[rope.type] and rope.original_context is None:
        message = f'is required by model.rope.type = "{rope.type}"'
        yield Problem("model.rope.original_context", f"{message}: set the context before scaling")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        below, above = getattr(rope, low), getattr(rope, high)
        if below >= above:
            message = f"{above:g} must be greater than model.rope.{low} = {below:g}: change one"
            yield Problem(f"model.rope.{high}", message)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` up to `limit` (and up to 1024, to stay fast)."""
    return max(n for n in range(1, min(limit, number, 1024) + 1) if number % n == 0)


def sketch_rules(model: Model) -> Problems:
    sketch = model.sketch
    if model.linear == "dense":
        if sketch != Sketch():
            message = 'has no effect with model.linear = "dense": remove it, or set model.linear'
            yield Problem("model.sketch", message)
        return
    if model.linear == "low_rank" and sketch.terms > 1:
        message = f'{sketch.terms} is not supported with model.linear = "low_rank": remove it'
        yield Problem("model.sketch.terms", message)
    globs = {"model.sketch.layers": sketch.layers}
    globs |= {f"model.sketch.ranks.{glob}": glob for glob in sketch.ranks}
    blocks = range(min(model.layers, 1024))  # enough to find a typo
    names = [f"blocks.{index}.{layer}" for index in blocks for layer in linear_sizes(model)]
    for path, glob in globs.items():
        if not any(fnmatchcase(name, glob) for name in names):
            message = f"{glob!r} matches no linear layer: use names such as {names[0]}"
            yield Problem(path, message)


def lora_rules(model: Model, train: Train, engine: Engine) -> Problems:
    lora = model.lora
    if not lora.rank:
        if lora != Lora():
            message = "has no effect with model.lora.rank = 0: set the rank, or remove it"
            yield Problem("model.lora", message)
        return
    if model.linear != "dense":
        message = f'needs dense layers, but model.linear is "{model.linear}": set it to "dense"'
        yield Problem("model.lora.rank", message)
    if engine.name != "native":
        message = f'needs engine.name = "native", but it is "{engine.name}": set it, or use rank 0'
        yield Problem("model.lora.rank", message)
    if train.optimizer == "muon":
        message = '"muon" is not supported with model.lora, whose factors it would orthogonalise'
        yield Problem("train.optimizer", f'{message}: use "adamw"')
    blocks = range(min(model.layers, 1024))
    names = [f"blocks.{index}.{layer}" for index in blocks for layer in linear_sizes(model)]
    if not any(fnmatchcase(name, lora.layers) for name in names):
        message = f"{lora.layers!r} matches no linear layer: use names such as {names[0]}"
        yield Problem("model.lora.layers", message)


def attention_rules(attention: Attention) -> Problems:
    if not attention.layers:
        yield from _pattern_rules(attention, "attention")
        return
    used = {key for kind in attention.kinds for key in attention_keys(kind)}
    for key in (*DILATED_KEYS, *BLOCK_SPARSE_KEYS, *WINDOW_KEYS):
        if getattr(attention, key) and key not in used:
            message = "has no effect, as no table of attention.layers has a kind that uses it"
            yield Problem(f"attention.{key}", f"{message}: remove it")
    for index, layer in enumerate(attention.layers):
        yield from _pattern_rules(layer, f"attention.layers.{index}")


def _pattern_rules(attention: LayerAttention, path: str) -> Problems:
    kind = attention.kind
    for key in (*DILATED_KEYS, *BLOCK_SPARSE_KEYS, *WINDOW_KEYS):
        if getattr(attention, key) and key not in attention_keys(kind):
            message = f'has no effect with {path}.kind = "{kind}": remove it'
            yield Problem(f"{path}.{key}", message)
    if kind in DILATED:
        for message in branch_problems(attention.segment_lengths, attention.dilation_rates):
            yield Problem(f"{path}.segment_lengths", message)
    if kind == "window" and not attention.window:
        yield Problem(f"{path}.window", "expected at least 1 token, got 0: set it")
    if kind in BLOCK_SPARSE:
        for key in ("local_window", "global_tokens"):
            if problem := block_problem(getattr(attention, key), attention.block_size):
                yield Problem(f"{path}.{key}", problem)


def blocks_rules(attention: Attention, data: Data) -> Problems:
    for layer in attention.cycle:
        if layer.kind in BLOCK_SPARSE and data.context > MAX_BLOCKS * layer.block_size:
            message = f"has more than {MAX_BLOCKS:,} blocks of attention.block_size"
            yield Problem(
                "data.context", f"{message} = {layer.block_size}: raise that, or lower it"
            )
            return


def layers_rules(model: Model, attention: Attention) -> Problems:
    if attention.layers and (count := len(attention.cycle)) > model.layers:
        yield Problem(
            "attention.layers",
            f"describes {count} layers, but model.layers is {model.layers}: remove tables or lower "
            "their repeat",
        )


def init_from_rules(model: Model, train: Train) -> Problems:
    if train.init_from and model.linear != "dense":
        yield Problem(
            "train.init_from",
            f'needs dense layers, but model.linear is "{model.linear}": set model.linear = "dense" '
            "and convert the trained run with longspan sketch",
        )


def optimizer_rules(model: Model, train: Train) -> Problems:
    if train.optimizer == "muon" and model.linear != "dense":
        yield Problem(
            "train.optimizer",
            f'"muon" needs dense layers, but model.linear is "{model.linear}", whose factors it '
            'would orthogonalise: use "adamw"',
        )


def freeze_rules(model: Model, train: Train, engine: Engine) -> Problems:
    if not train.freeze:
        return
    if model.lora.rank:
        message = "has no effect with model.lora, which trains its updates alone: remove it"
        yield Problem("train.freeze", message)
        return
    if engine.offload_param == "nvme":
        message = 'is not supported with engine.offload_param = "nvme": use "cpu", or remove it'
        yield Problem("train.freeze", message)
    layers = min(model.layers, 1024)  # enough to find a typo
    names = [name for name, _ in named_shapes(model.model_copy(update={"layers": layers}))]
    for glob in train.freeze:
        if not any(fnmatchcase(name, glob) for name in names):
            near = did_you_mean(glob, names) or f": use names such as {names[0]} and {names[1]}"
            yield Problem("train.freeze", f"{glob!r} matches no parameter{near}")
    if not any(trains(model, train.freeze, name) for name in names):
        message = f"{toml_value(train.freeze)} matches every parameter: leave some to train"
        yield Problem("train.freeze", message)


def factory_rules(model: Model, train: Train) -> Problems:
    module, _, name = model.factory.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        message = f'expected "package.module:function", got "{model.factory}"'
        yield Problem("model.factory", message)
    if train.init_from:
        message = "is not supported with model.factory: load the weights in the factory"
        yield Problem("train.init_from", message)
    if train.optimizer == "muon":
        message = '"muon" is not supported with model.factory: give the task an optimizer of yours'
        yield Problem("train.optimizer", message)
    if train.chunk_tokens or train.has_auto_chunks:
        message = "is not supported with model.factory, of whose attention we know nothing: use 0"
        yield Problem("train.chunk_tokens", message)
    if train.z_loss:
        message = "is not supported with model.factory: add it to the task's loss"
        yield Problem("train.z_loss", message)
    if train.residual_precision != "fp32":
        message = 'is not supported with model.factory, whose blocks decide it: use "fp32"'
        yield Problem("train.residual_precision", message)
    if train.recompute_layers is not None:
        message = (
            "is not supported with model.factory, of whose layers we know little: leave it out"
        )
        yield Problem("train.recompute_layers", message)
    if train.mlp_tile_tokens:
        message = "is not supported with model.factory: tile its MLPs in the factory, and use 0"
        yield Problem("train.mlp_tile_tokens", message)
    if train.parameter_precision != "fp32":
        message = 'is not supported with model.factory: use "fp32"'
        yield Problem("train.parameter_precision", message)
    if train.fp8:
        message = "true is not supported with model.factory: convert its layers in the factory"
        yield Problem("train.fp8", message)
    if train.cuda_graphs is True:
        message = "true is not supported with model.factory: use false"
        yield Problem("train.cuda_graphs", message)
    if train.ema:
        message = "is not supported with model.factory: average in the task's optimizer"
        yield Problem("train.ema", message)
    if train.freeze:
        message = "is not supported with model.factory: call requires_grad_(False) in the factory"
        yield Problem("train.freeze", message)


def documents_rules(model: Model, data: Data) -> Problems:
    if data.isolates and model.rope.type == "dynamic":
        yield Problem(
            "data.documents",
            '"isolate" is not supported with model.rope.type = "dynamic", whose angles depend on '
            "the length of the sequence: use join or another scaling",
        )


def recall_rules(model: Model, data: Data) -> Problems:
    if data.source != "recall" or data.mix is not None:
        return
    pairs, keys = data.recall_pairs, model.vocab // 2
    if model.vocab < 16:
        message = f'{model.vocab} is too small for data.source = "recall": use at least 16'
        yield Problem("model.vocab", message)
    if data.context < 4 * pairs + 2:
        yield Problem(
            "data.context",
            f"{data.context} is too short: {pairs} recall pairs need at least {4 * pairs + 2}; "
            "raise it or lower data.recall_pairs",
        )
    if pairs > keys:
        yield Problem(
            "data.recall_pairs",
            f"{pairs} is more than the {keys} keys that model.vocab = {model.vocab} has: "
            "lower it or raise model.vocab",
        )
