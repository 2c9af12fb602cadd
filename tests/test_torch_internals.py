"""Private torch APIs are used in one file, and still are what that file expects of them."""

from __future__ import annotations

import ast
import inspect
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from longspan import torch_internals

PACKAGE = Path(__file__).parents[1] / "src" / "longspan"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def dotted_name(node: ast.expr) -> list[str]:
    """["torch", "ops", "aten"] of `torch.ops.aten`; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted_name(node.value)):
        return [*before, node.attr]
    return []


def private_torch_names(path: Path) -> list[str]:
    found, torch_names = [], {"torch"}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if any(map(is_private, name.split(".")))]
            torch_names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            torch_imports = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            torch_names |= {alias.asname or "torch" for alias in torch_imports}
            names = [alias.name for alias in torch_imports]
            found += [name for name in names if any(map(is_private, name.split(".")))]
        if isinstance(node, ast.Assign) and dotted_name(node.value)[:1] == ["torch"]:
            torch_names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        name = dotted_name(node) if isinstance(node, ast.Attribute) else []
        if name and name[0] in torch_names and any(map(is_private, name[1:])):
            found.append(".".join(name))
    return found


def test_other_files_use_no_private_torch_name() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "torch_internals.py"]
    found = {str(path.relative_to(PACKAGE)): private_torch_names(path) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_private_names_are_found(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(
        "import torch\nimport torch.distributed as dist\nimport torch._dynamo\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "aten = torch.ops.aten\naten._flash_attention_forward(1)\n"
        "dist.distributed_c10d._get_default_group()\ntorch.__version__\n"
    )
    assert private_torch_names(file) == [
        "torch._dynamo",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "aten._flash_attention_forward",
        "dist.distributed_c10d._get_default_group",
    ]


ATTENTION_INPUTS = "Tensor query, Tensor key, Tensor value"
BACKWARD_INPUTS = f"Tensor grad_out, {ATTENTION_INPUTS}, Tensor out, Tensor logsumexp"
SCHEMAS = {
    "_c10d_functional.all_to_all_single": (
        "Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, "
    ),
    "_c10d_functional.wait_tensor": "Tensor tensor",
    "aten._scaled_dot_product_flash_attention_for_cpu": (
        f"{ATTENTION_INPUTS}, float dropout_p=0., bool is_causal=False, *, "
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        f"{BACKWARD_INPUTS}, float dropout_p, bool is_causal, *, "
    ),
    "aten._flash_attention_forward": (
        f"{ATTENTION_INPUTS}, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, bool return_debug_mask, *, "
    ),
    "aten._scaled_dot_product_flash_attention": (
        f"{ATTENTION_INPUTS}, float dropout_p=0., bool is_causal=False, "
    ),
    "aten._flash_attention_backward": (
        f"{BACKWARD_INPUTS}, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, "
    ),
    "aten._scaled_dot_product_cudnn_attention": (
        f"{ATTENTION_INPUTS}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, "
    ),
    "aten._scaled_dot_product_cudnn_attention_backward": (
        f"{BACKWARD_INPUTS}, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, *, "
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_take_the_arguments_that_are_passed(name: str) -> None:
    """Of the GPU's operators the schema is all that a CPU can check."""
    namespace, operator = name.split(".")
    schema = str(getattr(getattr(torch.ops, namespace), operator).default._schema)
    assert f"({SCHEMAS[name]}" in schema
    if namespace == "aten":
        assert "float? scale=None" in schema


def test_log_sum_exp_and_gradients_of_the_cpu_operator() -> None:
    q, k, v, grad = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(4))
    out, lse = torch_internals.cpu_flash_attention(q, k, v, is_causal=True, scale=0.3)
    scores = (0.3 * q @ k.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3)
    torch.testing.assert_close(out, expected.detach())
    found = torch_internals.cpu_flash_attention_backward(
        grad, q, k, v, out, lse, is_causal=True, scale=0.3
    )
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, grad))


def test_dispatch_modes_and_retained_graphs_are_seen() -> None:
    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert not torch_internals.has_dispatch_mode()
    with Mode():
        assert torch_internals.has_dispatch_mode()

    kept = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            kept.append(torch_internals.keeps_graph())
            return grad

    y = Identity.apply(torch.ones(1, requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    assert kept == [True, False]


def test_the_recompile_limit_is_raised_and_never_lowered() -> None:
    import torch._dynamo

    config = torch._dynamo.config
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        torch_internals.raise_recompile_limit(500)
        torch_internals.raise_recompile_limit(2)
        assert config.recompile_limit == config.accumulated_recompile_limit == 500


def test_private_parts_of_modules() -> None:
    linear = nn.Linear(2, 2)
    assert not torch_internals.has_forward_hooks(linear)
    linear.register_forward_pre_hook(lambda *_: None)
    assert torch_internals.has_forward_hooks(linear)
    assert list(inspect.signature(nn.Module._apply).parameters) == ["self", "fn", "recurse"]
    wrapped = torch_internals.checkpoint_wrapper(nn.Linear(2, 2), preserve_rng_state=False)
    assert wrapped(torch.ones(1, 2, requires_grad=True)).requires_grad
    assert "_checkpoint_wrapped_module.weight" not in wrapped.state_dict()


@pytest.fixture
def _one_rank(tmp_path: Path) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_collectives_of_one_rank() -> None:
    group = torch_internals.default_process_group()
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(torch_internals.all_reduce(x, group), x)
    received = torch_internals.all_to_all_async(x, [3], [3], group.group_name)
    assert torch.equal(torch_internals.wait(received), x)
    trace = torch_internals.flight_recorder_trace()
    assert trace is None or "entries" in trace
    placed = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch_internals.local_offset(placed) == (0, 0)


def test_fake_process_group_needs_no_other_process() -> None:
    dist.init_process_group("fake", rank=3, world_size=8, store=torch_internals.fake_store())
    try:
        mesh = init_device_mesh("cpu", (8,))
        placed = distribute_tensor(torch.empty(16, 2, device="meta"), mesh, [Shard(0)])
        assert placed.to_local().shape == (2, 2)
        assert torch_internals.local_offset(placed) == (6, 0)
    finally:
        dist.destroy_process_group()


def test_memory_snapshots_take_the_arguments_that_are_passed() -> None:
    """Without CUDA this is all that can be checked; a GPU test opens real snapshots."""
    memory: Any = torch.cuda.memory
    new = inspect.signature(memory._record_memory_history).parameters
    assert {"enabled", "stacks", "max_entries"} <= new.keys()
    assert next(iter(inspect.signature(memory._dump_snapshot).parameters)) == "filename"


def test_pools_of_captures_are_left_by_the_functions_that_are_called() -> None:
    """As torch itself calls them; a GPU test has a capture fail."""
    source = inspect.getsource(torch.cuda.memory.use_mem_pool)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert f"{name}(device_index, pool.id)" in source
        assert hasattr(torch._C, name)


class Capture:
    """What a capture whose end failed left of the allocator's pool, and its graph frees.

    As read from `CUDAGraph::capture_end` and `CUDAGraph::reset` of these versions.
    """

    def __init__(self, torch_version: str, *, has_ended: bool) -> None:
        self.is_left = has_ended or torch_version != "2.11.0"
        self.users = 1
        self._frees = has_ended or torch_version == "2.14.0"
        self._has_ended = has_ended

    def pool(self) -> tuple[int, int]:
        if not self._has_ended:
            raise RuntimeError("without a preceding successful capture")
        return (0, 1)

    def reset(self) -> None:
        self.users -= self._frees
        self._frees = False

    def leave(self, device: int, pool: tuple[int, int]) -> None:
        if self.is_left:
            raise RuntimeError("not currently recording to the pool")
        self.is_left = True

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.users -= 1


class Generator:
    """Of random numbers, which a failed capture may have left capturing."""

    def __init__(self, device: str, *, captures: bool = False) -> None:
        self.device, self.captures, self.seed = device, captures, 0

    def get_state(self) -> int:
        return self.seed

    def set_state(self, seed: int) -> None:
        self.seed = seed

    def graphsafe_get_state(self) -> Generator:
        return self

    def graphsafe_set_state(self, other: Generator) -> None:
        self.captures, self.seed = other.captures, other.seed


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.0"])
def test_a_pool_of_a_failed_capture_is_left_and_freed_once(
    version: str, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture: Any = Capture(version, has_ended=has_ended)
    generator = Generator("cuda:0", captures=version == "2.11.0" and not has_ended)
    generator.set_state(7)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", capture.leave)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", capture.release)
    abandoned = list[Any]()
    monkeypatch.setattr(torch_internals, "_abandoned", abandoned)
    torch_internals.abandon_capture(capture, (0, 1))
    capture.reset()
    assert (capture.is_left, capture.users, abandoned) == (True, 0, [capture])
    assert (generator.captures, generator.seed) == (False, 7)


def test_replicas_keep_their_buffers_without_a_warning(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replica = DistributedDataParallel(
                nn.BatchNorm1d(2), init_sync=False, **torch_internals.LEAVE_BUFFERS
            )
        assert not replica.will_sync_module_buffers()
    finally:
        dist.destroy_process_group()
