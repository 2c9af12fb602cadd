"""Which part of each parameter a rank holds: arithmetic on shapes, as `parallel` splits them.

`counting.py` counts the same by parallelizing the model itself, in a fake process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from longspan.attention import Pattern, patterns_of
from longspan.config import Layout, Model, Run
from longspan.costs import Shape, block_shapes, linear_sizes, lora_rank_of, rank_of, trains
from longspan.flops import stage_flops
from longspan.parallel.pipeline_schedule import StagePlan, plan_stages

SIGN_TABLE_BYTES = 8 * 256
"""The table with which each sketched layer unpacks its signs."""


class RankParameter(NamedTuple):
    """A parameter on a rank, in elements."""

    name: str
    """As in one process; that of the first block for blocks that are the same."""
    local: int
    """Of the rank's shard."""
    gathered: int
    """After FSDP2's all-gather: all, or a tensor-parallel shard."""
    copies: int
    """The number of blocks that this one stands for."""

    @property
    def block(self) -> int | None:
        """The index of the block, None outside of the blocks."""
        return int(self.name.split(".")[1]) if self.name.startswith("blocks.") else None


class Degrees(NamedTuple):
    """The ranks of each axis, and what follows from them for parameters."""

    replicate: int
    shard: int
    sequence: int
    tensor: int
    pipeline: int
    offload: bool = False

    @staticmethod
    def of(layout: Layout, gpus: int) -> Degrees:
        return Degrees(**layout.resolve(gpus), offload=layout.offload)

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 shards over: those that split a sequence are among them."""
        return self.shard * self.sequence

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the parameters; where every rank has the whole model, DDP does."""
        is_ddp = 1 < self.data * self.sequence * self.tensor * self.pipeline == self.replicate
        return (self.data * self.sequence > 1 or self.offload) and not is_ddp

    @property
    def can_reshard(self) -> bool:
        """Whether freeing a block's parameters frees memory: other ranks or the CPU have them."""
        return self.shards > 1 or self.offload

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Where a rank stands on the pipeline, the shard and the tensor axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shards)
        return rest // self.replicate, shard, tensor


class ModelSplit:
    """A run's model, split over the axes of a layout of `gpus` processes."""

    def __init__(self, run: Run, gpus: int) -> None:
        self.run, self.gpus, self.degrees = run, gpus, Degrees.of(run.layout, gpus)
        self.patterns = patterns_of(run.attention, run.model.layers)
        self.stages: StagePlan | None = None
        if self.degrees.pipeline > 1:
            flops = stage_flops(run.model, self.patterns, run.data.context)
            self.stages = plan_stages(run.layout, run.model.layers, flops, self.degrees.pipeline)
        self._kinds = _block_kinds(run)
        self._parameters_differ = parameters_differ(run)

    def first_rank(self, stage: int) -> int:
        """The first rank at an index of the pipeline axis; no other there has larger shards."""
        return stage * self.gpus // self.degrees.pipeline

    def layers(self, stage: int) -> list[range]:
        """The layers of each of the stages of a pipeline rank."""
        if self.stages is None:
            return [range(self.run.model.layers)]
        return [self.stages.layers[i] for i in self.stages.by_rank[stage]]

    def has_ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a pipeline rank has the embedding, and the last norm and the head."""
        if self.stages is None:
            return True, True
        held = self.stages.by_rank[stage]
        return 0 in held, self.stages.last in held

    def blocks(self, stage: int) -> list[tuple[int, int]]:
        """Blocks of a pipeline rank in order, and how many from each on are the same."""
        return [
            (same[0], len(same))
            for layers in self.layers(stage)
            for same in (list(x) for _, x in groupby(layers, self._kinds.__getitem__))
        ]

    def _parameter_blocks(self, stage: int) -> list[tuple[int, int]]:
        """Like `blocks`, of blocks whose parameters are the same."""
        layers = self.layers(stage)
        if self._parameters_differ:
            return [(block, 1) for blocks in layers for block in blocks]
        return [(blocks[0], len(blocks)) for blocks in layers]

    def parameters(self, rank: int) -> list[RankParameter]:
        """The parameters of a rank."""
        degrees = self.degrees
        stage, shard, tensor = degrees.coordinates(rank)
        shards = degrees.shards if degrees.is_fsdp else 1
        found = []
        for name, shape, copies in self._parameters(stage):
            split = None if degrees.tensor == 1 else tensor_dim(self.run.model, name)
            held = list(shape)
            if split is not None:
                held[split] = _chunk(shape[split], degrees.tensor, tensor)
            local = _chunk(held[0], shards, shard) * math.prod(held[1:])
            whole = math.prod(shape)
            gathered = whole if split is None else -(-whole // degrees.tensor)
            found.append(RankParameter(name, local, gathered, copies))
        return found

    def sign_bytes(self, stage: int) -> int:
        """Bytes of the signs of sketched layers on a pipeline rank, which `tensor` alone splits."""
        if self.run.model.linear != "sketched":
            return 0
        total = 0
        for block, copies in self._parameter_blocks(stage):
            shapes = block_shapes(self.run.model, block).items()
            factors = [math.prod(shape) for name, shape in shapes if name.endswith((".s1", ".s2"))]
            packed = sum(-(-size // self.degrees.tensor // 8) for size in factors)
            total += copies * (packed + SIGN_TABLE_BYTES * len(factors) // 2)
        return total

    def _parameters(self, stage: int) -> Iterator[tuple[str, Shape, int]]:
        """Names, shapes and copies of the parameters on a pipeline rank."""
        model = self.run.model
        has_embedding, has_head = self.has_ends(stage)
        matrix = (model.vocab, model.hidden)
        if has_embedding:
            yield "embedding.weight", matrix, 1
        for block, copies in self._parameter_blocks(stage):
            for name, shape in block_shapes(model, block).items():
                yield f"blocks.{block}.{name}", shape, copies
        if has_head:
            yield "norm.weight", (model.hidden,), 1
            if not model.tie_embeddings or self.stages is not None:
                # The last stage has a copy of a tied embedding.
                yield f"{'embedding' if model.tie_embeddings else 'head'}.weight", matrix, 1


def tensor_dim(model: Model, name: str) -> int | None:
    """The dimension of a parameter that the tensor axis splits; None if it is replicated."""
    *_, module, kind = name.split(".")
    if kind in ("lora_a", "lora_b"):  # of columns torch's style splits all, of rows W alone
        return None if module in ("out", "down") else 0
    if kind in ("s1", "s2"):
        return 0 if kind == "s1" else 1
    if kind == "bias" and module in ("out", "down"):
        # Added after the all-reduce, unless the layer is factored and splits its features.
        layer = name.removesuffix(".bias")
        is_factored = rank_of(model, layer, *linear_sizes(model)[layer.split(".", 2)[2]]) > 0
        return 0 if is_factored else None
    if module in ("out", "down"):
        return 1
    if module in ("query_norm", "key_norm"):  # over the width of a head
        return None
    if "norm" in module:
        # Sub-layer norms are over heads or the MLP's width; the others over features, which are
        # split with sketched and low-rank layers only.
        is_split = model.linear != "dense" or (module == "norm" and name.startswith("blocks."))
        return 0 if is_split else None
    return 0


def _block_kinds(run: Run) -> list[tuple[Pattern, Shape, tuple[str, ...], str]]:
    """What blocks may differ in, of each: the pattern, the ranks of their linear layers, the names
    of frozen parameters, and activation checkpointing.
    """
    patterns = patterns_of(run.attention, run.model.layers)
    modes = [run.train.checkpointing_of(block) for block in range(run.model.layers)]
    return list(zip(patterns, _linear_ranks(run.model), _frozen(run), modes, strict=True))


def _frozen(run: Run) -> list[tuple[str, ...]]:
    """The names of those parameters of each block, within it, that `train.freeze` matches."""
    model, freeze = run.model, run.train.freeze
    if not freeze:
        return [()] * model.layers
    return [
        tuple(x for x in block_shapes(model, i) if not trains(model, freeze, f"blocks.{i}.{x}"))
        for i in range(model.layers)
    ]


def _linear_ranks(model: Model) -> list[Shape]:
    """The ranks of the linear layers of each block and of their updates; none if all are dense."""
    has_ranks = model.linear != "dense" or model.lora.rank > 0
    sizes = linear_sizes(model) if has_ranks else {}
    return [
        tuple(
            rank_of(model, layer, *size) or lora_rank_of(model, layer)
            for name, size in sizes.items()
            for layer in (f"blocks.{block}.{name}",)
        )
        for block in range(model.layers)
    ]


def blocks_differ(run: Run) -> bool:
    """Whether blocks differ in anything that a plan depends on."""
    return len(set(_block_kinds(run))) > 1


def parameters_differ(run: Run) -> bool:
    """Whether blocks differ in the shapes of their parameters, or in which of them are frozen."""
    return len(set(zip(_linear_ranks(run.model), _frozen(run), strict=True))) > 1


def _chunk(size: int, ranks: int, rank: int) -> int:
    """The rows of a rank in torch.chunk's split of `size`: all but the last ones are as large."""
    rows = -(-size // ranks)
    return max(0, min(rows, size - rank * rows))
