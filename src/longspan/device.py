"""The device of a run, and what "auto" values resolve to on it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from longspan.config import Run, Train
from longspan.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The autocast dtypes of `train.precision`."""

FP8_CAPABILITY = 8, 9
"""The first compute capability with fp8 units: Ada (RTX 4090, L40S); Hopper is 9.0."""


def choose_device(run: Run, local_rank: int = 0) -> torch.device:
    """Return the device of the process with this local rank."""
    wanted = run.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'train.device = "cuda" needs a CUDA device, but torch sees none: set "cpu" or "auto"'
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} needs its own GPU, but this machine has "
            f"{torch.cuda.device_count()}: start that many processes, or set train.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve(run: Run, device: torch.device) -> Run:
    """Return the run with each "auto" replaced by its value on `device`."""
    train = run.train
    precision = train.precision
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp32"
    if precision == "fp16" and device.type == "cpu":
        raise UserError('train.precision = "fp16" needs a GPU, but the device is a CPU: set "fp32"')
    for key in ("residual_precision", "parameter_precision"):
        if getattr(train, key) == "bf16" and precision != "bf16":
            raise UserError(
                f'train.{key} = "bf16" needs train.precision = "bf16", but it is "{precision}": '
                'set "fp32"'
            )
    if device.type == "cpu":
        check_fp8(train, device)
    if train.fp8 and precision != "bf16":
        raise UserError(
            f'train.fp8 = true needs train.precision = "bf16", but it is "{precision}": set false'
        )
    if run.track.memory_snapshot and device.type != "cuda":
        raise UserError(
            "track.memory_snapshot = true needs a CUDA GPU, but the device is a CPU: set false"
        )
    if train.cuda_graphs is True and device.type != "cuda":
        raise UserError(
            "train.cuda_graphs = true needs a CUDA GPU, but the device is a CPU: set false"
        )
    if device.type == "cuda" and run.model.head_dim % 8:
        raise UserError(
            "model.head_dim must be a multiple of 8 on a GPU, but it is "
            f"{run.model.head_dim}: set it, or change model.hidden or model.heads"
        )
    layout = run.layout
    has_zero3_hooks = run.engine.name == "deepspeed" and layout.zero == 3
    can_compile = device.type == "cuda" and layout.schedule != "zbv" and not has_zero3_hooks
    compiled = can_compile if train.compile == "auto" else train.compile
    resolved = {"device": device.type, "precision": precision, "compile": compiled}
    return run.model_copy(update={"train": train.model_copy(update=resolved)})


def check_fp8(train: Train, device: torch.device) -> None:
    """Refuse `train.fp8` on a device without fp8 units: apart from `resolve`, since a plan is made
    for other GPUs than this machine's.
    """
    if not train.fp8:
        return
    if device.type != "cuda":
        raise UserError("train.fp8 = true needs a GPU, but the device is a CPU: set false")
    if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        needed, has = (".".join(map(str, version)) for version in (FP8_CAPABILITY, found))
        raise UserError(
            f"train.fp8 = true needs a GPU with compute capability {needed} or newer, but "
            f"{torch.cuda.get_device_name(device)} has {has}: set false"
        )


def autocast(train: Train) -> AbstractContextManager[object]:
    """Return the autocast context of the run's mixed precision."""
    dtype = DTYPES.get(train.precision)
    return torch.autocast(train.device, dtype=dtype, enabled=dtype is not None)


@contextmanager
def matmul_precision(train: Train) -> Iterator[None]:
    """A context with the run's precision of float32 products; afterwards it is as it was before."""
    if train.matmul_precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(train.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of the CUDA allocator, or the peak resident set size on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes that the CUDA allocator has given to tensors, and that it holds; empty on CPU."""
    if device.type != "cuda":
        return {}
    return {
        "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(device),
    }
