"""What must hold between the values of a run file, and what to change where it does not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

from longspan.checks import backend_problem, block_problem, branch_problems, layout_problems
from longspan.config import (
    BLOCK_SPARSE,
    BLOCK_SPARSE_KEYS,
    DILATED,
    DILATED_KEYS,
    WINDOW_KEYS,
    Attention,
    Data,
    Engine,
    Layout,
    Model,
    Profile,
    Rope,
    Section,
    Sketch,
    Track,
    Train,
)
from longspan.costs import linear_sizes


@dataclass(frozen=True)
class Problem:
    """One problem of a run file: the key, and what to change. The message follows the key."""

    path: str
    message: str


Problems = Iterator[Problem]


def _model_rules(model: Model) -> Problems:
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


def _family_rules(model: Model) -> Problems:
    for key, families in BIASES.items():
        if getattr(model, key) and model.family not in families:
            *others, last = (f'"{family}"' for family in families)
            names = " or ".join(filter(None, [", ".join(others), last]))
            message = f'true is not supported with model.family = "{model.family}"'
            yield Problem(f"model.{key}", f"{message}: use false, or the family {names}")
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


def _sketch_rules(model: Model) -> Problems:
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


def attention_rules(attention: Attention) -> Problems:
    kind = attention.kind
    keys = (DILATED, DILATED_KEYS), (BLOCK_SPARSE, BLOCK_SPARSE_KEYS), (("window",), WINDOW_KEYS)
    for key in chain.from_iterable(keys for kinds, keys in keys if kind not in kinds):
        if getattr(attention, key):
            message = f'has no effect with attention.kind = "{kind}": remove it'
            yield Problem(f"attention.{key}", message)
    if kind in DILATED:
        for message in branch_problems(attention.segment_lengths, attention.dilation_rates):
            yield Problem("attention.segment_lengths", message)
    if kind == "window" and not attention.window:
        yield Problem("attention.window", "expected at least 1 token, got 0: set it")
    if kind in BLOCK_SPARSE:
        for key in ("local_window", "global_tokens"):
            if problem := block_problem(getattr(attention, key), attention.block_size):
                yield Problem(f"attention.{key}", problem)


def _train_rules(train: Train) -> Problems:
    if train.global_batch % train.micro_batch:
        above = math.ceil(train.global_batch / train.micro_batch) * train.micro_batch
        yield Problem(
            "train.global_batch",
            f"{train.global_batch} is not a multiple of train.micro_batch = {train.micro_batch}: "
            f"use {above}",
        )
    if train.lr_scaling != "none" and train.base_batch is None:
        yield Problem(
            "train.base_batch",
            f'is required by train.lr_scaling = "{train.lr_scaling}": set the global batch at '
            f"which train.lr = {train.lr} was tuned",
        )
    if train.schedule == "wsd" and train.decay_steps is None:
        message = f'is required by train.schedule = "wsd": set it, such as {train.steps // 5 or 1}'
        yield Problem("train.decay_steps", message)
    elif train.schedule == "wsd" and (
        train.warmup_steps <= train.steps < train.warmup_steps + (train.decay_steps or 0)
    ):
        yield Problem(
            "train.decay_steps",
            f"{train.decay_steps} + train.warmup_steps = {train.warmup_steps} is more than "
            f"train.steps = {train.steps}: lower one of them or raise train.steps",
        )
    if train.precision == "fp16" and train.device == "cpu":
        message = '"fp16" needs a GPU, but train.device is "cpu": use "fp32"'
        yield Problem("train.precision", message)


def _init_from_rules(model: Model, train: Train) -> Problems:
    if train.init_from and model.linear != "dense":
        yield Problem(
            "train.init_from",
            f'needs dense layers, but model.linear is "{model.linear}": set model.linear = "dense" '
            "and convert the trained run with longspan sketch",
        )


def _factory_rules(model: Model, train: Train) -> Problems:
    module, _, name = model.factory.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        message = f'expected "package.module:function", got "{model.factory}"'
        yield Problem("model.factory", message)
    if train.init_from:
        message = "is not supported with model.factory: load the weights in the factory"
        yield Problem("train.init_from", message)


def _documents_rules(model: Model, data: Data) -> Problems:
    if data.documents == "isolate" and model.rope.type == "dynamic":
        yield Problem(
            "data.documents",
            '"isolate" is not supported with model.rope.type = "dynamic", whose angles depend on '
            "the length of the sequence: use join or another scaling",
        )


def _recall_rules(model: Model, data: Data) -> Problems:
    if data.source != "recall":
        return
    pairs, keys = data.recall_pairs, model.vocab // 2
    if data.documents == "isolate":
        message = (
            '"isolate" needs documents, and a sample of data.source = "recall" is one: use join'
        )
        yield Problem("data.documents", message)
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


def _decoder_layout_rules(
    layout: Layout, model: Model, data: Data, train: Train, world: int
) -> Problems:
    """What a layout asks of the decoder."""
    if layout_problems(layout.ranks(), world):
        return
    ranks = layout.resolve(world)
    tensor = ranks["tensor"]
    if ranks["pipeline"] > 1:
        stages = ranks["pipeline"] * layout.stages_per_rank
        if model.layers < stages:
            yield Problem(
                "layout.pipeline",
                f'{ranks["pipeline"]} ranks with layout.schedule = "{layout.schedule}" need '
                f"{stages} layers, but model.layers is {model.layers}: use at most "
                f"{model.layers // layout.stages_per_rank}",
            )
        yield from _pipeline_problems(layout, ranks, train)
        if layout.schedule == "zbv":
            yield from _zbv_problems(layout, ranks, train)
    if data.context % ranks["sequence"]:
        yield Problem(
            "layout.sequence",
            f"{ranks['sequence']} does not divide data.context = {data.context}: "
            "change one of them",
        )
    for key in ("heads", "kv_heads", "ffn", "vocab"):
        if (size := getattr(model, key)) % tensor:
            message = f"{tensor} does not divide model.{key} = {size}: change one of them"
            yield Problem("layout.tensor", message)
    if layout.megatron_sequence_parallel and tensor > 1:
        tokens = data.context // ranks["sequence"]
        if model.linear != "dense":
            yield Problem(
                "layout.megatron_sequence_parallel",
                f'has no effect with model.linear = "{model.linear}", which splits activations '
                "along features: use false",
            )
        if tokens % tensor:
            yield Problem(
                "layout.tensor",
                f"{tensor} does not divide the {tokens} tokens of a rank: change data.context or "
                "set layout.megatron_sequence_parallel = false",
            )


def _module_layout_rules(layout: Layout, model: Model, train: Train, world: int) -> Problems:
    """What a model of the user's own cannot be split by."""
    if layout_problems(layout.ranks(), world):
        return
    ranks = layout.resolve(world)
    if ranks["sequence"] > 1:
        yield Problem(
            "layout.sequence",
            f"{ranks['sequence']} is not supported with model.factory: use 1, and give "
            "sequence_parallel=group to the attention modules of the model",
        )
    if ranks["pipeline"] > 1:
        yield from _pipeline_problems(layout, ranks, train)
    if ranks["pipeline"] > 1 and (layout.schedule == "zbv" or ranks["tensor"] > 1):
        yield Problem(
            "layout.pipeline",
            f'{ranks["pipeline"]} with layout.tensor or layout.schedule = "zbv" is not supported '
            'with model.factory: use layout.tensor = 1 and "1f1b"',
        )
    if layout.megatron_sequence_parallel:
        message = "is not supported with model.factory: use false, and say it in the task's plan"
        yield Problem("layout.megatron_sequence_parallel", message)


def _layout_rules(layout: Layout, train: Train, world: int) -> Problems:
    if problems := layout_problems(layout.ranks(), world):
        yield from (Problem("layout", message) for message in problems)
        return
    ranks, precision = layout.resolve(world), train.precision
    if layout.zero == 0 and ranks["sequence"] > 1:
        message = "0 is not supported with layout.sequence, which shards parameters: use 1, 2 or 3"
        yield Problem("layout.zero", message)
    if layout.gradient_compression == "powersgd" and not 1 < ranks["replicate"] == world:
        yield Problem(
            "layout.gradient_compression",
            '"powersgd" needs layout.replicate as the only axis, but it has '
            f'{ranks["replicate"]} of {world} ranks: use "none" or "bf16"',
        )
    reduce_ranks = ranks["replicate"] * ranks["shard"] * ranks["sequence"]
    if layout.gradient_compression == "bf16" and reduce_ranks == 1:
        yield Problem(
            "layout.gradient_compression",
            '"bf16" has no effect, because no ranks reduce gradients: use "none", or set '
            "layout.replicate, layout.shard or layout.sequence > 1",
        )
    if precision == "fp16" and layout.gradient_compression == "powersgd":
        yield Problem(
            "layout.gradient_compression",
            '"powersgd" is not supported with train.precision = "fp16", whose overflows would stay '
            'in its error feedback: use "none"',
        )
    if layout.offload and ranks["shard"] * ranks["sequence"] == 1:
        yield Problem(
            "layout.offload",
            "true needs sharded parameters, but layout.shard is 1: set layout.shard > 1 or "
            "layout.offload = false",
        )
    if problem := backend_problem(layout.backend, train.device, ranks):
        yield Problem("layout.backend", problem)
    data_parallel = ranks["replicate"] * ranks["shard"]
    per_pass = train.micro_batch * data_parallel
    if train.global_batch % train.micro_batch == 0 and train.global_batch % per_pass:
        yield Problem(
            "train.global_batch",
            f"{train.global_batch} is not a multiple of train.micro_batch = {train.micro_batch} × "
            f"{data_parallel} data-parallel ranks: "
            f"use {math.ceil(train.global_batch / per_pass) * per_pass}",
        )


def _pipeline_problems(layout: Layout, ranks: Mapping[str, int], train: Train) -> Problems:
    depth = ranks["pipeline"]
    per_pass = train.micro_batch * ranks["replicate"] * ranks["shard"]
    micro_batches = train.global_batch // per_pass
    is_interleaved = layout.schedule == "interleaved"
    if micro_batches < depth or (is_interleaved and micro_batches % depth):
        yield Problem(
            "train.global_batch",
            f'layout.schedule = "{layout.schedule}" needs '
            f"{'a multiple of' if is_interleaved else 'at least'} {depth} micro-batches per "
            f"data-parallel rank, got {micro_batches}: "
            f"use {max(1, micro_batches // depth) * depth * per_pass}",
        )


def _zbv_problems(layout: Layout, ranks: Mapping[str, int], train: Train) -> Problems:
    """Return what the ZBV schedule, which splits each backward pass in two, does not support."""
    is_sequence_parallel = ranks["sequence"] > 1
    if layout.zero == 3 and (ranks["shard"] > 1 or is_sequence_parallel):
        yield Problem(
            "layout.zero",
            '3 is not supported with layout.schedule = "zbv", which needs unsharded parameters '
            "from the forward pass to the weight gradients: use 2",
        )
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        yield Problem(
            "layout.schedule",
            f'"zbv" needs torch 2.13, but torch is {version("torch")}, which cannot split the '
            'backward pass of a Python autograd function: use "interleaved"',
        )
    mode = train.activation_checkpointing
    if mode == "selective" or (mode == "full" and is_sequence_parallel):
        yield Problem(
            "train.activation_checkpointing",
            f'"{mode}" is not supported with layout.schedule = "zbv", which needs the saved '
            f'activations twice: use "{"none" if is_sequence_parallel else "full"}"',
        )
    if train.compile is True:
        message = (
            'true is not supported with layout.schedule = "zbv", which splits the backward pass'
        )
        yield Problem("train.compile", f"{message}: use false")


def _engine_rules(engine: Engine, layout: Layout, train: Train, world: int) -> Problems:
    # Keys of other engines are allowed with "native", so that one file works with every engine.
    if engine.name == "native" or layout_problems(layout.ranks(), world):
        return
    name, ranks = engine.name, layout.resolve(world)
    for axis in ("sequence", "tensor", "pipeline"):
        if ranks[axis] > 1:
            yield Problem(
                f"layout.{axis}",
                f'{ranks[axis]} is not supported with engine.name = "{name}", which only '
                f'replicates and shards: set engine.name = "native" or layout.{axis} = 1',
            )
    if ranks["replicate"] > 1 and ranks["shard"] > 1:
        yield Problem(
            "layout.replicate",
            f'{ranks["replicate"]} is not supported with engine.name = "{name}" and layout.shard = '
            f"{ranks['shard']}: use 1",
        )
    if layout.backend != "auto":
        yield Problem(
            "layout.backend",
            f'"{layout.backend}" needs engine.name = "native", since "{name}" chooses by device: '
            'use "auto"',
        )
    if layout.offload:
        other = ", and set engine.offload_optimizer and engine.offload_param"
        yield Problem(
            "layout.offload",
            'true needs engine.name = "native": use false' + (other if name == "deepspeed" else ""),
        )
    if name == "accelerate" and ranks["shard"] > 1 and engine.mode == "plain":
        yield Problem(
            "engine.mode",
            f'"plain" only replicates, but layout.shard is {ranks["shard"]}: use "fsdp2", or set '
            "layout.zero = 0",
        )
    if name == "accelerate" and ranks["replicate"] > 1 and engine.mode in ("fsdp2", "deepspeed"):
        yield Problem(
            "engine.mode",
            f'"{engine.mode}" shards, but layout.replicate is {ranks["replicate"]}: use "plain", '
            "or set layout.shard",
        )
    if name == "deepspeed" or engine.mode == "deepspeed":
        yield from _deepspeed_problems(engine, layout, train, ranks)


def _deepspeed_problems(
    engine: Engine, layout: Layout, train: Train, ranks: Mapping[str, int]
) -> Problems:
    stage = layout.zero if ranks["replicate"] == 1 else 0
    if layout.gradient_compression == "powersgd":
        message = '"powersgd" is not supported with DeepSpeed: use "none" or "bf16"'
        yield Problem("layout.gradient_compression", message)
    if train.optimizer != "adamw":
        message = f'"{train.optimizer}" needs engine.name = "native": use "adamw"'
        yield Problem("train.optimizer", message)
    if train.compile is True and stage == 3:
        message = "true is not supported with DeepSpeed's ZeRO-3 hooks inside the blocks: use false"
        yield Problem("train.compile", message)
    if train.activation_checkpointing == "selective" and stage == 3:
        # The decoder fails in its backward pass, and gradients of other models were wrong.
        message = '"selective" is not supported with DeepSpeed and ZeRO-3: use "full" or ZeRO-2'
        yield Problem("train.activation_checkpointing", message)
    for key, min_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        target = getattr(engine, key)
        needed = 3 if target == "nvme" else min_stage
        if target != "none" and stage < needed:
            message = f'"{target}" needs layout.zero >= {needed}, but the ZeRO stage is {stage}'
            yield Problem(f"engine.{key}", f'{message}: raise it or use "none"')
    if "nvme" in (engine.offload_optimizer, engine.offload_param) and not engine.nvme_path:
        yield Problem("engine.nvme_path", 'is required by "nvme": set a folder on a fast disk')


def _track_rules(train: Train, track: Track, engine: Engine) -> Problems:
    if twice := sorted({name for name in track.sinks if track.sinks.count(name) > 1}):
        yield Problem("track.sinks", f"has {', '.join(twice)} more than once: list it once")
    profile = track.profile
    if not profile.active and profile != Profile():
        message = "0 profiles no step, so that the other keys of the table have no effect"
        yield Problem("track.profile.active", f"{message}: set it to 3, or remove them")
    if profile.steps > train.steps:
        yield Problem(
            "track.profile",
            f"takes {profile.steps:,} steps, (wait + warmup + active) × repeat, but the run has "
            f"train.steps = {train.steps:,}: lower one of them",
        )
    by_accelerate = engine.name == "accelerate" and engine.mode == "deepspeed"
    if track.per_layer_norms and (engine.name == "deepspeed" or by_accelerate):
        yield Problem(
            "track.per_layer_norms",
            "true is not supported with DeepSpeed, which keeps gradients in partitions of its own: "
            'use false, or engine.name = "native"',
        )


RULES: tuple[Callable[..., Problems], ...] = (
    _train_rules,
    _layout_rules,
    _engine_rules,
    _track_rules,
)
DECODER_RULES: tuple[Callable[..., Problems], ...] = (
    _model_rules,
    _family_rules,
    _sketch_rules,
    attention_rules,
    _init_from_rules,
    _documents_rules,
    _recall_rules,
    _decoder_layout_rules,
)
MODULE_RULES: tuple[Callable[..., Problems], ...] = (_factory_rules, _module_layout_rules)


def check_rules(sections: Mapping[str, Section], world: int | None) -> list[Problem]:
    """Return the problems of every rule whose sections are valid; `world` is the process count."""
    known: dict[str, Any] = {**sections, **({} if world is None else {"world": world})}
    problems: list[Problem] = []
    for rule in _rules_of(sections):
        needs = _needs(rule)
        if needs <= known.keys():
            problems += rule(**{name: known[name] for name in needs})
    return problems


def first_layout_problem(sections: Mapping[str, Section], world: int) -> Problem | None:
    """Return the first problem of those rules that depend on the number of processes.

    Of a run whose other rules hold, this is what a search for a layout asks thousands of times.
    """
    known: dict[str, Any] = {**sections, "world": world}
    for rule in _rules_of(sections):
        needs = _needs(rule)
        if "world" in needs:
            for problem in rule(**{name: known[name] for name in needs}):
                return problem
    return None


def _rules_of(sections: Mapping[str, Section]) -> tuple[Callable[..., Problems], ...]:
    model = sections.get("model")
    has_factory = isinstance(model, Model) and bool(model.factory)
    return (*(MODULE_RULES if has_factory else DECODER_RULES), *RULES)


@cache
def _needs(rule: Callable[..., Problems]) -> frozenset[str]:
    return frozenset(inspect.signature(rule).parameters)
