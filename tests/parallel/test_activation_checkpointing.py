"""Activation checkpointing and offload: less memory, and bitwise equal weights.

Offload here takes tensors of any size; `test_activation_offload.py` has what it offloads.
"""

from __future__ import annotations

from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from longspan.config import Run
from longspan.models import build_decoder
from longspan.nn import products, residual
from longspan.parallel import activation_offload, apply
from longspan.parallel.apply import apply_to_blocks
from longspan.runfile import load_run
from longspan.training import train
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import run_steps

SMALL = [
    "model.hidden=32",
    "model.layers=3",
    "model.heads=2",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
    "train.steps=3",
    "train.warmup_steps=2",
    "train.global_batch=2",
]
CHANGES = [
    ["train.activation_checkpointing=selective"],
    ["train.activation_checkpointing=full"],
    ["train.offload_activations=true"],
    ["train.activation_checkpointing=full", "train.offload_activations=true"],
    ["train.activation_checkpointing=full", "train.recompute_layers=1"],
    ["train.offload_activations=true", "train.offload_limit_gib=0.0001"],
]


def run_of(*overrides: str, world: int = 1) -> Run:
    return load_run(None, [*SMALL, *overrides], world=world)


def final_bytes(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / "step-00000003"
    return {path.name: path.read_bytes() for path in folder.glob("model-*.safetensors")}


@pytest.mark.parametrize("kind", ["dilated", "dense"])
def test_weights_are_bitwise_equal(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    dense = ["attention.kind=dense", "attention.segment_lengths=[]", "attention.dilation_rates=[]"]
    pattern = dense if kind == "dense" else []
    train(run_of(*pattern), tmp_path / "plain")
    for number, changes in enumerate(CHANGES):
        train(run_of(*pattern, *changes), tmp_path / str(number))
        assert final_bytes(tmp_path / str(number)) == final_bytes(tmp_path / "plain")


def compare_steps(rank: int, world: int, layout: str) -> bool:
    """Whether two steps with each change end in the same local weights as without any.

    Of an MLP in tiles, which sums in another order, nearly the same.
    """
    activation_offload.MIN_BYTES = 0
    tiles = [] if "tensor" in layout else [["train.mlp_tile_tokens=24", *CHANGES[1]]]
    plain, *changed = (
        run_steps(rank, world, run_of(layout, *change, world=world), 2).shards
        for change in ([], *CHANGES[1:3], *tiles)
    )
    same = [torch.equal, torch.equal, partial(torch.allclose, atol=1e-6)]
    return all(
        shards.keys() == plain.keys()
        and all(is_same(x.values, plain[name].values) for name, x in shards.items())
        for shards, is_same in zip(changed, same, strict=False)
    )


@pytest.mark.parametrize(
    "layout",
    [
        "layout.zero=3",
        "layout.tensor=2",
        pytest.param("layout.pipeline=2", marks=slow("parity")),
        pytest.param("layout.sequence=2", marks=slow("parity")),
    ],
)
def test_weights_are_bitwise_equal_in_a_layout(ranks: Ranks, layout: str) -> None:
    assert ranks.run(compare_steps, 2, layout) == [True, True]


def test_a_run_resumes_without_it(tmp_path: Path) -> None:
    train(run_of(), tmp_path / "plain")
    train(run_of("train.activation_checkpointing=full", "train.steps=2"), tmp_path / "changed")
    train(run_of(), tmp_path / "changed", resume=True)
    assert final_bytes(tmp_path / "changed") == final_bytes(tmp_path / "plain")


def saved_bytes(mode: str, *, compiled: bool = False) -> int:
    """Bytes of activations saved for the backward pass, without the weights."""
    train = [f"train.activation_checkpointing={mode}", f"train.compile={str(compiled).lower()}"]
    run = run_of("data.context=256", *train)
    model = build_decoder(run, torch.device("cpu"))
    apply_to_blocks(model, run.train)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    tokens, targets = torch.randint(256, (2, 1, 256)).unbind()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, targets)
    assert loss.requires_grad
    return sum(saved.values())


def test_full_saves_fewer_activations() -> None:
    assert saved_bytes("full") < saved_bytes("none") / 3


@pytest.fixture
def no_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are compiled as far as the partition of their forward and backward graphs."""
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", partialmethod(compile_block, backend="aot_eager_decomp_partition")
    )


@pytest.mark.usefixtures("no_generated_code")
def test_the_graphs_of_earlier_models_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "GRAPHS_PER_MODULE", 0)
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (32, 64):
            run = run_of(f"model.hidden={width}", "train.compile=true")
            model = build_decoder(run, torch.device("cpu"))
            apply_to_blocks(model, run.train)
            tokens = torch.randint(256, (1, 64))
            model(tokens, tokens)


@pytest.mark.usefixtures("no_generated_code")
@pytest.mark.parametrize(
    "attention",
    [
        ["attention.kind=window", "attention.window=9", "attention.sinks=2"],
        ["attention.kind=block_sparse", "attention.block_size=8", "attention.local_window=16"],
    ],
    ids=["window", "block sparse"],
)
def test_blocks_of_the_reference_backend_are_compiled_whole(attention: list[str]) -> None:
    tokens, documents = torch.randint(256, (1, 64)), (torch.arange(64) // 25)[None]
    found = []
    for is_compiled in ("false", "true"):
        branches = ["attention.segment_lengths=[]", "attention.dilation_rates=[]"]
        run = run_of(*attention, *branches, "model.layers=1", f"train.compile={is_compiled}")
        torch.manual_seed(0)
        model = build_decoder(run, torch.device("cpu"))
        apply_to_blocks(model, run.train)
        loss = model(tokens, tokens, documents)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    eager, compiled = found
    torch.testing.assert_close(compiled, eager)


class Wider(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@pytest.mark.usefixtures("no_generated_code")
def test_a_model_of_many_different_blocks_is_compiled_whole() -> None:
    model = nn.Sequential(*map(Wider, range(3, 15)))
    names = [name for name, _ in model.named_children()]
    apply.wrap_modules(model, names, lambda _, module: module, compiles=True, fullgraph=True)
    assert model(torch.ones(2, 3)).shape == (2, 15)  # a block that is not compiled raises


@pytest.mark.usefixtures("no_generated_code")
def test_the_compiler_saves_what_selective_says() -> None:
    none, selective, full = (saved_bytes(m, compiled=True) for m in ("none", "selective", "full"))
    run = run_of("data.context=256")
    # Seven products per block, three of them with `ffn` columns or from them, and the attention.
    widths = 4 * run.model.hidden + 2 * run.model.ffn
    assert selective - full >= 4 * 256 * widths * run.model.layers
    assert selective < none


@pytest.mark.usefixtures("no_generated_code")
@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_products_that_add_the_residual_stream_are_recomputed_as_others(
    mode: str, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "full" that of attention, which the MLP needs, and not that of the MLP."""
    monkeypatch.setattr(products, "_are_chosen", True)
    monkeypatch.setattr(products, "LEAST_TOKENS", 8)
    monkeypatch.setattr(products, "FEATURES", range(8, 256))
    calls = []

    def spy(a: Tensor, b: Tensor, *, out: Tensor, addend: Tensor) -> Tensor:
        calls.append(tuple(b.shape))
        return torch.addmm(addend, a, b, out=out)

    monkeypatch.setattr(residual, "product", spy)
    rounded = ["train.precision=bf16", "train.residual_precision=bf16", "train.compile=true"]
    run = run_of(*rounded, "model.layers=1", f"train.activation_checkpointing={mode}")
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = build_decoder(run, torch.device("cpu"))
        apply_to_blocks(model, run.train.model_copy(update={"compile": is_compiled}))
        tokens = torch.randint(256, (1, 64))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        forward = len(calls)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    hidden, ffn = run.model.hidden, run.model.ffn
    assert calls == [(hidden, hidden), (ffn, hidden), *[(hidden, hidden)] * again]
    assert forward == 2
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()
