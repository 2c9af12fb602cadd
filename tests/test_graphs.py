"""`train.cuda_graphs`: what it is refused with, and when "auto" takes them."""

from __future__ import annotations

import pytest
import torch

from longspan.device import resolve
from longspan.errors import UserError
from longspan.hardware import devices
from longspan.planning.ladder import ladder
from longspan.rules import takes_graphs
from longspan.runfile import load_run

JOINED = ["data.documents=join"]
DENSE = [*JOINED, "attention.kind=dense"]
OBSTACLES = [
    (DENSE, 2, "needs one process, but there are 2"),
    ([*DENSE, "engine.name=accelerate"], 1, 'needs engine.name = "native", but it is "accelerate"'),
    ([*DENSE, "engine.name=deepspeed"], 1, 'needs engine.name = "native", but it is "deepspeed"'),
    (
        [*JOINED, "attention.kind=window", "attention.window=64"],
        1,
        'is not supported with attention.kind = "window"',
    ),
    (
        [*JOINED, "attention.kind=block_sparse", "attention.local_window=256"],
        1,
        'is not supported with attention.kind = "block_sparse"',
    ),
    (
        [*JOINED, "attention.kind=dilated_block_sparse", "attention.local_window=256"],
        1,
        'is not supported with attention.kind = "dilated_block_sparse"',
    ),
    (
        [*JOINED, "model.hidden=640", "model.heads=2", "model.head_dim=320"],
        1,
        "is not supported with model.head_dim = 320, above 256",
    ),
    ([*DENSE, "data.documents=isolate"], 1, 'is not supported with data.documents = "isolate"'),
    ([*DENSE, "train.chunk_tokens=1024"], 1, "is not supported with train.chunk_tokens"),
    (
        [*DENSE, "train.offload_activations=true"],
        1,
        "is not supported with train.offload_activations",
    ),
    ([*DENSE, "layout.offload=true"], 1, "is not supported with layout.offload = true"),
]


@pytest.mark.parametrize(("options", "world", "message"), OBSTACLES)
def test_what_stands_against_graphs_is_named_and_auto_goes_without(
    options: list[str], world: int, message: str
) -> None:
    gpu = [*options, "train.device=cuda"]
    with pytest.raises(UserError, match=f"(?m)^  train.cuda_graphs .*true {message}.*: use false$"):
        load_run(None, [*gpu, "train.cuda_graphs=true"], world=world)
    assert not takes_graphs(load_run(None, gpu, world=world), world)


def test_without_a_layout_for_graphs_the_search_says_why() -> None:
    asked = [*DENSE, "train.device=cuda", "train.cuda_graphs=true", "layout=auto"]
    refusal = "train.cuda_graphs true needs one process, but there are 2: use false"
    with pytest.raises(UserError, match=f"no layout of 2 devices fits .*: {refusal}"):
        load_run(None, asked, world=2, hardware="h200")
    run = load_run(None, asked, world=1, hardware="h200")
    assert takes_graphs(run, 1)


def test_graphs_are_asked_for_before_chunks_are_known() -> None:
    chosen = [*DENSE, "train.device=cuda", "train.chunk_tokens=auto"]
    with pytest.raises(
        UserError, match=r"true is not supported with train\.chunk_tokens: use false"
    ):
        load_run(None, [*chosen, "train.cuda_graphs=true"])
    assert takes_graphs(load_run(None, chosen), 1)  # whose sequences fit as a whole


def test_graphs_need_a_gpu() -> None:
    asked = [*DENSE, "train.cuda_graphs=true"]
    with pytest.raises(UserError, match=r'train\.device is "cpu": use false'):
        load_run(None, [*asked, "train.device=cpu"])
    run = load_run(None, [*asked, "train.device=auto"])
    with pytest.raises(UserError, match="needs a CUDA GPU, but the device is a CPU: set false"):
        resolve(run, torch.device("cpu"))


@pytest.mark.parametrize("pattern", [DENSE, JOINED])  # the default is dilated
@pytest.mark.parametrize(
    ("micro_batch", "context", "expected"), [(8, 8192, True), (1, 65536, True), (9, 8192, False)]
)
def test_auto_takes_graphs_for_micro_batches_of_few_tokens(
    micro_batch: int, context: int, expected: bool, pattern: list[str]
) -> None:
    sizes = [f"train.micro_batch={micro_batch}", f"train.global_batch={2 * micro_batch}"]
    sizes += [f"data.context={context}", "train.device=cuda"]
    run = load_run(None, [*pattern, *sizes])
    assert takes_graphs(run, 1) == expected
    assert takes_graphs(load_run(None, [*pattern, *sizes, "train.cuda_graphs=true"]), 1)
    assert not takes_graphs(load_run(None, [*pattern, *sizes, "train.cuda_graphs=false"]), 1)


def test_changes_that_graphs_refuse_are_not_suggested() -> None:
    options = [*JOINED, "model.preset=125m", "data.context=1048576", "train.global_batch=1"]
    options += ["train.micro_batch=1", "train.device=cuda", "train.precision=bf16"]
    gpu = devices()["h100"]
    for value in ("auto", "true"):
        run = load_run(None, [*options, f"train.cuda_graphs={value}"], world=1)
        found = ladder(run, 1, gpu, gpu.memory)
        assert found is not None
        text = str(found)
        for refused in ("chunk_tokens", "offload_activations", "layout.offload", "layout.shard"):
            assert (refused in text) == (value == "auto")
        assert found.together is not None
        load_run(None, [*options, f"train.cuda_graphs={value}", *found.together.settings], world=1)


def test_auto_launches_modules_of_the_users() -> None:
    run = load_run(None, ["model.factory=a:b", "train.device=cuda"])
    assert not takes_graphs(run, 1)
