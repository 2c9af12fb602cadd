"""The formulas of activations against traces of the real block, with fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan.attention import Dilated
from longspan.attention.kernels import schedule
from longspan.config import Run
from longspan.device import autocast
from longspan.models import Decoder, new_decoder
from longspan.models.initial import allocate
from longspan.parallel.apply import apply_to_blocks
from longspan.planning.activations import Activations
from longspan.planning.parameters import Degrees
from longspan.planning.tracing import LiveMemory, trace_memory
from longspan.runfile import load_run
from tests.slow import slow

TOKENS = 4096
SIZES = {
    "fp8": ["model.hidden=128", "model.heads=8", "model.kv_heads=2", "model.ffn=448"],
    "bf16 stream": ["train.residual_precision=bf16"],
    "plain": ["model.hidden=64", "model.heads=4", "model.ffn=192"],
    "grouped": ["model.hidden=128", "model.heads=8", "model.kv_heads=2", "model.ffn=448"],
    "dense": ["model.hidden=64", "model.heads=4", "model.ffn=192", "attention.kind=dense"],
    "tiles": [
        *("model.hidden=128", "model.heads=8", "model.kv_heads=2", "model.ffn=448"),
        "train.mlp_tile_tokens=512",
    ],
    "dropout": ["model.hidden=64", "model.heads=4", "model.ffn=192", "model.dropout=0.1"],
    "sub-layer norms": [
        "model.hidden=64",
        "model.heads=2",
        "model.ffn=320",
        "model.sub_layer_norm=true",
    ],
}


LONGER = [pytest.param(sizes, "bf16", marks=slow("parity")) for sizes in ("dropout", "fp8")]


def run_of(sizes: str, precision: str, mode: str, *, compiles: bool, batch: int = 2) -> Run:
    options = [
        *SIZES[sizes],
        "model.layers=1",
        f"data.context={TOKENS // batch}",
        f"train.micro_batch={batch}",
        f"train.global_batch={batch}",
        "train.device=cpu",
        f"train.precision={precision}",
        f"train.compile={str(compiles).lower()}",
        f"train.activation_checkpointing={mode}",
    ]
    run = load_run(None, options)
    # A run on a CPU refuses it.
    train = run.train.model_copy(update={"fp8": sizes == "fp8"})
    return run.model_copy(update={"train": train})


def block_of(model: Decoder, run: Run) -> tuple[nn.Module, Tensor, Tensor]:
    """The block of `model`, allocated and wrapped, its input and the table of RoPE."""
    allocate(model, torch.device("cpu"))
    apply_to_blocks(model, run.train.model_copy(update={"compile": False}))
    rope = model.rope.table(torch.arange(run.data.context))
    shape = (run.train.micro_batch, run.data.context, run.model.hidden)
    dtype = torch.bfloat16 if run.train.residual_precision == "bf16" else torch.float32
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    return model.blocks[0], x, rope


def keys_of(model: Decoder, run: Run) -> list[Tensor]:
    """The keys of dropout for the block, if the run has any."""
    if not run.model.dropout:
        return []
    keys = model.dropout_keys(torch.arange(run.train.micro_batch), run.data.context)
    assert keys is not None
    return [keys]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        ("plain", "bf16"),
        ("grouped", "bf16"),
        ("grouped", "fp32"),
        ("sub-layer norms", "bf16"),
        ("dropout", "bf16"),
        ("bf16 stream", "bf16"),
        ("fp8", "bf16"),
        ("tiles", "bf16"),
    ],
)
def test_a_block_keeps_what_is_planned(sizes: str, precision: str, mode: str) -> None:
    run = run_of(sizes, precision, mode, compiles=False)
    planned = Activations(run, Degrees.of(run.layout, 1)).block()
    model = new_decoder(run)
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        block, leaf, rope = block_of(model, run)
        x, keys = leaf * 1, keys_of(model, run)
        before = memory.live
        with autocast(run.train):
            y = block(x, rope, None, None, *keys)
        # Its output takes the place of its input, which stays for the block itself.
        kept = memory.live - before - (2 * weights if planned.keeps_copies else 0)
        gradient = torch.empty_like(y)
        held = memory.live - y.nbytes  # which the next block would have freed by now
        del x
        memory.reset_peak()
        torch.autograd.backward([y], [gradient])
        peak = memory.peak - held - y.nbytes
    norms = sum(p.nbytes for p in model.blocks.parameters() if p.dim() == 1)
    scales = 7 * 2 * 4 if sizes == "fp8" else 0
    assert 0 <= kept - planned.total <= norms + scales  # norms' weights are rounded
    if sizes in ("sub-layer norms", "dropout", "bf16 stream", "tiles"):
        return  # on a CPU norms are several kernels, and take more than on a GPU
    workspace = planned.workspace - gradient.nbytes
    tolerance = 0.02 if sizes == "fp8" else 0.002
    assert peak == pytest.approx(workspace, abs=4 * weights + tolerance * workspace)


class _Traced(Exception):
    """The partitioned graph is there; nothing has to run."""


def saved_by_compiled(run: Run) -> list[Tensor]:
    """What the partitioner of torch.compile saves of a block, the output of the block first."""
    graphs: list[torch.fx.GraphModule] = []

    def forward(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        raise _Traced

    def partition(joint: Any, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)  # as inductor does
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=forward,
        decompositions=select_decomp_table,
        partition_fn=partition,
    )
    model = new_decoder(run)
    block, x, rope = block_of(model, run)
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with autocast(run.train), pytest.raises((BackendCompilerFailed, _Traced)):
        compiled(x, rope, None, None, *keys_of(model, run))
    output = graphs[0].graph.output_node()
    nodes = [node for node in output.args[0] if isinstance(node, torch.fx.Node)]  # type: ignore[union-attr]
    return [node.meta["val"] for node in nodes if node.op != "placeholder"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        ("grouped", "bf16"),
        ("plain", "fp32"),
        ("sub-layer norms", "bf16"),
        ("bf16 stream", "bf16"),
        ("tiles", "bf16"),
        *LONGER,
    ],
)
def test_a_compiled_block_keeps_what_is_planned(sizes: str, precision: str, mode: str) -> None:
    run = run_of(sizes, precision, mode, compiles=True)
    planned = Activations(run, Degrees.of(run.layout, 1)).block()
    saved = saved_by_compiled(run)
    weights = sum(p.numel() for p in new_decoder(run).blocks.parameters() if p.dim() > 1)
    expected = planned.total + (2 * weights if planned.keeps_copies else 0)
    scales = sum(x.numel() == 1 for x in saved)  # of fp8
    assert (scales > 0) == (sizes == "fp8" and mode == "none")
    assert sum(x.numel() * x.element_size() for x in saved) - 4 * scales == expected


def test_a_dense_compiled_block_keeps_the_same_as_a_dilated_one() -> None:
    dense, dilated = (
        sum(x.nbytes for x in saved_by_compiled(run_of(sizes, "bf16", "none", compiles=True)))
        for sizes in ("dense", "plain")
    )
    assert dense == dilated


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("segments", "rates", "tokens"),
    [
        ([2048, 4096, 8192], [1, 2, 4], 1 << 20),
        ([2048, 4096, 8192], [1, 2, 4], 2048),  # one branch has pairs of its own
        ([2048, 2048], [1, 2], 1 << 20),
        ([2048, 65536, 131072], [1, 32, 64], 1 << 20),
        ([8192, 8192, 8192], [1, 32, 2048], 1 << 20),  # the kernels launch other branches
        ([2000, 32000, 512000, 1024000], [1, 32, 32, 32], 1024000),  # not nested in all kernels
        ([3000, 4000], [1, 2], 1 << 20),
    ],
)
def test_attention_allocates_what_is_planned(
    segments: list[int],
    rates: list[int],
    tokens: int,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers of the backward kernels, allocated on the meta device, of the longest slab."""
    call = pytest.importorskip("longspan.attention.kernels.call")
    monkeypatch.setattr(call, "has_kernels", lambda _device, dtype, _dim: dtype.itemsize == 2)
    options = [f"attention.segment_lengths={segments}", f"attention.dilation_rates={rates}"]
    options += ["model.hidden=1024", "model.heads=16", "train.device=cuda", "model.layers=1"]
    run = load_run(None, [*options, f"data.context={tokens}", f"train.precision={precision}"])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pattern, meta = Dilated(tuple(segments), tuple(rates)), torch.device("meta")
    of_call = call.Call(1, tokens, 16, 1, 64, dtype, meta, pattern, True, False, False, 0.1)
    slab = max(each.stop - each.start for each in of_call.slabs)
    whole, q = of_call.whole_segments, torch.empty(1, slab, 16, 64, device=meta)
    partial = of_call.new_partial(slab) if whole is None else whole._new_partial(q)
    expected = 2 * partial.nbytes + (0 if whole is None else q.nbytes)
    assert Activations(run, Degrees.of(run.layout, 1)).attention_workspace(0) == expected
    assert slab == max(segments) or expected <= 4 * schedule.PARTIAL_BYTES


def test_any_module_can_be_traced() -> None:
    """Two layers: the hidden units are kept, as the ReLU's output, which the second layer reads."""
    with torch.device("meta"):
        module = nn.Sequential(
            nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 8, bias=False)
        )
        found = trace_memory(module, torch.empty(1000, 64))
        halved = trace_memory(module, torch.empty(1000, 64), precision="bf16")
    assert found.parameters == found.gradients == 4 * (64 * 256 + 256 * 8)
    assert found.activations == 4 * 1000 * 256
    assert halved.activations == 2 * (1000 * 64 + 1000 * 256 + 256 * 8)
    inputs = 4 * 1000 * 64
    # The gradients of the units, after the ReLU and before it, when that of the second layer is
    # there, and the output and its gradient are not.
    extra = found.peak - found.parameters - inputs - found.activations
    assert extra == pytest.approx(4 * (2 * 1000 * 256 + 256 * 8), abs=32)
    with pytest.raises(ValueError, match="precision must be one of fp32, bf16, fp16, got 'int8'"):
        trace_memory(module, torch.empty(1, 64), precision="int8")
