"""DeepSpeed's configuration, derived from the run file and held against the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longspan.config import Run
from longspan.errors import UserError
from longspan.models import count_parameters

Settings = dict[str, Any]

AUTO = "auto"
"""A value of the user's file that leaves it to whoever reads it, as Hugging Face has it."""

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}

ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
CLOSED = ("optimizer.params.", "scheduler.params.")
"""Tables in which nothing may stand that the run file does not say…"""

OTHER_STEPS = (
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
"""…and settings that make of a step another one."""


def zero_stage(run: Run, world: int) -> int:
    """DeepSpeed's stage: that of the layout, or 0 where ranks are copies."""
    return run.layout.zero if run.layout.resolve(world)["replicate"] == 1 else 0


def deepspeed_settings(run: Run, world: int) -> Settings:
    """The whole configuration of a run whose precision is settled.

    What stands in `engine.deepspeed_json` and nowhere in the run file is added; where the two
    disagree, UserError says so of every value.
    """
    fixed, path = _from_run(run, world), run.engine.deepspeed_json
    own = _read(Path(path)) if path else {}
    if wrong := list(_disagreements(own, fixed)):
        width = max(len(name) for name, _ in wrong)
        lines = [f"  {name:<{width}}  {text}" for name, text in wrong]
        count = "1 value" if len(wrong) == 1 else f"{len(wrong)} values"
        raise UserError(
            "\n".join([f"{path} and the run file disagree on {count}: change one of them", *lines])
        )
    return _merged(_merged(_habits(run), own), fixed)


def _from_run(run: Run, world: int) -> Settings:
    """What the run file decides."""
    train, engine, stage = run.train, run.engine, zero_stage(run, world)
    zero = {
        "stage": stage,
        "overlap_comm": engine.overlap_comm,
        "contiguous_gradients": engine.contiguous_gradients,
        "reduce_bucket_size": engine.reduce_bucket,
        "allgather_bucket_size": engine.allgather_bucket or engine.reduce_bucket,
        "stage3_prefetch_bucket_size": engine.prefetch_bucket,
        "stage3_param_persistence_threshold": engine.persistence_threshold,
        "offload_optimizer": _offload(engine.offload_optimizer, engine.nvme_path),
        "offload_param": _offload(engine.offload_parameters, engine.nvme_path),
    }
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.global_batch // (train.micro_batch * world),
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
        # Weights stay float32 and products are taken in 16 bits, as by the native engine.
        "torch_autocast": {"enabled": True, "dtype": AUTOCAST[train.precision]}
        if train.precision in AUTOCAST
        else {"enabled": False},
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
    } | _scheduler(run)


def _scheduler(run: Run) -> Settings:
    """The one of DeepSpeed's own that is nearest; ours sets the learning rate all the same."""
    train = run.train
    names = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
    if train.schedule not in names:
        return {}
    params: Settings = {"warmup_num_steps": train.warmup}
    if train.schedule != "constant":
        params["total_num_steps"] = train.steps
    if train.schedule == "cosine":
        params["cos_min_ratio"] = train.min_lr
    else:
        params["warmup_max_lr"] = train.peak_lr
    return {"scheduler": {"type": names[train.schedule], "params": params}}


def _offload(where: str, nvme_path: str) -> Settings:
    return {"device": where, **({"nvme_path": nvme_path} if where == "nvme" else {})}


def _habits(run: Run) -> Settings:
    """What the user's file may replace."""
    bucket = min(500_000_000, count_parameters(run.model))
    offload = {"pin_memory": run.train.device == "cuda"}
    return {
        "steps_per_print": None,
        # PyTorch's fused AdamW runs on a CPU as well, and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "offload_optimizer": offload,
            "offload_param": offload,
        },
        # Gradients and parameters travel in float32.
        "torch_autocast": {"lower_precision_safe_modules": []},
    }


def _read(path: Path) -> Settings:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read engine.deepspeed_json = {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a table, got a {type(found).__name__}")
    return found


def _disagreements(
    own: Mapping[str, Any], fixed: Settings, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """The path of each value that differs, and what to say of it."""
    for key, value in own.items():
        name = f"{prefix}{key}"
        if value == AUTO:
            continue
        if name == "optimizer.type" and str(value).lower() in ONE_BIT:
            yield name, f"{value!r}: DeepSpeed no longer has 1-bit optimizers; the run has AdamW"
        elif name in OTHER_STEPS or (key not in fixed and prefix in ("optimizer.", *CLOSED)):
            yield name, f"{value!r}, and nothing of the run file says so"
        elif isinstance(value, Mapping) and isinstance(fixed.get(key), dict):
            yield from _disagreements(value, fixed[key], f"{name}.")
        elif key in fixed and value != fixed[key]:
            yield name, f"{value!r}, and the run file gives {fixed[key]!r}"
        elif name == "scheduler":
            yield name, "the run's schedule is one that DeepSpeed has not"


def _merged(base: Settings, above: Mapping[str, Any]) -> Settings:
    """`above` over `base`, table by table; what is "auto" is left to `base`."""
    found = dict(base)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), dict):
            found[key] = _merged(found[key], value)
        elif value != AUTO:
            found[key] = value
    return found


def mode_of(run: Run, world: int) -> str:
    """The mode that "auto" stands for: plain where ranks are copies, FSDP2 where they shard."""
    if run.engine.mode != "auto":
        return run.engine.mode
    return "fsdp2" if run.layout.resolve(world)["shard"] > 1 else "plain"


def accelerate_settings(run: Run, world: int) -> Settings:
    """Accelerate's own configuration of a run whose device is settled, for `accelerate launch`."""
    mode = mode_of(run, world)
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
        # The engine gives DeepSpeed the whole configuration, beside which Accelerate wants no word.
        settings["deepspeed_config"] = {"zero3_init_flag": False}
        del settings["mixed_precision"]
    return settings
