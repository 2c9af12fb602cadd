"""A collective of a training step, and what all of them depend on."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.config import Run
from longspan.costs import Shape, block_shapes, head_name, trains
from longspan.parallel.choices import residual_split
from longspan.planning.network import BUS_FACTORS
from longspan.planning.parameters import ModelSplit, tensor_dim

FLOAT32 = 4
"""Bytes of an element."""


@dataclass(frozen=True)
class Traffic:
    """A collective that a rank takes part in, some times in every step."""

    axis: str
    """The mesh axis whose ranks communicate; "world" for all of them."""
    collective: str
    """A key of `network.BUS_FACTORS`."""
    ranks: int
    """In the group."""
    bytes: int
    """Of the larger of this rank's input and output, per call."""
    calls: int
    """Per step. Sends and receives between pipeline stages count one each."""
    purpose: str
    overlaps: bool = False
    """Whether compute that does not need the result runs at the same time."""
    is_sparse: bool = False
    """Of an all-to-all: its bytes are all sent to other ranks, none to the rank itself."""

    @property
    def step_bytes(self) -> int:
        return self.bytes * self.calls

    @property
    def bus_bytes(self) -> float:
        """Bytes per call that cross the busiest link (see `network`)."""
        factor = 1.0 if self.is_sparse else BUS_FACTORS[self.collective](self.ranks)
        return factor * self.bytes


class Step:
    """What the collectives of a step on one rank depend on."""

    def __init__(self, run: Run, gpus: int, pipeline_rank: int) -> None:
        self.run, self.model, self.layout = run, run.model, run.layout
        self.world, self.pipeline_rank = gpus, pipeline_rank
        self.parts = ModelSplit(run, gpus)
        self.ranks = ranks = self.parts.degrees
        self.micro_batches = run.train.global_batch // (run.train.micro_batch * ranks.data)
        self.width = 2 if run.train.precision in ("bf16", "fp16") else FLOAT32
        """Bytes of an element in the run's precision."""
        self.residual = residual_split(run.model, run.layout.megatron_sequence_parallel)
        """How tensor-parallel ranks split the residual stream."""
        self.is_ddp = 1 < gpus == ranks.replicate
        self.is_first, self.is_last = self.parts.has_ends(pipeline_rank)
        """Whether this rank has the embedding, and the last norm and the head."""
        local = -(-run.data.context // ranks.sequence)
        self.tokens = run.train.micro_batch * local
        """Of a micro-batch on this rank; the longest shard where a sequence is split."""

    def blocks(self) -> list[tuple[int, int]]:
        """Blocks of this rank that differ, and how many are the same as each."""
        return self.parts.blocks(self.pipeline_rank)

    def block_shapes(self, block: int) -> list[Shape]:
        """The parameters of a block on this rank's part of the tensor axis."""
        shapes = block_shapes(self.model, block)
        return [self._split(f"blocks.{block}.{name}", x) for name, x in shapes.items()]

    def trained_shapes(self, block: int) -> list[Shape]:
        """Those of them that have gradients."""
        shapes = block_shapes(self.model, block).items()
        named = ((f"blocks.{block}.{name}", x) for name, x in shapes)
        return [self._split(name, x) for name, x in named if self.trains(name)]

    def trains(self, name: str) -> bool:
        """Whether a parameter has a gradient."""
        return trains(self.model, self.run.train.freeze, name)

    def outer_shapes(self, *, embedding: bool, head: bool, trained: bool = False) -> list[Shape]:
        """The same of the embedding, and of the last norm and the head; or those `trained`.

        A tied head is the embedding, of which the last stage of a pipeline has a copy.
        """
        matrix = self.model.vocab, self.model.hidden
        has_matrix = head and (not self.model.tie_embeddings or self.ranks.pipeline > 1)
        named = [
            *([("embedding.weight", matrix)] if embedding else []),
            *([("norm.weight", (self.model.hidden,))] if head else []),
            *([(head_name(self.model), matrix)] if has_matrix else []),
        ]
        return [self._split(name, x) for name, x in named if not trained or self.trains(name)]

    def _split(self, name: str, shape: Shape) -> Shape:
        dim = None if self.ranks.tensor == 1 else tensor_dim(self.model, name)
        return tuple(n // self.ranks.tensor if i == dim else n for i, n in enumerate(shape))
