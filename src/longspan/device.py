"""Which device a run uses, and the values that "auto" stands for on it."""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager

import torch

from longspan.config import Run
from longspan.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The 16-bit dtypes of `train.precision`."""


def choose_device(run: Run, local_rank: int = 0) -> torch.device:
    """The device of the process that is `local_rank`-th on its machine."""
    wanted = run.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError('train.device is "cuda" and torch sees no CUDA device: use "cpu" or "auto"')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: there are "
            f"{torch.cuda.device_count()}; start as many processes"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve(run: Run, device: torch.device) -> Run:
    """The run with "auto" replaced by what it means on `device`."""
    train = run.train
    precision = train.precision
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp32"
    if precision == "fp16" and device.type == "cpu":
        raise UserError('train.precision is "fp16", which needs a GPU: use "fp32" on this machine')
    if device.type == "cuda" and run.model.head_dim % 8:
        raise UserError(
            f"model.hidden / model.heads = {run.model.head_dim} must be a multiple of 8 on a GPU: "
            "change one of them"
        )
    layout = run.layout
    is_hooked = run.engine.name == "deepspeed" and layout.zero == 3
    can_compile = device.type == "cuda" and layout.schedule != "zbv" and not is_hooked
    compiled = can_compile if train.compile == "auto" else train.compile
    settled = {"device": device.type, "precision": precision, "compile": compiled}
    return run.model_copy(update={"train": train.model_copy(update=settled)})


def autocast(run: Run) -> AbstractContextManager[object]:
    """Compute in the run's precision; weights stay float32."""
    dtype = DTYPES.get(run.train.precision)
    return torch.autocast(run.train.device, dtype=dtype, enabled=dtype is not None)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the GPU's allocator held, or this process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
