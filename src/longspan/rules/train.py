"""What must hold between the values of [train], [engine] and [track]."""

from __future__ import annotations

import math
from collections.abc import Mapping

from longspan.checks import layout_problems
from longspan.config import Engine, Layout, Profile, Track, Train
from longspan.rules.problem import Problem, Problems


def train_rules(train: Train) -> Problems:
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
    if train.optimizer != "muon" and train.momentum != Train().momentum:
        message = f'has no effect with train.optimizer = "{train.optimizer}": remove it'
        yield Problem("train.momentum", message)
    if train.offload_limit_gib is not None and not train.offload_activations:
        message = "has no effect with train.offload_activations = false: set true, or leave it out"
        yield Problem("train.offload_limit_gib", message)
    if train.precision == "fp16" and train.device == "cpu":
        message = '"fp16" needs a GPU, but train.device is "cpu": use "fp32"'
        yield Problem("train.precision", message)


def engine_rules(engine: Engine, layout: Layout, train: Train, world: int) -> Problems:
    # Keys of other engines are allowed with "native", so that one file works with every engine.
    if engine.name == "native" or layout_problems(layout.ranks(), world):
        return
    name, ranks = engine.name, layout.resolve(world)
    if train.optimizer == "muon":
        message = f'"muon" needs engine.name = "native", but it is "{name}": use "adamw"'
        yield Problem("train.optimizer", message)
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
    if train.optimizer == "adamw8bit":
        message = f'"{train.optimizer}" needs engine.name = "native": use "adamw"'
        yield Problem("train.optimizer", message)
    if train.compile is True and stage == 3:
        message = "true is not supported with DeepSpeed's ZeRO-3 hooks inside the blocks: use false"
        yield Problem("train.compile", message)
    if train.activation_checkpointing == "selective" and stage == 3:
        # The decoder fails in its backward pass, and gradients of other models were wrong.
        message = '"selective" is not supported with DeepSpeed and ZeRO-3: use "full" or ZeRO-2'
        yield Problem("train.activation_checkpointing", message)
    if train.ema and "nvme" in (engine.offload_optimizer, engine.offload_param):
        message = "is not supported with parameters or optimizer state on NVMe"
        yield Problem("train.ema", f'{message}: use "cpu", or remove it')
    for key, min_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        target = getattr(engine, key)
        needed = 3 if target == "nvme" else min_stage
        if target != "none" and stage < needed:
            message = f'"{target}" needs layout.zero >= {needed}, but the ZeRO stage is {stage}'
            yield Problem(f"engine.{key}", f'{message}: raise it or use "none"')
    if "nvme" in (engine.offload_optimizer, engine.offload_param) and not engine.nvme_path:
        yield Problem("engine.nvme_path", 'is required by "nvme": set a folder on a fast disk')


def track_rules(train: Train, track: Track, engine: Engine) -> Problems:
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
