"""Every field of a DeepSpeed configuration file, and what becomes of it (DeepSpeed 0.19.8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from longspan.config import Run
from longspan.engines.agreement import AUTO, Field, Fields, Honoured, Mapped, Refused, Settings

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedulers, and `train.schedule`."""
DTYPES = {
    name: short
    for short, names in {
        "fp32": ("fp32", "float32", "float", "torch.float32"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
        "fp16": ("fp16", "float16", "half", "torch.float16"),
    }.items()
    for name in names
}
ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

HONOURED = [
    "aio.block_size",
    "aio.intra_op_parallelism",
    "aio.overlap_events",
    "aio.queue_depth",
    "aio.single_submit",
    "aio.use_gds",
    "comms_logger.debug",
    "comms_logger.enabled",
    "comms_logger.prof_all",
    "comms_logger.prof_ops",
    "comms_logger.verbose",
    "csv_monitor.enabled",
    "csv_monitor.job_name",
    "csv_monitor.output_path",
    "disable_python_gc",
    "dump_state",
    "flops_profiler.detailed",
    "flops_profiler.enabled",
    "flops_profiler.module_depth",
    "flops_profiler.output_file",
    "flops_profiler.profile_step",
    "flops_profiler.recompute_fwd_factor",
    "flops_profiler.top_modules",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "tensorboard.enabled",
    "tensorboard.job_name",
    "tensorboard.output_path",
    "timers.throughput.enabled",
    "timers.throughput.synchronized",
    "wall_clock_breakdown",
    "wandb.enabled",
    "wandb.group",
    "wandb.project",
    "wandb.team",
    "zero_allow_untested_optimizer",
] + [
    f"zero_optimization.{name}"
    for name in [
        "allgather_partitions",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer.buffer_count",
        "offload_optimizer.fast_init",
        "offload_optimizer.pin_memory",
        "offload_optimizer.pipeline_read",
        "offload_optimizer.pipeline_write",
        "offload_param.buffer_count",
        "offload_param.buffer_size",
        "offload_param.max_in_cpu",
        "offload_param.pin_memory",
        "override_module_apply",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_allgather_sequential",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    ]
]
"""Fields that DeepSpeed itself acts on, and that do not change what a step computes."""

ONLY_ITS_CHECKPOINTING = "acts only on models that call deepspeed.checkpointing"
REMOVED = "DeepSpeed no longer has it: remove it"
OUR_CHECKPOINTS = "Longspan writes the checkpoints, as [checkpoint] says: remove it"
OUR_DATA = "Longspan reads the data, as [data] says: remove it"
OUR_LOSS_SCALE = "the fp16 loss scale is that of PyTorch's GradScaler"
CHANGES_STEP = "would change what a step computes: remove it"
REFUSED: dict[str, Refused] = {
    "activation_checkpointing.contiguous_memory_optimization": Refused(
        f"{ONLY_ITS_CHECKPOINTING}: remove it"
    ),
    "activation_checkpointing.number_checkpoints": Refused(
        f"{ONLY_ITS_CHECKPOINTING}: remove it, and set train.activation_checkpointing"
    ),
    "activation_checkpointing.partition_activations": Refused(
        f"{ONLY_ITS_CHECKPOINTING}, and splits over tensor-parallel ranks: remove it, "
        "and set train.activation_checkpointing"
    ),
    "activation_checkpointing.profile": Refused(f"{ONLY_ITS_CHECKPOINTING}: remove it"),
    "activation_checkpointing.synchronize_checkpoint_boundary": Refused(
        f"{ONLY_ITS_CHECKPOINTING}: remove it"
    ),
    "amp": Refused("NVIDIA Apex is not supported: remove it, and set train.precision"),
    "autotuning": Refused("is not supported: remove it, and see longspan plan"),
    "bf16.bf16_master_weights_and_grads": Refused("weights and gradients are fp32: remove it"),
    "bf16.bf16_optimizer_states": Refused("the optimizer state is fp32: remove it"),
    "bf16.check_grad_overflow": Refused(
        "steps with non-finite gradients are always skipped: remove it", (True,)
    ),
    "bf16.immediate_grad_update": Refused("gradients are fp32: remove it"),
    "checkpoint": Refused(OUR_CHECKPOINTS),
    "compile": Refused("remove it, and set train.compile"),
    "compression_training": Refused(REMOVED),
    "curriculum_learning": Refused(REMOVED),
    "data_efficiency": Refused(OUR_DATA),
    "data_types.buffer_dtype": Refused("the model has no such buffers: remove it", ()),
    "data_types.grad_accum_dtype": Refused(
        'gradients are accumulated in float32: set "fp32"', ("fp32", "float32")
    ),
    "data_types.param_dtype": Refused("remove it, and set train.precision", ()),
    "dataloader_drop_last": Refused(OUR_DATA),
    "datastates_ckpt": Refused(OUR_CHECKPOINTS),
    "disable_allgather": Refused(CHANGES_STEP),
    "eigenvalue": Refused(REMOVED),
    "elasticity": Refused(f"{REMOVED}; train.global_batch is the same on any number of ranks"),
    "expert_parallel": Refused("there are no experts: remove it"),
    "fp16.auto_cast": Refused("the inputs are token ids: set false"),
    "fp16.consecutive_hysteresis": Refused(f"{OUR_LOSS_SCALE}: remove it"),
    "fp16.fp16_master_weights_and_grads": Refused("weights and gradients are fp32: remove it"),
    "fp16.hysteresis": Refused(f"{OUR_LOSS_SCALE}, which halves at once: set 1", (1,)),
    "fp16.initial_scale_power": Refused(f"{OUR_LOSS_SCALE}, which starts at 2^16: set 16", (16,)),
    "fp16.loss_scale": Refused(f"{OUR_LOSS_SCALE}, which is dynamic: set 0", (0,)),
    "fp16.loss_scale_window": Refused(
        f"{OUR_LOSS_SCALE}, which doubles after 2000 steps: set 2000", (2000,)
    ),
    "fp16.min_loss_scale": Refused(f"{OUR_LOSS_SCALE}, which has no minimum: remove it", (0,)),
    "gradient_allreduce_op": Refused('DeepSpeed must average gradients: set "mean"', ("mean",)),
    "gradient_predivide_factor": Refused(CHANGES_STEP, (1,)),
    "hybrid_engine": Refused("is for inference in RLHF: remove it"),
    "managed_gradient_accumulation": Refused(
        "Longspan says which micro-batch is the last: remove it", (True,)
    ),
    "optimizer.legacy_fusion": Refused("the optimizer is PyTorch's fused AdamW: remove it"),
    "optimizer.params.adam_w_mode": Refused("the optimizer is AdamW: set true", (True,)),
    "optimizer.params.amsgrad": Refused("AMSGrad is not supported: set false"),
    "optimizer.params.bias_correction": Refused("AdamW corrects its bias: set true", (True,)),
    "optimizer.params.torch_adam": Refused(
        "the optimizer is PyTorch's fused AdamW: set true", (True,)
    ),
    "pipeline": Refused('remove it, and set engine.name = "native" and layout.pipeline'),
    "prescale_gradients": Refused(CHANGES_STEP),
    "progressive_layer_drop": Refused(REMOVED),
    "quantize_training": Refused(REMOVED),
    "scheduler.params.warmup_min_lr": Refused("the warmup starts from 0: set 0", (0,)),
    "scheduler.params.warmup_min_ratio": Refused("the warmup starts from 0: set 0", (0,)),
    "scheduler.params.warmup_type": Refused('the warmup is linear: set "linear"', ("linear",)),
    "seq_parallel_communication_data_type": Refused(
        'remove it: layout.sequence needs engine.name = "native"', ()
    ),
    "sequence_parallel_size": Refused(
        'remove it, and set engine.name = "native" and layout.sequence', (1,)
    ),
    "sparse_attention": Refused(f"{REMOVED}, and see [attention]"),
    "sparse_gradients": Refused(REMOVED, ()),
    "tensor_parallel": Refused('remove it, and set engine.name = "native" and layout.tensor'),
    "torch_autocast.lower_precision_safe_modules": Refused(
        "parameters are gathered in float32: set []", ([],)
    ),
    "weight_quantization": Refused(CHANGES_STEP),
    "zero_force_ds_cpu_optimizer": Refused("the optimizer is PyTorch's fused AdamW: set false"),
} | {
    f"zero_optimization.{name}": refused
    for name, refused in {
        "compute_grad_norm": Refused("the gradient norm is needed: set true", (True,)),
        "cpu_offload": Refused('is deprecated: use offload_optimizer = {"device": "cpu"}'),
        "cpu_offload_param": Refused('is deprecated: use offload_param = {"device": "cpu"}'),
        "cpu_offload_use_pin_memory": Refused("is deprecated: use offload_optimizer.pin_memory"),
        "elastic_checkpoint": Refused(OUR_CHECKPOINTS),
        "leaf_module": Refused("every module gathers its own parameters: remove it"),
        "legacy_stage1": Refused("is deprecated: remove it"),
        "load_from_fp32_weights": Refused(OUR_CHECKPOINTS, (True,)),
        "mics_hierarchical_params_gather": Refused(REMOVED, ()),
        "mics_shard_size": Refused(
            f'{REMOVED}; engine.name = "native" has layout.replicate × layout.shard', ()
        ),
        "offload_optimizer.cpuadam_cores_perc": Refused(
            "the optimizer is PyTorch's fused AdamW: remove it", ()
        ),
        "offload_optimizer.ratio": Refused(
            "the optimizer state is offloaded as a whole: set 1", (1,)
        ),
        "offload_optimizer.super_offload": Refused("is not supported: remove it"),
        "parameter_alignment": Refused("checkpoints need unpadded partitions: remove it"),
        "pipeline_loading_checkpoint": Refused(OUR_CHECKPOINTS),
        "save_muon_momentum_buffer_in_memory": Refused("the optimizer is AdamW: remove it"),
        "stage3_gather_16bit_weights_on_model_save": Refused(
            f"{OUR_CHECKPOINTS}; longspan export gathers the weights"
        ),
        "stage3_gather_fp16_weights_on_model_save": Refused(
            f"{OUR_CHECKPOINTS}; longspan export gathers the weights"
        ),
        "zenflow": Refused(CHANGES_STEP),
        "zero_hpz_partition_size": Refused(
            'remove it: engine.name = "native" has layout.replicate × layout.shard', (1,)
        ),
        "zero_quantized_gradients": Refused(CHANGES_STEP),
        "zero_quantized_nontrainable_weights": Refused(CHANGES_STEP),
        "zero_quantized_weights": Refused(CHANGES_STEP),
        "zeropp_loco_param": Refused(REMOVED, ()),
    }.items()
}
"""Fields that are refused unless their value asks for nothing else than a run does."""


def deepspeed_fields(run: Run, ranks: Mapping[str, int], stage: int, file: Settings) -> Fields:
    """What becomes of each field of `file`, for a run whose precision is resolved."""
    train, engine = run.train, run.engine
    fields: dict[str, Field | Callable[[Any], Field]] = dict.fromkeys(HONOURED, Honoured())
    fields |= REFUSED
    fields |= _batch_fields(run, math.prod(ranks.values()), file)
    fields |= _precision_fields(run, file)
    fields |= _optimizer_fields(run, file)
    fields |= _scheduler_fields(run)
    fields |= _optional_fields(run)
    zero = "zero_optimization"
    fields |= {
        "communication_data_type": lambda value: _communication(run, stage, value),
        "activation_checkpointing.cpu_checkpointing": lambda value: _offloaded_activations(
            run, bool(value)
        ),
        f"{zero}.stage": lambda value: _stage(run, stage, value),
        f"{zero}.offload_optimizer.device": lambda value: Mapped(
            value == engine.offload_optimizer, {"engine.offload_optimizer": value}
        ),
        f"{zero}.offload_param.device": lambda value: Mapped(
            value == engine.offload_param, {"engine.offload_param": value}
        ),
        "gradient_clipping": lambda value: Mapped(
            value == train.grad_clip, {"train.grad_clip": value}
        ),
    }
    for table in ("offload_optimizer", "offload_param"):
        fields[f"{zero}.{table}.nvme_path"] = Honoured()  # it is read only for NVMe
        if _get(file, zero, table, "device") == "nvme":
            fields[f"{zero}.{table}.nvme_path"] = lambda value: Mapped(
                value == engine.nvme_path, {"engine.nvme_path": value}
            )
    return fields


def _get(table: Any, *keys: str) -> Any:
    """A value of nested tables; None if it is absent or "auto"."""
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return None if table == AUTO else table


def batch_keys(
    run: Run, world: int, total: int | None, micro: int | None, accumulation: int | None
) -> tuple[dict[str, int], str]:
    """The keys that give these batch sizes on `world` ranks, or a problem with them."""
    given = [size for size in (total, micro, accumulation) if size is not None]
    if not all(isinstance(size, int) and size > 0 for size in given):
        return {}, "batch sizes must be whole numbers of at least 1: change it"
    if accumulation is None:
        total, micro = total or run.train.global_batch, micro or run.train.micro_batch
        if total % (micro * world):
            micro = 1
    elif micro is None:
        wanted = total or run.train.global_batch
        if wanted % (accumulation * world) == 0:
            total, micro = wanted, wanted // (accumulation * world)
        elif total is None:
            total, micro = run.train.micro_batch * accumulation * world, run.train.micro_batch
    else:
        total = total or micro * accumulation * world
    if micro is None or total is None or total % (micro * world):
        each = f"{accumulation} × " if accumulation else ""
        return {}, f"a batch of {total} is not a multiple of {each}{world} ranks: change one"
    if accumulation is not None and total != micro * accumulation * world:
        return {}, (
            f"a batch of {total} is not {micro} × {accumulation} × {world} ranks: change one of "
            'them, or set it to "auto"'
        )
    return {"train.global_batch": total, "train.micro_batch": micro}, ""


def _batch_fields(run: Run, world: int, file: Settings) -> dict[str, Callable[[Any], Field]]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [_get(file, name) for name in names]
    keys, problem = batch_keys(run, world, *sizes)
    total, micro = run.train.global_batch, run.train.micro_batch
    found = dict(zip(names, (total, micro, total // (micro * world)), strict=True))

    def field(name: str) -> Callable[[Any], Field]:
        return lambda value: Mapped(value == found[name], keys, problem)

    return {name: field(name) for name in names}


def _precision_fields(run: Run, file: Settings) -> dict[str, Callable[[Any], Field]]:
    """DeepSpeed's fp16, bf16 and torch_autocast all mean `train.precision`."""
    precision = run.train.precision
    autocast = _get(file, "torch_autocast", "enabled") is True
    asked = {name for name in ("fp16", "bf16") if _get(file, name, "enabled") is True}
    dtype = DTYPES.get(str(_get(file, "torch_autocast", "dtype") or "bfloat16"), "")

    def is_needed(name: str, value: bool) -> Field:
        if not value:
            agrees = precision != name or autocast
            return Mapped(agrees, {} if agrees else {"train.precision": "fp32"})
        problem = ""
        if name == "fp16" and run.train.device == "cpu":
            problem = 'fp16 needs a GPU, but the device is a CPU: set false or "auto"'
        return Mapped(precision == name, {"train.precision": name}, problem)

    def is_autocast(value: bool) -> Field:
        if value:  # an unknown dtype is that field's problem
            return is_needed(dtype, True) if dtype in AUTOCAST else Honoured()
        agrees = precision == "fp32" or precision in asked
        return Mapped(agrees, {} if agrees else {"train.precision": "fp32"})

    def autocast_dtype(value: str) -> Field:
        if not autocast:
            return Honoured()  # DeepSpeed reads it only if enabled
        known = DTYPES.get(str(value)) in AUTOCAST
        problem = "" if known else 'expected "bfloat16" or "float16": set one of them'
        return Mapped(dtype == precision, {"train.precision": dtype}, problem)

    return {
        "fp16.enabled": lambda value: is_needed("fp16", value),
        "bf16.enabled": lambda value: is_needed("bf16", value),
        "torch_autocast.enabled": is_autocast,
        "torch_autocast.dtype": autocast_dtype,
    }


def _optimizer_fields(run: Run, file: Settings) -> dict[str, Callable[[Any], Field]]:
    train = run.train
    kind = _get(file, "optimizer", "type")
    reason = 'the optimizer is AdamW: set "AdamW"'
    if str(kind).lower() in ONE_BIT:
        reason = f"DeepSpeed no longer has 1-bit optimizers; {reason}"

    def betas(value: Any) -> Field:
        if not isinstance(value, list) or len(value) != 2:
            return Mapped(False, {}, "expected two numbers")
        keys = {"train.beta1": value[0], "train.beta2": value[1]}
        return Mapped(value == [train.beta1, train.beta2], keys)

    return {
        "optimizer.type": lambda _: Refused(reason, ("AdamW", "adamw", "Adam", "adam")),
        "optimizer.params.lr": lambda value: _learning_rate(run, value),
        "optimizer.params.betas": betas,
        "optimizer.params.eps": lambda value: Mapped(value == train.eps, {"train.eps": value}),
        "optimizer.params.weight_decay": lambda value: Mapped(
            value == train.weight_decay, {"train.weight_decay": value}
        ),
    }


def _learning_rate(run: Run, value: float) -> Field:
    agrees = value == run.train.peak_lr
    keys: dict[str, Any] = {"train.lr": value, "train.lr_scaling": "none"}
    return Mapped(agrees, {"train.lr": run.train.lr} if agrees else keys)


def scheduler_type(run: Run) -> str | None:
    """DeepSpeed's scheduler that is like the run's, if there is one."""
    train = run.train
    if train.schedule == "linear" and train.min_lr_ratio:  # WarmupDecayLR decays to 0
        return None
    return {schedule: name for name, schedule in SCHEDULERS.items()}.get(train.schedule)


def _scheduler_fields(run: Run) -> dict[str, Callable[[Any], Field]]:
    train = run.train

    def kind(value: str) -> Field:
        if str(value) not in SCHEDULERS:
            known = ", ".join(f'{k} (train.schedule = "{v}")' for k, v in SCHEDULERS.items())
            return Mapped(False, {}, f"is not supported: use {known}")
        keys: dict[str, Any] = {"train.schedule": SCHEDULERS[value]}
        if value == "WarmupDecayLR":
            keys["train.min_lr_ratio"] = 0.0
        return Mapped(value == scheduler_type(run), keys)

    return {
        "scheduler.type": kind,
        "scheduler.params.warmup_max_lr": lambda value: _learning_rate(run, value),
        "scheduler.params.warmup_num_steps": lambda value: Mapped(
            value == train.warmup_steps, {"train.warmup_steps": value}
        ),
        "scheduler.params.total_num_steps": lambda value: Mapped(
            value == train.steps, {"train.steps": value}
        ),
        "scheduler.params.cos_min_ratio": lambda value: Mapped(
            value == train.min_lr_ratio, {"train.min_lr_ratio": value}
        ),
    }


def _optional_fields(run: Run) -> dict[str, Callable[[Any], Field]]:
    """Fields of [engine] that, left out of the run file, may stand in DeepSpeed's."""
    engine = run.engine
    keys = {
        "overlap_comm": ("overlap_comm", engine.overlap_comm),
        "contiguous_gradients": ("contiguous_gradients", engine.contiguous_gradients),
        "reduce_bucket_size": ("reduce_bucket_size", engine.reduce_bucket_size),
        "allgather_bucket_size": (
            "allgather_bucket_size",
            engine.allgather_bucket_size or engine.reduce_bucket_size,
        ),
        "stage3_prefetch_bucket_size": ("prefetch_bucket_size", engine.prefetch_bucket_size),
        "stage3_param_persistence_threshold": (
            "param_persistence_threshold",
            engine.param_persistence_threshold,
        ),
    }

    def field(key: str, found: int | None) -> Callable[[Any], Field]:
        if found is None:
            return lambda _: Honoured()
        return lambda value: Mapped(value == found, {f"engine.{key}": _whole(value)})

    return {f"zero_optimization.{name}": field(*key) for name, key in keys.items()}


def _whole(value: Any) -> Any:
    """A count, which JSON may write as 5e8."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stage(run: Run, stage: int, value: int) -> Field:
    keys: dict[str, Any] = {"layout.zero": value}
    if value and run.layout.replicate != 1:  # replicas are ZeRO-0
        keys |= {"layout.replicate": 1, "layout.shard": -1}
    return Mapped(value == stage, keys)


def _communication(run: Run, stage: int, value: str) -> Field:
    methods = {"fp32": "none", "bf16": "bf16"}
    dtype = DTYPES.get(str(value), "")
    if dtype not in methods:
        return Mapped(False, {}, 'is not supported: use "fp32" or "bf16"')
    if dtype == "bf16" and stage > 0 and run.train.precision != "fp32":
        return Mapped(False, {}, f"{NOT_UNDER_AUTOCAST}: remove it")
    key = {"layout.gradient_compression": methods[dtype]}
    return Mapped(run.layout.gradient_compression == methods[dtype], key)


NOT_UNDER_AUTOCAST = "DeepSpeed reduces the gradients of ZeRO-1 to 3 in float32 under autocast"


def _offloaded_activations(run: Run, value: bool) -> Field:
    train = run.train
    if not value:
        return Mapped(not train.offload_activations, {"train.offload_activations": False})
    keys = {"train.activation_checkpointing": "full", "train.offload_activations": True}
    is_on = train.offload_activations and train.activation_checkpointing == "full"
    return Mapped(is_on, keys)
