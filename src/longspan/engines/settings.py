"""DeepSpeed's and Accelerate's configurations, derived from the run file.

A user's own DeepSpeed file may add settings; values that contradict the run file are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longspan.config import Layout, Run
from longspan.costs import count_parameters
from longspan.errors import UserError

Settings = dict[str, Any]

AUTO = "auto"
"""Hugging Face's value for a setting that is filled in from elsewhere: here the run file."""

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}

ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
CLOSED = ("optimizer.params.", "scheduler.params.")
"""Tables in which every key must come from the run file."""

CHANGES_STEP = (
    "amp",
    "communication_data_type",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "data_parallel_size",
    "data_types",
    "gradient_predivide_factor",
    "prescale_gradients",
    "progressive_layer_drop",
    "sequence_parallel_size",
    "sparse_gradients",
    "tensor_parallel",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zenflow",
)
"""Settings that would change what a step computes."""


def zero_stage(layout: Layout, ranks: Mapping[str, int]) -> int:
    """DeepSpeed's ZeRO stage: that of the layout, or 0 if ranks are replicas."""
    return layout.zero if ranks["replicate"] == 1 else 0


def deepspeed_settings(run: Run, ranks: Mapping[str, int]) -> Settings:
    """The complete configuration of a run whose precision is resolved, on `ranks` per axis.

    Settings of `engine.deepspeed_config` that the run file does not decide are added; UserError
    lists every value that contradicts it.
    """
    fixed, path = _from_run(run, ranks), run.engine.deepspeed_config
    users = _read(Path(path)) if path else {}
    if conflicts := list(_conflicts(users, fixed)):
        width = max(len(name) for name, _ in conflicts)
        lines = [f"  {name:<{width}}  {text}" for name, text in conflicts]
        count = "1 value" if len(conflicts) == 1 else f"{len(conflicts)} values"
        raise UserError(
            "\n".join([f"{path} and the run file disagree on {count}: change one of them", *lines])
        )
    return _merged(_merged(_defaults(run), users), fixed)


def _from_run(run: Run, ranks: Mapping[str, int]) -> Settings:
    """Settings that the run file decides."""
    train, engine, stage = run.train, run.engine, zero_stage(run.layout, ranks)
    samples = train.micro_batch * math.prod(ranks.values())  # per micro-batch, on all ranks
    zero = {
        "stage": stage,
        "overlap_comm": engine.overlap_comm,
        "contiguous_gradients": engine.contiguous_gradients,
        "reduce_bucket_size": engine.reduce_bucket_size,
        "allgather_bucket_size": engine.allgather_bucket_size or engine.reduce_bucket_size,
        "stage3_prefetch_bucket_size": engine.prefetch_bucket_size,
        "stage3_param_persistence_threshold": engine.param_persistence_threshold,
        "offload_optimizer": _offload(engine.offload_optimizer, engine.nvme_path),
        "offload_param": _offload(engine.offload_param, engine.nvme_path),
    }
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.global_batch // samples,
        "gradient_clipping": train.grad_clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": train.peak_lr,
                "betas": [train.beta1, train.beta2],
                "eps": train.eps,
                "weight_decay": train.weight_decay,
            },
        },
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        # Autocast with float32 weights, as in the native engine.
        "torch_autocast": {"enabled": True, "dtype": AUTOCAST[train.precision]}
        if train.precision in AUTOCAST
        else {"enabled": False},
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
    } | _scheduler(run)


def _scheduler(run: Run) -> Settings:
    """DeepSpeed's nearest scheduler, for the record: the training loop sets the learning rate."""
    train = run.train
    names = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
    if train.schedule not in names:
        return {}
    params: Settings = {"warmup_num_steps": train.warmup_steps}
    if train.schedule != "constant":
        params["total_num_steps"] = train.steps
    if train.schedule == "cosine":
        params["cos_min_ratio"] = train.min_lr_ratio
    else:
        params["warmup_max_lr"] = train.peak_lr
    return {"scheduler": {"type": names[train.schedule], "params": params}}


def _offload(where: str, nvme_path: str) -> Settings:
    return {"device": where, **({"nvme_path": nvme_path} if where == "nvme" else {})}


def _defaults(run: Run) -> Settings:
    """Settings that the user's file may override."""
    bucket = min(500_000_000, count_parameters(run.model))
    offload = {"pin_memory": run.train.device == "cuda"}
    return {
        "steps_per_print": None,
        # PyTorch's fused AdamW runs on CPU too, and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "offload_optimizer": offload,
            "offload_param": offload,
        },
        # Gradients and parameters are communicated in float32.
        "torch_autocast": {"lower_precision_safe_modules": []},
    }


def _read(path: Path) -> Settings:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read engine.deepspeed_config = {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a table, got a {type(found).__name__}")
    return found


def _conflicts(
    users: Mapping[str, Any], fixed: Settings, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """The dotted path of each value that contradicts the run file, and why."""
    for key, value in users.items():
        name = f"{prefix}{key}"
        if value == AUTO:
            continue
        if name == "optimizer.type" and str(value).lower() in ONE_BIT:
            yield name, f"{value!r}: DeepSpeed no longer has 1-bit optimizers; the run uses AdamW"
        elif name in CHANGES_STEP or (key not in fixed and prefix in ("optimizer.", *CLOSED)):
            yield name, f"{value!r} is not set by the run file"
        elif isinstance(value, Mapping) and isinstance(fixed.get(key), dict):
            yield from _conflicts(value, fixed[key], f"{name}.")
        elif key in fixed and value != fixed[key]:
            yield name, f"{value!r}, but the run file says {fixed[key]!r}"
        elif name == "scheduler":
            yield name, "DeepSpeed has no scheduler like the run's"


def _merged(base: Settings, overrides: Mapping[str, Any]) -> Settings:
    """`base` updated by `overrides`, table by table; "auto" keeps the value of `base`."""
    merged = dict(base)
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        elif value != AUTO:
            merged[key] = value
    return merged


def accelerate_mode(mode: str, shard_ranks: int) -> str:
    """`engine.mode`, with "auto" resolved: FSDP2 if ranks shard, else plain data parallelism."""
    if mode != "auto":
        return mode
    return "fsdp2" if shard_ranks > 1 else "plain"


def accelerate_settings(run: Run, ranks: Mapping[str, int]) -> Settings:
    """Accelerate's configuration for `accelerate launch`, of a run whose device is resolved."""
    mode, world = accelerate_mode(run.engine.mode, ranks["shard"]), math.prod(ranks.values())
    on_gpu = run.train.device == "cuda"
    plain = "NO" if world == 1 else "MULTI_GPU" if on_gpu else "MULTI_CPU"
    settings: Settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}.get(mode, plain),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",  # the run's own autocast
        "num_machines": 1,
        "num_processes": world,
        "use_cpu": not on_gpu,
    }
    if mode == "fsdp2":
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_reshard_after_forward": run.layout.zero == 3,
            "fsdp_cpu_ram_efficient_loading": False,
        }
    if mode == "deepspeed":
        # The engine passes DeepSpeed its complete configuration; Accelerate accepts no other then.
        settings["deepspeed_config"] = {"zero3_init_flag": False}
        del settings["mixed_precision"]
    return settings
