"""What a layout asks of the other sections, and the devices of a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version

from longspan.checks import backend_problem, layout_problems
from longspan.config import Data, Layout, Model, Train
from longspan.rules.problem import Problem, Problems


def decoder_layout_rules(
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
        if (model.lora.rank or train.freeze) and layout.schedule == "zbv":
            key = "model.lora" if model.lora.rank else "train.freeze"
            message = f'"zbv" is not supported with {key}, which freezes weights: use "1f1b"'
            yield Problem("layout.schedule", message)
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


def module_layout_rules(layout: Layout, model: Model, train: Train, world: int) -> Problems:
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


def layout_rules(layout: Layout, train: Train, world: int) -> Problems:
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
    if layout.offload and 1 < ranks["replicate"] == world:
        yield Problem(
            "layout.offload",
            f"true is not supported with layout.replicate = {world} as the only axis, since DDP "
            f"keeps whole parameters on each device: set layout.shard = {world} and "
            "layout.replicate = 1, or layout.offload = false",
        )
    if layout.offload and train.optimizer == "muon":
        message = '"muon" is not supported with layout.offload = true, which steps on the CPU'
        yield Problem("train.optimizer", f'{message}: use "adamw", or layout.offload = false')
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
