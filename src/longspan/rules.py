"""What must hold between the values of a run file, and what to change where it does not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

from longspan.config import (
    BLOCK_SPARSE_KEYS,
    DILATED_KEYS,
    Attention,
    Data,
    Engine,
    Layout,
    Model,
    Section,
    Sketch,
    Train,
    block_problem,
    branch_problems,
    layout_problems,
)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a run file: where, and what to do about it."""

    path: str
    message: str


def _model_rules(model: Model) -> list[Problem]:
    problems = []
    if model.hidden % model.heads:
        most = min(model.heads, model.hidden, 1024)
        below = max(h for h in range(1, most + 1) if model.hidden % h == 0)
        problems.append(
            Problem(
                "model.heads",
                f"{model.heads} does not divide model.hidden = {model.hidden}: use {below}, "
                f"or hidden = {math.ceil(model.hidden / model.heads / 2) * model.heads * 2}",
            )
        )
    elif model.head_dim % 2:
        problems.append(
            Problem(
                "model.heads",
                f"hidden / heads = {model.head_dim} must be even for rotary embedding: "
                f"change model.heads = {model.heads} or model.hidden = {model.hidden}",
            )
        )
    if model.heads % model.kv_heads:
        most = min(model.kv_heads, model.heads, 1024)
        below = max(h for h in range(1, most + 1) if model.heads % h == 0)
        problems.append(
            Problem(
                "model.kv_heads",
                f"{model.kv_heads} does not divide model.heads = {model.heads}: use {below}",
            )
        )
    return problems


def _sketch_rules(model: Model) -> list[Problem]:
    sketch = model.sketch
    if model.linear == "dense":
        if sketch == Sketch():
            return []
        message = 'has no use with linear = "dense": remove it, or set model.linear'
        return [Problem("model.sketch", message)]
    problems = []
    if model.linear == "low_rank" and sketch.terms > 1:
        message = f'is {sketch.terms}, and linear = "low_rank" has one: leave it out'
        problems.append(Problem("model.sketch.terms", message))
    patterns = {"model.sketch.layers": sketch.layers}
    patterns |= {f"model.sketch.ranks.{pattern}": pattern for pattern in sketch.ranks}
    blocks = range(min(model.layers, 1024))  # more need not be looked at to find a slip
    names = [f"blocks.{index}.{layer}" for index in blocks for layer in model.linear_sizes]
    problems += [
        Problem(path, f"{pattern!r} matches no linear layer; they have names such as {names[0]}")
        for path, pattern in patterns.items()
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    return problems


def _attention_rules(attention: Attention) -> list[Problem]:
    useless = (() if attention.kind == "dilated" else DILATED_KEYS) + (
        () if attention.kind == "block_sparse" else BLOCK_SPARSE_KEYS
    )
    problems = [
        Problem(f"attention.{key}", f'has no use with kind = "{attention.kind}": remove it')
        for key in useless
        if getattr(attention, key)
    ]
    if attention.kind == "dilated":
        problems += [
            Problem("attention.segment_lengths", message)
            for message in branch_problems(attention.segment_lengths, attention.dilation_rates)
        ]
    if attention.kind == "block_sparse":
        problems += [
            Problem(f"attention.{key}", message)
            for key in ("local_window", "global_tokens")
            if (message := block_problem(getattr(attention, key), attention.block_size))
        ]
    return problems


def _train_rules(train: Train) -> list[Problem]:
    problems = []
    if train.global_batch % train.micro_batch:
        above = math.ceil(train.global_batch / train.micro_batch) * train.micro_batch
        problems.append(
            Problem(
                "train.global_batch",
                f"{train.global_batch} is not a multiple of train.micro_batch = "
                f"{train.micro_batch}: use {above}",
            )
        )
    if train.lr_scaling != "none" and train.base_batch is None:
        problems.append(
            Problem(
                "train.base_batch",
                f'is needed by lr_scaling = "{train.lr_scaling}": set the global batch at which '
                f"lr = {train.lr} was tuned",
            )
        )
    if train.schedule == "wsd" and train.decay is None:
        problems.append(
            Problem(
                "train.decay",
                f'is needed by schedule = "wsd": set its steps, such as {train.steps // 5 or 1}',
            )
        )
    elif train.schedule == "wsd" and train.warmup + (train.decay or 0) > train.steps:
        problems.append(
            Problem(
                "train.decay",
                f"warmup {train.warmup} + decay {train.decay} is more than train.steps = "
                f"{train.steps}: lower one or raise steps",
            )
        )
    if train.precision == "fp16" and train.device == "cpu":
        problems.append(
            Problem(
                "train.precision", 'is "fp16", which needs a GPU: use "fp32" with device = "cpu"'
            )
        )
    return problems


def _initial_rules(model: Model, train: Train) -> list[Problem]:
    if not train.init_from or model.linear == "dense":
        return []
    message = 'holds dense layers: train with model.linear = "dense", then use longspan sketch'
    return [Problem("train.init_from", message)]


def _recall_rules(model: Model, data: Data) -> list[Problem]:
    if data.source != "recall":
        return []
    problems = []
    if model.vocab < 16:
        problems.append(
            Problem("model.vocab", f'is {model.vocab}: source "recall" needs at least 16')
        )
    if data.context < 4 * data.recall_pairs + 2:
        problems.append(
            Problem(
                "data.context",
                f"is {data.context}: {data.recall_pairs} recall pairs need at least "
                f"{4 * data.recall_pairs + 2}; lower data.recall_pairs or raise it",
            )
        )
    if data.recall_pairs > model.vocab // 2:
        problems.append(
            Problem(
                "data.recall_pairs",
                f"is {data.recall_pairs}: a vocabulary of {model.vocab} has "
                f"{model.vocab // 2} keys; lower it or raise model.vocab",
            )
        )
    return problems


def _pipeline_problems(
    layout: Layout, ranks: Mapping[str, int], model: Model, train: Train
) -> list[Problem]:
    depth = ranks["pipeline"]
    if depth == 1:
        return []
    problems = []
    stages = depth * layout.stages_per_rank
    if model.layers < stages:
        problems.append(
            Problem(
                "layout.pipeline",
                f'{depth} ranks of schedule "{layout.schedule}" have {stages} stages, and there '
                f"are {model.layers} layers: use at most {model.layers // layout.stages_per_rank}",
            )
        )
    at_once = train.micro_batch * ranks["replicate"] * ranks["shard"]
    micro_batches = train.global_batch // at_once
    is_whole = layout.schedule != "interleaved" or micro_batches % depth == 0
    if micro_batches < depth or not is_whole:
        rounds = max(1, micro_batches // depth)
        kind = "a multiple of" if layout.schedule == "interleaved" else "at least"
        problems.append(
            Problem(
                "train.global_batch",
                f'schedule "{layout.schedule}" needs {kind} {depth} micro-batches per '
                f"data-parallel rank, got {micro_batches}: use {rounds * depth * at_once}",
            )
        )
    if layout.schedule == "zbv" and ranks["shard"] * ranks["sequence"] > 1 and layout.zero == 3:
        message = (
            'is 3, and schedule "zbv" needs parameters whole from a forward pass to its weight '
            "gradients: use 2"
        )
        problems.append(Problem("layout.zero", message))
    if layout.schedule == "zbv" and tuple(map(int, version("torch").split(".")[:2])) < (2, 13):
        message = (
            f'"zbv" needs torch 2.13, and this is {version("torch")}, which cannot take the '
            'backward pass of a function in Python apart: use "interleaved"'
        )
        problems.append(Problem("layout.schedule", message))
    chooses = train.activation_checkpointing == "selective" or (
        train.activation_checkpointing == "full" and ranks["sequence"] > 1
    )
    if layout.schedule == "zbv" and chooses:
        message = (
            f'is "{train.activation_checkpointing}", and what it keeps schedule "zbv" would need twice: use '
            f'"{"none" if ranks["sequence"] > 1 else "full"}"'
        )
        problems.append(Problem("train.activation_checkpointing", message))
    if layout.schedule == "zbv" and train.compile is True:
        message = 'has no part in schedule "zbv", which takes backward passes apart: use false'
        problems.append(Problem("train.compile", message))
    return problems


def _layout_rules(
    layout: Layout, model: Model, data: Data, train: Train, world: int
) -> list[Problem]:
    if problems := layout_problems(layout.ranks(), world):
        return [Problem("layout", message) for message in problems]
    ranks = layout.resolve(world)
    problems_found = _pipeline_problems(layout, ranks, model, train)
    if data.context % ranks["sequence"]:
        problems_found.append(
            Problem(
                "layout.sequence",
                f"{ranks['sequence']} does not divide data.context = {data.context}: change one",
            )
        )
    problems_found += [
        Problem(
            "layout.tensor",
            f"{ranks['tensor']} does not divide model.{key} = {getattr(model, key)}: change one",
        )
        for key in ("heads", "kv_heads", "ffn", "vocab")
        if getattr(model, key) % ranks["tensor"]
    ]
    if ranks["tensor"] > 1 and layout.megatron_sequence_parallel and model.linear != "dense":
        message = f'has no use with model.linear = "{model.linear}", which splits by features'
        problems_found.append(Problem("layout.megatron_sequence_parallel", f"{message}: use false"))
    if layout.zero == 0 and ranks["sequence"] > 1:
        message = "is 0, and the ranks of a sequence share parameters: use 1, 2 or 3"
        problems_found.append(Problem("layout.zero", message))
    tokens = data.context // ranks["sequence"]
    if layout.megatron_sequence_parallel and ranks["tensor"] > 1 and tokens % ranks["tensor"]:
        message = (
            f"with megatron_sequence_parallel, {ranks['tensor']} does not divide the {tokens} tokens of a rank: "
            "change data.context, or megatron_sequence_parallel = false"
        )
        problems_found.append(Problem("layout.tensor", message))
    if layout.gradient_compression != "none" and not 1 < ranks["replicate"] == world:
        message = (
            f'"{layout.gradient_compression}" has a use with layout.replicate alone: use "none"'
        )
        problems_found.append(Problem("layout.gradient_compression", message))
    if train.precision == "fp16" and ranks["tensor"] > 1:
        message = '"fp16" with layout.tensor is not there yet: use "bf16"'
        problems_found.append(Problem("train.precision", message))
    if train.precision == "fp16" and layout.gradient_compression == "powersgd":
        message = '"powersgd" would keep the overflows that "fp16" steps over: use "none"'
        problems_found.append(Problem("layout.gradient_compression", message))
    if layout.offload and ranks["shard"] * ranks["sequence"] == 1:
        message = "is of sharded parameters, and there are none: use false, or layout.shard > 1"
        problems_found.append(Problem("layout.offload", message))
    data_ranks = ranks["replicate"] * ranks["shard"]
    at_once = train.micro_batch * data_ranks
    if train.global_batch % train.micro_batch == 0 and train.global_batch % at_once:
        problems_found.append(
            Problem(
                "train.global_batch",
                f"{train.global_batch} is not a multiple of train.micro_batch = "
                f"{train.micro_batch} × {data_ranks} data-parallel ranks: "
                f"use {math.ceil(train.global_batch / at_once) * at_once}",
            )
        )
    return problems_found


def _engine_rules(engine: Engine, layout: Layout, train: Train, world: int) -> list[Problem]:
    if layout_problems(layout.ranks(), world):
        return []
    name, ranks = engine.name, layout.resolve(world)
    if name == "native":  # keys of the others may stand there: one file, whoever runs it
        return []
    problems = [
        Problem(
            f"layout.{axis}",
            f'is {ranks[axis]}, and engine.name = "{name}" copies and shards the model only: use '
            'engine.name = "native", or 1',
        )
        for axis in ("sequence", "tensor", "pipeline")
        if ranks[axis] > 1
    ]
    if ranks["replicate"] > 1 and ranks["shard"] > 1:
        message = f'is {ranks["replicate"]} beside shard {ranks["shard"]}, and "{name}" shards over'
        problems.append(Problem("layout.replicate", f"{message} all ranks: use 1"))
    if layout.offload:
        message = "is the native engine's: use false" + (
            ", and engine.offload_optimizer and engine.offload_parameters"
            if name == "deepspeed"
            else ""
        )
        problems.append(Problem("layout.offload", message))
    if layout.gradient_compression != "none":
        problems.append(
            Problem("layout.gradient_compression", 'is the native engine\'s: use "none"')
        )
    if name == "accelerate" and ranks["shard"] > 1 and engine.mode == "plain":
        message = f'"plain" has copies only, and layout.shard is {ranks["shard"]}: use "fsdp2", or'
        problems.append(Problem("engine.mode", f"{message} layout.zero = 0"))
    if name == "accelerate" and ranks["replicate"] > 1 and engine.mode in ("fsdp2", "deepspeed"):
        message = f'"{engine.mode}" shards, and the ranks are copies: use "plain", or layout.shard'
        problems.append(Problem("engine.mode", message))
    if name == "deepspeed" or engine.mode == "deepspeed":
        problems += _deepspeed_problems(engine, layout, train, ranks)
    return problems


def _deepspeed_problems(
    engine: Engine, layout: Layout, train: Train, ranks: Mapping[str, int]
) -> list[Problem]:
    problems = []
    stage = layout.zero if ranks["replicate"] == 1 else 0
    if train.optimizer != "adamw":
        message = f'"{train.optimizer}" is the native engine\'s: use "adamw"'
        problems.append(Problem("train.optimizer", message))
    if train.compile is True and stage == 3:
        message = "is true, and ZeRO-3's hooks within the blocks cannot be compiled: use false"
        problems.append(Problem("train.compile", message))
    for key, least in (("offload_optimizer", 1), ("offload_parameters", 3)):
        where = getattr(engine, key)
        needed = 3 if where == "nvme" else least
        if where != "none" and stage < needed:
            message = f'"{where}" needs layout.zero of at least {needed}, and it is {stage}'
            problems.append(Problem(f"engine.{key}", message))
    if "nvme" in (engine.offload_optimizer, engine.offload_parameters) and not engine.nvme_path:
        problems.append(Problem("engine.nvme_path", 'is needed by "nvme": name a folder'))
    return problems


RULES: tuple[Callable[..., list[Problem]], ...] = (
    _model_rules,
    _sketch_rules,
    _attention_rules,
    _train_rules,
    _initial_rules,
    _recall_rules,
    _layout_rules,
    _engine_rules,
)


def check_rules(sections: Mapping[str, Section], world: int | None) -> list[Problem]:
    """Problems between values, from every rule of which all is known; `world`: processes."""
    known: dict[str, Any] = {**sections, **({} if world is None else {"world": world})}
    problems = []
    for rule in RULES:
        needs = inspect.signature(rule).parameters
        if set(needs) <= set(known):
            problems += rule(**{name: known[name] for name in needs})
    return problems
