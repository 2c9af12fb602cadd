"""The section [engine]."""

from __future__ import annotations

from typing import Literal

from longspan.config.section import NonNegative, Positive, Section

OffloadTarget = Literal["none", "cpu", "nvme"]


class Engine(Section):
    name: Literal["native", "deepspeed", "accelerate"] = "native"
    """Library that runs a training step: PyTorch itself, DeepSpeed, or Hugging Face Accelerate."""
    accelerate_config: str = ""
    """Accelerate configuration file, in YAML, that must not contradict the run file (see `longspan
    config show --accelerate`)."""
    mode: Literal["auto", "plain", "fsdp2", "deepspeed"] = "auto"
    """Backend of Accelerate: "auto" is plain data parallelism (DDP) for replicas and FSDP2 for
    sharded ranks. The keys below configure DeepSpeed."""
    offload_optimizer: OffloadTarget = "none"
    """Offloads the optimizer state to CPU or NVMe; the optimizer then runs on CPU."""
    offload_param: OffloadTarget = "none"
    """Offloads ZeRO-3 parameters to CPU or NVMe."""
    nvme_path: str = ""
    """Folder on a fast disk, needed by "nvme"."""
    overlap_comm: bool | None = None
    """Overlaps gradient communication with the backward pass; by default only with ZeRO-3."""
    contiguous_gradients: bool | None = None
    """Copies gradients to one contiguous buffer as they are computed; on by default."""
    reduce_bucket_size: Positive | None = None
    """Elements per all-reduce or reduce-scatter of gradients; by default 5e8, or the model's
    parameter count if smaller."""
    allgather_bucket_size: Positive | None = None
    """Elements per all-gather of parameters (ZeRO 1 and 2); by default `reduce_bucket_size`."""
    prefetch_bucket_size: NonNegative | None = None
    """Parameter elements that ZeRO-3 prefetches; by default 5e7."""
    param_persistence_threshold: NonNegative | None = None
    """Keeps parameters with fewer elements unsharded under ZeRO-3; by default 1e5."""
    deepspeed_config: str = ""
    """DeepSpeed configuration file, in JSON, for settings that have no key here; it must not
    contradict the run file (see `longspan config show --deepspeed`)."""
