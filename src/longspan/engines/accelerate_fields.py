"""Every field of an Accelerate configuration file, and what becomes of it (Accelerate 1.15).

`accelerate launch` passes the file's fields on as environment variables, so those are checked too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from longspan.config import Run
from longspan.engines.agreement import (
    Field,
    Fields,
    Honoured,
    Mapped,
    Refused,
    Settings,
    check_agreement,
)
from longspan.engines.deepspeed_fields import batch_keys

ENVIRONMENT = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_config.dynamo_backend",
}
FSDP_ENVIRONMENT = {
    f"FSDP_{name}": f"fsdp_config.fsdp_{name.lower()}"
    for name in (
        "VERSION",
        "RESHARD_AFTER_FORWARD",
        "OFFLOAD_PARAMS",
        "AUTO_WRAP_POLICY",
        "CPU_RAM_EFFICIENT_LOADING",
        "ACTIVATION_CHECKPOINTING",
        "ACTIVATION_CHECKPOINTING_OFFLOAD",
        "IGNORED_MODULES",
    )
} | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_config.fsdp_transformer_layer_cls_to_wrap"}
"""Variables that `accelerate launch` sets, and the fields they come from. Those that it sets for
FSDP1 only have no effect."""

LAUNCHER = {
    "debug": (False,),
    "enable_cpu_affinity": (False,),
    "gpu_ids": ("all",),
    "machine_rank": (0,),
    "main_process_ip": (),
    "main_process_port": (),
    "main_training_function": ("main",),
    "mpirun_config": ({},),
    "num_machines": (1,),
    "rdzv_backend": ("static",),
    "same_network": (True, False),
    "deepspeed_config.deepspeed_exclusion_filter": (),
    "deepspeed_config.deepspeed_hostfile": (),
    "deepspeed_config.deepspeed_inclusion_filter": (),
    "deepspeed_config.deepspeed_multinode_launcher": ("standard",),
}
"""Fields that only `accelerate launch` acts on, and the values that other launchers have too."""

NO_TPU = "TPUs are not supported: remove it"
REFUSED = {
    "command_file": Refused(NO_TPU, ()),
    "commands": Refused(NO_TPU, ([],)),
    "compute_environment": Refused('is not supported: set "LOCAL_MACHINE"', ("LOCAL_MACHINE",)),
    "deepspeed_config.deepspeed_moe_layer_cls_names": Refused(
        "there are no experts: remove it", ()
    ),
    "deepspeed_config.zero3_save_16bit_model": Refused(
        "Longspan writes the checkpoints, and longspan export gathers the weights: set false"
    ),
    "downcast_bf16": Refused(NO_TPU, (False, "no")),
    "dynamo_config.dynamo_mode": Refused('is not supported: set "default"', ("default",)),
    "dynamo_config.dynamo_use_dynamic": Refused("is not supported: set false"),
    "dynamo_config.dynamo_use_fullgraph": Refused("is not supported: set false"),
    "fp8_config": Refused("fp8 is not supported: remove it", ({},)),
    "fsdp_config.fsdp_auto_wrap_policy": Refused(
        'each block is wrapped: set "TRANSFORMER_BASED_WRAP"', ("TRANSFORMER_BASED_WRAP",)
    ),
    "fsdp_config.fsdp_backward_prefetch": Refused(
        'FSDP2 gathers the next block in advance: set "BACKWARD_PRE"', ("BACKWARD_PRE",)
    ),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Refused(
        "every rank initialises its weights: set false"
    ),
    "fsdp_config.fsdp_forward_prefetch": Refused("is not supported: set false"),
    "fsdp_config.fsdp_ignored_modules": Refused("every module is sharded: remove it", ()),
    "fsdp_config.fsdp_min_num_params": Refused("each block is wrapped: remove it", (0,)),
    "fsdp_config.fsdp_offload_params": Refused(
        'set false, or engine.name = "native" and layout.offload = true'
    ),
    "fsdp_config.fsdp_state_dict_type": Refused(
        'checkpoints hold shards: set "SHARDED_STATE_DICT"', ("SHARDED_STATE_DICT",)
    ),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Refused(
        'each block is wrapped: set "Block"', ("Block",)
    ),
    "fsdp_config.fsdp_use_orig_params": Refused("FSDP2 has no flat parameters: set true", (True,)),
    "fsdp_config.fsdp_version": Refused("FSDP1 is not supported: set 2", (2,)),
    "megatron_lm_config": Refused("Megatron-LM is not supported: remove it", ({},)),
    "parallelism_config": Refused('remove it, and set engine.name = "native" and [layout]', ({},)),
    "tpu_env": Refused(NO_TPU, ([],)),
    "tpu_name": Refused(NO_TPU, ()),
    "tpu_use_cluster": Refused(NO_TPU),
    "tpu_use_sudo": Refused(NO_TPU),
    "tpu_vm": Refused(NO_TPU, ([],)),
    "tpu_zone": Refused(NO_TPU, ()),
}
"""Fields that are refused unless their value asks for nothing else than a run does."""

STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
"""FSDP1's sharding strategies, and `layout.zero`."""


def check_accelerate(run: Run, ranks: Mapping[str, int], mode: str, file: Settings) -> None:
    """Refuse `engine.accelerate_config` or an environment that differs from the run file.

    `mode`: `engine.mode`, resolved.
    """
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    fields = accelerate_fields(run, ranks, mode, is_launched=is_launched)
    if file:
        check_agreement(run.engine.accelerate_config, _with_prefixes(file), fields, run)
    if is_launched and mode != "deepspeed":
        check_agreement("accelerate launch's configuration", _environment(), fields, run)
    given = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if is_launched and mode == "deepspeed" and set(given) - {"", "zero3_init_flag"}:
        # Accelerate ends with a traceback, and the other variables are its defaults.
        refused = Refused("the run file decides it, and Accelerate accepts no other: remove it", ())
        left = {name: "given" for name in given if name not in ("", "zero3_init_flag")}
        names = dict.fromkeys(left, refused)
        check_agreement("accelerate launch's configuration", left, names, run)


def _with_prefixes(file: Settings) -> Settings:
    """The file with the prefixes that Accelerate allows to leave out."""
    settings = dict(file)
    if "dynamo_backend" in settings:  # its older form
        settings["dynamo_config"] = {"dynamo_backend": settings.pop("dynamo_backend")}
    for table, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        if isinstance(found := settings.get(table), Mapping):
            settings[table] = {
                key if key.startswith(prefix) else prefix + key: value
                for key, value in found.items()
            }
    return settings


def _environment() -> Settings:
    """The fields that `accelerate launch` has passed on, under their names in its file."""
    names = dict(ENVIRONMENT)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        names |= FSDP_ENVIRONMENT
    settings: Settings = {}
    for variable, name in names.items():
        if (text := os.environ.get(variable)) is not None:
            table, _, key = name.rpartition(".")
            values = settings.setdefault(table, {}) if table else settings
            values[key] = {"true": True, "false": False}.get(
                text.lower(), int(text) if text.isdigit() else text
            )
    return settings


def accelerate_fields(
    run: Run, ranks: Mapping[str, int], mode: str, *, is_launched: bool
) -> Fields:
    """What becomes of each field of Accelerate's file; `is_launched`: by `accelerate launch`."""
    train, engine, world = run.train, run.engine, math.prod(ranks.values())
    other = "only accelerate launch reads it, which did not start this run: remove it"
    launcher = {
        name: Honoured() if is_launched else Refused(other, neutral)
        for name, neutral in LAUNCHER.items()
    }

    def accumulation(value: Any) -> Field:
        keys, problem = batch_keys(run, world, None, None, value)
        return Mapped(value == train.global_batch // (train.micro_batch * world), keys, problem)

    def processes(value: Any) -> Field:
        problem = f"there are {world} processes: start {value} (--nproc), or set {world}"
        return Mapped(True, {}, "" if value == world else problem)

    def precision(value: Any) -> Field:
        name = "fp32" if value in ("no", False) else value  # YAML reads a plain no as false
        if name not in ("fp32", "bf16", "fp16"):
            return Mapped(False, {}, 'is not supported: use "no", "bf16" or "fp16"')
        if name == "fp16" and train.device == "cpu":
            return Mapped(False, {}, 'fp16 needs a GPU, but the device is a CPU: set "no"')
        return Mapped(train.precision == name, {"train.precision": name})

    def on_cpu(value: bool) -> Field:
        return Mapped(
            value == (train.device == "cpu"), {"train.device": "cpu" if value else "cuda"}
        )

    def compiled(value: Any) -> Field:
        if value is False or str(value).upper() == "NO":  # Accelerate itself must not compile
            return Honoured()
        return Refused('set "NO", and train.compile = true, which compiles each block', ())

    def resharded(value: Any) -> Field:
        zero = {True: 3, False: 2}.get(value, STRATEGIES.get(str(value)))
        if zero is None:
            return Mapped(False, {}, "is not supported: use true (ZeRO-3) or false (ZeRO-2)")
        agrees = run.layout.zero == zero or (zero == 2 and run.layout.zero == 1)
        return Mapped(agrees, {} if agrees else {"layout.zero": zero})

    def checkpointing(value: bool) -> Field:
        agrees = value == (train.activation_checkpointing != "none")
        mode = "full" if value else "none"
        return Mapped(agrees, {} if agrees else {"train.activation_checkpointing": mode})

    def key(name: str, found: Any) -> Callable[[Any], Field]:
        return lambda value: Mapped(value == found, {name: value})

    table = "deepspeed_config"
    return {
        **REFUSED,
        **launcher,
        "distributed_type": lambda value: _distributed_type(run, ranks, mode, str(value)),
        "num_processes": processes,
        "mixed_precision": precision,
        "gradient_accumulation_steps": accumulation,
        "use_cpu": on_cpu,
        "dynamo_config.dynamo_backend": compiled,
        "dynamo_config.dynamo_use_regional_compilation": Honoured(),
        "fsdp_config.fsdp_reshard_after_forward": resharded,
        "fsdp_config.fsdp_sharding_strategy": resharded,
        # Ranks initialise the same weights, whether or not they would be broadcast.
        "fsdp_config.fsdp_sync_module_states": Honoured(),
        "fsdp_config.fsdp_activation_checkpointing": checkpointing,
        "fsdp_config.fsdp_activation_checkpointing_offload": key(
            "train.offload_activations", train.offload_activations
        ),
        f"{table}.deepspeed_config_file": lambda value: Mapped(
            value == engine.deepspeed_config, {"engine.deepspeed_config": value}
        ),
        f"{table}.zero_stage": key("layout.zero", run.layout.zero),
        f"{table}.offload_optimizer_device": key(
            "engine.offload_optimizer", engine.offload_optimizer
        ),
        f"{table}.offload_param_device": key("engine.offload_param", engine.offload_param),
        f"{table}.offload_optimizer_nvme_path": key("engine.nvme_path", engine.nvme_path),
        f"{table}.offload_param_nvme_path": key("engine.nvme_path", engine.nvme_path),
        f"{table}.gradient_accumulation_steps": accumulation,
        f"{table}.gradient_clipping": key("train.grad_clip", train.grad_clip),
        # ZeRO-3 initialises the weights in shards, whatever it says.
        f"{table}.zero3_init_flag": Honoured(),
    }


def _distributed_type(run: Run, ranks: Mapping[str, int], mode: str, value: str) -> Field:
    """DDP, FSDP or DeepSpeed, which is `engine.mode` and the layout that it needs."""
    modes = {"FSDP": "fsdp2", "DEEPSPEED": "deepspeed"}
    plain = {"MULTI_CPU": "cpu", "MULTI_GPU": "cuda", "NO": run.train.device}
    if value in modes:
        keys: dict[str, Any] = {"engine.mode": modes[value]}
        if run.layout.replicate != 1:
            keys |= {"layout.replicate": 1, "layout.shard": -1}
        if run.layout.zero == 0:
            keys["layout.zero"] = 3
        return Mapped(mode == modes[value], keys)
    if value not in plain:
        known = ", ".join([*plain, *modes])
        return Mapped(False, {}, f"is not supported: use {known}")
    world = math.prod(ranks.values())
    if (value == "NO") != (world == 1):
        other = "MULTI_CPU or MULTI_GPU" if world > 1 else "NO"
        return Mapped(False, {}, f"there are {world} processes: use {other}")
    keys = {"engine.mode": "plain", "train.device": plain[value]}
    if ranks["shard"] > 1:
        keys["layout.zero"] = 0
    agrees = mode == "plain" and run.train.device == plain[value]
    return Mapped(agrees, {} if agrees else keys)
