"""Every private torch API that Longspan uses, in one file.

All were read from torch 2.11 and 2.13, whose signatures agree in what is used here. A torch release
that changes one fails in tests/test_torch_internals.py, and only this file needs to follow.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "ALL_TO_ALL",
    "ATTENTION_FORWARDS",
    "CHECKPOINT_PREFIX",
    "FP8_PRODUCT",
    "LEAVE_BUFFERS",
    "TorchDispatchMode",
    "abandon_capture",
    "all_reduce",
    "all_to_all_async",
    "assume_static_shapes",
    "checkpoint_wrapper",
    "clear_sharding_cache",
    "compiled_product",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "cudnn_attention",
    "cudnn_attention_backward",
    "default_process_group",
    "efficient_attention",
    "efficient_attention_backward",
    "end_compile_workers",
    "fake_store",
    "fake_tensors",
    "flash_attention",
    "flash_attention_backward",
    "flight_recorder_trace",
    "foreach_mul_",
    "has_dispatch_mode",
    "has_forward_hooks",
    "keeps_graph",
    "local_offset",
    "never_compiled",
    "process_group_of",
    "raise_recompile_limit",
    "record_memory_history",
    "sdpa_flash_attention",
    "sum_of_squares",
    "tree_leaves",
    "tree_map_only",
    "wait",
    "write_memory_snapshot",
]

# Dispatch modes, autograd and the compiler


def has_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode is active, e.g. one that counts FLOPs or selects activations."""
    return _get_current_dispatch_mode() is not None


def keeps_graph() -> bool:
    """Inside a backward pass: whether it was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def raise_recompile_limit(graphs: int) -> None:
    """Lets torch.compile build this many graphs per function, if more than before; 8 at first.

    Modules of one class count together: the function is its forward.
    """
    import torch._dynamo  # loaded only when something is compiled

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)


@contextmanager
def compiled_product(product: Callable[..., Tensor]) -> Iterator[None]:
    """Has code that torch.compile generates call `product(a, b, out=out)` instead of `torch.mm`."""
    from torch._inductor.kernel import mm  # noqa: F401  registers it
    from torch._inductor.select_algorithm import extern_kernels

    before = extern_kernels.mm  # type: ignore[attr-defined]
    extern_kernels.mm = product  # type: ignore[attr-defined]
    try:
        yield
    finally:
        extern_kernels.mm = before  # type: ignore[attr-defined]


def end_compile_workers() -> None:
    """Ends the processes in which torch.compile compiles, for which the interpreter would wait at
    its end, without a word.
    """  # fmt: skip
    if module := sys.modules.get("torch._inductor.async_compile"):
        module.shutdown_compile_workers()


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which as a decorator would load torch.compile's modules, in more
    than a second, for everyone who imports the function.
    """

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return cast(R, disabled(*arguments, **options))
        return function(*arguments, **options)

    return wrapper


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# Collectives

LEAVE_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)
"""The option of DistributedDataParallel that has ranks keep their buffers: torch 2.13 renames it,
and warns of the old name. With `init_sync=False` both leave buffers alone."""

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
"""The operator behind `all_to_all_async`, as a selective checkpointing policy sees it."""


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Over all elements of tensors on one device, a float32 scalar, by few kernels."""
    is_double = any(x.dtype == torch.float64 for x in tensors)
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64 if is_double else torch.float32)
    return torch.stack(norms).square().sum().float()


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a scalar on their device, by few kernels."""
    torch._foreach_mul_(tensors, factor)


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The reduction of `x` over `group`, out of place; torch.compile can trace it."""
    reduced = _functional_collectives.all_reduce(x, op, group)
    out: Tensor = _functional_collectives.wait_tensor(reduced)  # type: ignore[no-untyped-call]
    return out


def all_to_all_async(
    x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: str
) -> Tensor:
    """Start to send send_counts[i] rows of `x` to rank i and receive receive_counts[i] from it.

    The result is complete after `wait`. `group` is a process group's name. torch.compile and
    selective checkpointing see the operator, which the public `all_to_all_single` hides.
    """
    received: Tensor = torch.ops._c10d_functional.all_to_all_single(
        x.contiguous(), list(receive_counts), list(send_counts), group
    )
    return received


def wait(x: Tensor) -> Tensor:
    """Wait for the result of `all_to_all_async`."""
    complete: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return complete


def default_process_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def process_group_of(arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group among the arguments of a collective operator.

    Operators of c10d take it as a script object, functional collectives its name as the last text.
    """
    for x in arguments:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return dist.ProcessGroup.unbox(x)
    names: list[Any] = [x for x in arguments if isinstance(x, str)]
    if not names:
        return None
    found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(names[-1])  # type: ignore[attr-defined]
    return found


def clear_sharding_cache() -> None:
    """Forget how DTensor operations were sharded: the cache refers to process groups by name, and
    later groups of this process get the same names.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def fake_store() -> Any:
    """A store for `init_process_group("fake", ...)`: a world without processes, for planning."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors have shapes and no memory, and collectives move nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import fake_collectives  # noqa: F401, registers collectives

    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def assume_static_shapes(schedule: Any) -> None:
    """Keep the ranks of a pipeline schedule from voting about shapes in their first step.

    torch 2.11 has no vote.
    """
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining import stage as stages_module

        static = stages_module.InferenceMode.STATIC  # type: ignore[attr-defined]

        def no_vote(stages: Sequence[Any], *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = static

        schedule._warmup_p2p = no_vote


def flight_recorder_trace() -> dict[str, Any] | None:
    """The trace of recent collectives; None if this build of torch has no flight recorder."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    trace: dict[str, Any] = json.loads(dump())
    return trace


def local_offset(x: DTensor) -> tuple[int, ...]:
    """The index in the full tensor at which this rank's shard begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


# Memory snapshots

MEMORY_EVENTS = 100_000
"""How many of the latest allocations and frees a snapshot holds; each takes about a kilobyte."""


def record_memory_history(*, enabled: bool) -> None:
    """Start or end the recording of CUDA allocations with their Python stacks."""
    memory: Any = torch.cuda.memory
    if enabled:
        memory._record_memory_history(stacks="python", max_entries=MEMORY_EVENTS)
    else:
        memory._record_memory_history(enabled=None)


def write_memory_snapshot(path: Path) -> None:
    """Write what was recorded as a pickle, which torch.cuda._memory_viz and its page read."""
    memory: Any = torch.cuda.memory
    memory._dump_snapshot(str(path))


# CUDA graphs

_abandoned = list[torch.cuda.CUDAGraph]()
"""The allocator of pinned memory goes on to ask them whether they capture."""


def abandon_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Have the allocator leave the pool of a capture that began and whose end failed, and free it.

    From torch 2.14 on `graph.reset()`, which is left to do, does so itself. 2.12 and 2.13 leave the
    pool, but never free it; 2.11 would allocate there for good, and refuse to draw random numbers.
    """
    if _torch_version() < (2, 14) and not _has_ended(graph):
        native: Any = torch._C
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # it has been left
            native._cuda_endAllocateToPool(device, pool)
        native._cuda_releasePool(device, pool)
        if _torch_version() < (2, 12):
            generator = torch.cuda.default_generators[device]
            fresh = torch.Generator(generator.device)
            fresh.set_state(generator.get_state())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())
    _abandoned.append(graph)


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a capture ended, and failed only to become executable: it frees its pool itself."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


# Activation checkpointing: `checkpoint_wrapper` is imported above, and CHECKPOINT_PREFIX, which it
# puts into the names of parameters.

# torch.compile warns of in-place operators in a selectively checkpointed region; blocks have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)

_aten = torch.ops.aten
ATTENTION_FORWARDS: frozenset[Any] = frozenset(
    {
        _aten._flash_attention_forward.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Forward operators of `scaled_dot_product_attention`, whose outputs are costly to recompute."""
FP8_PRODUCT = _aten._scaled_mm.default
"""The matrix product of fp8 tensors."""


# Attention operators that return the log-sum-exp, which `scaled_dot_product_attention` hides, and
# accept it in their backward pass. They take (batch, heads, tokens, head_dim) and a log-sum-exp
# (batch, heads, tokens), except that flash attention takes (batch, tokens, heads, head_dim).
# No dropout: the random state is passed, but never read.


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return out, lse


def cpu_flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )
    return grad_q, grad_k, grad_v


EFFICIENT_ROWS = 32
"""Memory-efficient attention reads so many rows of a log-sum-exp at once, which it pads to that."""


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def efficient_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % EFFICIENT_ROWS), value=torch.inf)
    # The kernel takes it for granted that the heads of a token follow each other in `out`.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded.contiguous(), rng_state[0], rng_state[1], 0.0,
        [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, is_causal, False, scale=scale
    )
    return out, lse


def sdpa_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Flash attention with the layout of `cpu_flash_attention`, differentiable by autograd."""
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v = _aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, is_causal, rng_state,
        rng_state, scale=scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse[..., None], rng_state[0], rng_state[1], None, None, None,
        q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v
