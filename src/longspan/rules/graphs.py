"""What `train.cuda_graphs` asks of the other keys, and when "auto" takes them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from longspan.config import Attention, Data, Engine, Layout, Model, Run, Train
from longspan.rules.problem import Problem, Problems

MOST_TOKENS = 65_536
"""Of a micro-batch, for "auto": beyond, with 125 million parameters and more, the host launches
kernels long before the device is ready for them."""
MOST_HEAD_DIM = 256
"""That kernels support: the reference backend reads tables from the host."""
CAPTURED_KINDS = ("dense", "dilated")
"""The kernels of other kinds of attention read tables in caches that may drop them."""


def graph_rules(
    train: Train, model: Model, attention: Attention, data: Data, engine: Engine
) -> Problems:
    if train.cuda_graphs is True:
        for obstacle in _obstacles(train, model, attention, data, engine):
            yield Problem("train.cuda_graphs", f"true {obstacle}: use false")


def graph_layout_rules(train: Train, layout: Layout, world: int) -> Problems:
    if train.cuda_graphs is True:
        for obstacle in _layout_obstacles(layout, world):
            yield Problem("train.cuda_graphs", f"true {obstacle}: use false")


def takes_graphs(run: Run, world: int) -> bool:
    """Whether the passes of a run on GPUs are captured."""
    train = run.train
    if train.cuda_graphs != "auto":
        return train.cuda_graphs
    obstacles = chain(
        _obstacles(train, run.model, run.attention, run.data, run.engine),
        _layout_obstacles(run.layout, world),
    )
    return train.micro_batch * run.data.context <= MOST_TOKENS and not any(obstacles)


def _obstacles(
    train: Train, model: Model, attention: Attention, data: Data, engine: Engine
) -> Iterator[str]:
    other = next((kind for kind in attention.kinds if kind not in CAPTURED_KINDS), None)
    refused = {
        'needs a GPU, but train.device is "cpu"': train.device == "cpu",
        f'needs engine.name = "native", but it is "{engine.name}"': engine.name != "native",
        f'is not supported with attention.kind = "{other}"': other is not None,
        f"is not supported with model.head_dim = {model.head_dim}, above {MOST_HEAD_DIM}": (
            model.head_dim > MOST_HEAD_DIM
        ),
        'is not supported with data.documents = "isolate"': data.isolates,
        "is not supported with train.chunk_tokens": train.chunk_tokens > 0 or train.has_auto_chunks,
        "is not supported with train.offload_activations = true": train.offload_activations,
    }
    return (message for message, holds in refused.items() if holds)


def _layout_obstacles(layout: Layout, world: int) -> Iterator[str]:
    refused = {
        f"needs one process, but there are {world}": world > 1,
        "is not supported with layout.offload = true": layout.offload,
    }
    return (message for message, holds in refused.items() if holds)
