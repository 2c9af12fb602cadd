"""DeepSpeed's and Accelerate's configurations, derived from the run file.

A user's own files are checked field by field; what contradicts the run file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.config import Layout, Run
from longspan.costs import count_parameters
from longspan.engines.accelerate_fields import check_accelerate
from longspan.engines.agreement import AUTO, Settings, check_agreement, show
from longspan.engines.deepspeed_fields import (
    AUTOCAST,
    NOT_UNDER_AUTOCAST,
    REFUSED,
    deepspeed_fields,
    scheduler_type,
)
from longspan.errors import UserError
from longspan.files import parse_json_object, read_bounded

MAX_CONFIG_BYTES = 1 << 20
"""Size limit of a DeepSpeed or Accelerate configuration; real ones have a few kilobytes."""


def zero_stage(layout: Layout, ranks: Mapping[str, int]) -> int:
    """DeepSpeed's ZeRO stage: that of the layout, or 0 if ranks are replicas."""
    return layout.zero if ranks["replicate"] == 1 else 0


def deepspeed_settings(run: Run, ranks: Mapping[str, int]) -> Settings:
    """The complete configuration of a run whose precision is resolved, on `ranks` per axis.

    Settings of `engine.deepspeed_config` that the run file does not decide are added; UserError
    lists every field that contradicts it.
    """
    stage, path = zero_stage(run.layout, ranks), run.engine.deepspeed_config
    file = _read("deepspeed_config", path) if path else {}
    check_agreement(path, file, deepspeed_fields(run, ranks, stage, file), run)
    is_compressed = run.layout.gradient_compression == "bf16"
    if is_compressed and stage > 0 and run.train.precision in AUTOCAST:
        raise UserError(
            f'layout.gradient_compression = "bf16" has no effect here: {NOT_UNDER_AUTOCAST}; set '
            '"none", train.precision = "fp32" or engine.name = "native"'
        )
    return _merged(_merged(_defaults(run), _without_refused(file)), _from_run(run, ranks))


def _without_refused(table: Settings, prefix: str = "") -> Settings:
    """A file without the fields that say only what a run does anyway: DeepSpeed fails on some."""
    kept = {key: value for key, value in table.items() if f"{prefix}{key}" not in REFUSED}
    return {
        key: _without_refused(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in kept.items()
    }


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
        "communication_data_type": "bf16" if run.layout.gradient_compression == "bf16" else "fp32",
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
    train, name = run.train, scheduler_type(run)
    if name is None:
        return {}
    params: Settings = {"warmup_num_steps": train.warmup_steps, "warmup_type": "linear"}
    if train.schedule != "constant":
        params["total_num_steps"] = train.steps
    if train.schedule == "cosine":
        params["cos_min_ratio"] = train.min_lr_ratio
    else:
        params["warmup_max_lr"] = train.peak_lr
    return {"scheduler": {"type": name, "params": params}}


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


def _read(key: str, path: str) -> Settings:
    """The table in a JSON or YAML file that `engine.key` names."""
    import yaml

    try:
        content = read_bounded(Path(path), MAX_CONFIG_BYTES)
        is_json = key == "deepspeed_config"
        found = parse_json_object(content) if is_json else yaml.safe_load(content.decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot read engine.{key} = {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a table, got {show(found)}")
    return found


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
    """Accelerate's configuration for `accelerate launch`, of a run whose device is resolved.

    UserError lists every field of `engine.accelerate_config`, and of the configuration that
    `accelerate launch` has passed on, that contradicts the run file.
    """
    mode, world = accelerate_mode(run.engine.mode, ranks["shard"]), math.prod(ranks.values())
    path = run.engine.accelerate_config
    check_accelerate(run, ranks, mode, _read("accelerate_config", path) if path else {})
    on_gpu = run.train.device == "cuda"
    plain = "NO" if world == 1 else "MULTI_GPU" if on_gpu else "MULTI_CPU"
    settings: Settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}.get(mode, plain),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if run.train.precision == "fp32" else run.train.precision,
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
