"""Activations of the decoder by formula: what a block keeps for its backward pass, and the peaks.

All tables are bytes per token of a micro-batch on one rank, by name. They say what autograd saves
(eager), or what AOTAutograd's partitioner saves (compiled); tests compare them with traces of the
real block. "none" keeps all of `saved`; "selective" and "full" keep less, and recompute the rest in
the backward pass of one block at a time.

In letters: h hidden, q and k the widths of all query and key heads, f ffn, e bytes of an element in
the run's precision. The residual stream is float32, or as `train.residual_precision` says. q, k and
f are those of a tensor-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from longspan.attention import BlockSparse, Dense, Dilated, Heads, patterns_of
from longspan.attention.kernels.schedule import schedule_branches, schedule_whole_segments
from longspan.config import Run
from longspan.constants import (
    CUDNN_PAIRS,
    KERNEL_LOSS_CHUNK,
    LOSS_CHUNK,
    OFFLOAD_HELD,
    OFFLOAD_IN_FLIGHT,
)
from longspan.costs import linear_sizes, rank_of
from longspan.parallel.choices import residual_split
from longspan.planning.communication_in_blocks import exchanges
from longspan.planning.parameters import Degrees

FP32 = 4
SCRATCH_BYTES = 560 << 20
"""At most, for the scores' gradients in the backward pass of block-sparse attention."""

Table = dict[str, float]


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of a block on a rank, for one micro-batch."""

    kept: dict[str, int]
    """From the forward to the backward pass, by name; the block's input is among them."""
    workspace: int
    """Beyond `kept`, at the peak of the block's backward pass: recomputed activations, gradients of
    activations, and buffers of the attention kernels."""
    keeps_copies: bool
    """Whether the 16-bit copies of its weights are kept for the backward pass."""
    offloaded: tuple[int, ...] = ()
    """Sizes of what is kept in CPU memory instead, with `train.offload_activations`."""
    under_way: int = 0
    """Bytes of `workspace` for what is on its way to the CPU or back."""

    @property
    def total(self) -> int:
        return sum(self.kept.values())


class Activations:
    """The activations of a run on a rank."""

    def __init__(self, run: Run, degrees: Degrees) -> None:
        model, train, self._run, self._degrees = run.model, run.train, run, degrees
        tensor = degrees.tensor
        self._patterns = patterns_of(run.attention, model.layers)
        self.tokens = train.micro_batch * -(-run.data.context // degrees.sequence)
        """Of a micro-batch on this rank."""
        self.width = 2 if train.precision in ("bf16", "fp16") else FP32
        self.on_cpu = train.device == "cpu"
        is_auto = train.compile == "auto"
        self.is_compiled = (
            not self.on_cpu and run.layout.schedule != "zbv" if is_auto else (train.compile is True)
        )
        split = (
            residual_split(model, run.layout.megatron_sequence_parallel) if tensor > 1 else "none"
        )
        self.is_split = split != "none"
        self.hidden = model.hidden
        self.rounds_stream = train.residual_precision != "fp32"
        self.stream_features = model.hidden / (tensor if self.is_split else 1)
        self.stream = (self.width if self.rounds_stream else FP32) * self.stream_features
        """Bytes per token of the residual stream."""
        self.keeps_fp8 = train.fp8 and self.is_compiled
        """Whether the inputs of linear layers are kept in fp8, and of weights only the scales."""
        self.inputs = model.hidden / (tensor if split == "features" else 1)
        """Width of the inputs of projections."""
        self.heads = model.heads / tensor
        self.queries = model.heads * model.head_dim / tensor
        self.keys = model.kv_heads * model.head_dim / tensor
        self.ffn = model.ffn / tensor
        self.tile = train.tile_of(self.tokens)

    def block(self, block: int = 0) -> BlockActivations:
        """The activations of a block; blocks differ in their patterns and the ranks of their linear
        layers.
        """
        mode, e = self._run.train.checkpointing_of(block), self.width
        saved = self._saved(block)
        kept = {"none": saved, "selective": self._selective(block), "full": {}}[mode]
        recomputed = sum(saved.values()) - sum(kept.values()) if mode != "none" else 0
        if mode == "selective" and not self.is_compiled:
            recomputed += e * self.hidden  # the output of the last product is cached, and unused
        if mode != "none" and self.is_compiled:
            recomputed += self.stream  # the residual stream between attention and MLP
        kept = {"block inputs": self.stream, **kept, **self._received(block)}
        # The gradients of gate and up are computed when that of their product is still there, and
        # the product itself is not.
        mlp = self.stream + recomputed + 2 * e * self.ffn
        if mode == "full" and self.is_compiled:
            # One kernel computes those gradients and recomputes the product; the output of the
            # attention projection is in the residual stream by then.
            mlp += e * self.ffn - e * self.hidden
        if self._run.train.fp8:
            mlp += e * self.ffn  # gradients of gate and up in fp8, or what is to be rounded to it
        attention = self.stream + recomputed - saved["MLP"] + 4 * e * self.queries + 8 * self.heads
        of_tile = 0
        if self.tile:
            # The output's gradient and that of the input. What the MLP needs besides the tile is
            # gone before the backward pass of attention, which takes more now.
            mlp, of_tile = self.stream + recomputed + 2 * e * self.hidden, self._tile_workspace()
            if mode != "none":
                attention -= self.stream + (0 if self.is_compiled else e * self.hidden)
        workspace = max(
            mlp * self.tokens + of_tile,
            attention * self.tokens + self.attention_workspace(block),
        )
        if self._run.model.dropout and not self.is_compiled:
            workspace += 3 * 8 * self.stream / FP32 * self.tokens  # hashes of a mask, in int64
        sizes = {name: math.ceil(size * self.tokens) for name, size in kept.items()}
        offloaded: tuple[int, ...] = ()
        under_way = 0
        if self._run.train.offload_activations:
            # Those of the current block, and those that are still on their way.
            offloaded = tuple(filter(None, sizes.values()))
            under_way = (OFFLOAD_HELD + OFFLOAD_IN_FLIGHT) * max(offloaded)
            whole = sum(offloaded)
            under_way = min(max(whole, under_way), self._run.model.layers * whole)
            workspace += under_way
            sizes = dict.fromkeys(sizes, 0)
        copies = mode == "none" and e < FP32 and not self._run.train.fp8
        workspace = math.ceil(max(0, workspace))
        return BlockActivations(sizes, workspace, copies, offloaded, under_way)

    def _tile_workspace(self) -> int:
        """Bytes for a tile of the MLP in the backward pass, and for the sums over tiles.

        Gate, up and their product, and the gradients of all three; eager, also the activation and
        a factor of its gradient, and what the sub-layer norm computes in float32.
        """
        e, model = self.width, self._run.model
        each = 6 * e if self.is_compiled else 8 * e
        if model.sub_layer_norm and not self.is_compiled:
            each += 5 * FP32
        return math.ceil(each * self.ffn * self.tile) + 3 * FP32 * model.hidden * model.ffn

    def _saved(self, block: int) -> Table:
        """What the backward pass of a block needs, besides its input."""
        e, h, q, k, f = self.width, self.inputs, self.queries, self.keys, self.ffn
        model = self._run.model
        table: Table = {}
        if self.is_compiled:
            of_input = 1 if self.keeps_fp8 else e
            table["inputs of projections"] = 2 * of_input * h + 8
            table["attention projection"] = e * self.hidden
            mlp = (2 * e + of_input) * f
        else:
            table["residual stream after attention"] = self.stream
            # Autocast converts the input of each projection by itself, if it has to.
            converts = e < FP32 and not self.rounds_stream
            inputs = (4 if self.tile else 5) if converts else 2
            table["inputs of projections"] = inputs * e * h + 8
            mlp = 4 * e * f
        table["queries, keys and values"] = e * (q + 2 * k)
        table["attention output"] = (e + self.keeps_fp8) * q + FP32 * self.heads
        if self.on_cpu and not self.is_compiled:  # where the norm is no single kernel
            table["normalized residual stream"] = 2 * FP32 * self.stream_features
            if self.rounds_stream:  # it keeps its input in float32
                table["residual stream after attention"] = 0
                table["normalized residual stream"] *= 2
        if model.sub_layer_norm:
            unfused = self.on_cpu and not self.is_compiled
            upcast = FP32 if e < FP32 else 0
            table["sub-layer norms"] = (e + (FP32 + upcast if unfused else 0)) * q + 8
            if not self.is_compiled:
                mlp += (FP32 + upcast + e - (e if upcast else 0) if unfused else e) * f
        if model.qk_norm:
            table["norms of queries and keys"] = e * (q + k) + 8 * self.heads
        if model.linear != "dense":
            table["low-rank intermediates"] = e * self._ranks(block)
        if model.dropout:
            table["dropout masks"] = 2 * self.stream / FP32
        table["MLP"] = 0 if self.tile else mlp
        return table

    def _selective(self, block: int) -> Table:
        """The outputs of matrix products and of attention, which are not recomputed."""
        e, q, k = self.width, self.queries, self.keys
        table = {
            "queries, keys and values": e * (q + 2 * k),
            "attention output": e * q + FP32 * self.heads,
            "attention projection": e * self.hidden,
            "MLP": 0 if self.tile else 2 * e * self.ffn,
        }
        if not self.is_compiled:  # the compiler sees that the last product is never read
            table["MLP"] += e * self.hidden
        if self._run.model.linear != "dense":
            table["low-rank intermediates"] = e * self._ranks(block)
        return table

    def _ranks(self, block: int) -> int:
        """The ranks of a block's factored layers, summed; a sketched layer has two products."""
        model = self._run.model
        per_layer = 2 * model.sketch.terms if model.linear == "sketched" else 1
        sizes = linear_sizes(model).items()
        ranks = (rank_of(model, f"blocks.{block}.{name}", *size) for name, size in sizes)
        return per_layer * sum(ranks)

    def _received(self, block: int) -> Table:
        """Keys and values from other ranks, which attention keeps when ranks split a sequence."""
        model, degrees = self._run.model, self._degrees
        if degrees.sequence == 1:
            return {}
        heads = Heads(model.heads // degrees.tensor, model.kv_heads // degrees.tensor)
        pattern, context = self._patterns[block], self._run.data.context
        is_chunk = self._run.train.chunk_tokens > 0
        if isinstance(pattern, Dilated) and pattern.blocks is None and not is_chunk:
            # At most what a shard at the end of every branch's segment receives.
            local = -(-context // degrees.sequence)
            rows = sum(max(0, min(w, context) - local) / r for w, r in pattern.branches)
            return {"received keys and values": self.width * 2 * self.keys * rows / local}
        options = context, degrees.sequence, heads, None
        found = exchanges(pattern, self._patterns, *options, is_chunk=is_chunk)
        if not found or found[0][2].startswith("keys and values of a round"):
            return {}  # all keys are local, or pass through in rounds
        vectors = found[0][0] if found[0][3] else 2 * found[0][0] + 2 * found[1][0]
        size = self.width * self._run.train.micro_batch * model.head_dim * vectors
        return {"received keys and values": size / self.tokens}

    def attention_workspace(self, block: int) -> int:
        """Buffers of a block's attention kernels on a GPU, at the peak of the backward pass."""
        if self.on_cpu:
            return 0
        pattern, train = self._patterns[block], self._run.train
        tokens, vector = self.tokens // train.micro_batch, train.micro_batch * self.queries
        blocks = pattern.blocks if isinstance(pattern, Dilated) else pattern
        if isinstance(pattern, Dense):
            per_token = FP32 * vector  # the gradient of the queries, summed exactly
            is_cudnn = tokens**2 >= CUDNN_PAIRS and self._run.model.head_dim > 64
            if self.keys < self.queries and self.width < FP32 and is_cudnn:
                # cuDNN has those of keys and values in float32 for each query head, and its results
                # for each key head, where the block's table has 16 bits for each query head.
                shared = train.micro_batch * (self.queries - self.keys)
                per_token += 2 * (FP32 * vector - self.width * shared)
            return math.ceil(per_token * tokens)
        if isinstance(blocks, BlockSparse) and not isinstance(pattern, Dilated):
            pairs = pattern.pairs(tokens, math.ceil(self.heads), is_causal=True)
            return min(SCRATCH_BYTES, train.micro_batch * self.width * pairs)
        if not isinstance(pattern, Dilated):
            return 0
        whole_segments = None
        if self.width < FP32 and blocks is None and len(pattern.branches) > 1:
            whole_segments = schedule_whole_segments(pattern.branches, tokens)
        schedule = whole_segments or schedule_branches(pattern.branches, blocks is not None)
        slab = min(tokens, schedule.slab(FP32 * vector))
        partials = 2 * -(-slab // schedule.partial_rate) if schedule.has_partial else 0
        sum_of_dq = slab if whole_segments else 0
        return math.ceil(FP32 * vector * (partials + sum_of_dq))

    def rope_table(self) -> int:
        """Cosines and sines of a sequence's positions, float32."""
        return FP32 * self._run.model.head_dim * self.tokens // self._run.train.micro_batch

    def kept_by_loss(self) -> int:
        """What the last norm and the loss keep of a micro-batch for its backward pass."""
        rows_of_head = self._run.model.vocab // self._degrees.tensor
        stream = (2 if self.on_cpu else 1) * self.stream
        per_token = stream + self.width * self.hidden
        return math.ceil(per_token * self.tokens) + FP32 * rows_of_head * self.hidden

    def loss(self) -> dict[str, int]:
        """Buffers of the last norm and of the chunked loss, at the end of the forward pass."""
        e, h, tokens = self.width, self.hidden, self.tokens
        rows_of_head = self._run.model.vocab // self._degrees.tensor
        has_kernel = not self.on_cpu and self._degrees.tensor == 1
        elements = KERNEL_LOSS_CHUNK if has_kernel else LOSS_CHUNK
        chunk = min(tokens, max(1, elements // rows_of_head)) * rows_of_head
        copies = e * rows_of_head * h if e < FP32 else 0
        if has_kernel:
            logits = e * chunk
        elif self._degrees.tensor > 1:
            logits = (e + 3 * FP32 if e < FP32 else 3 * FP32) * chunk
        else:
            logits = (e + FP32 + (FP32 if e < FP32 else 0)) * chunk
        stream = 2 * self.stream + (FP32 * h if self.is_split else 0)  # its input and its output
        stream += self.stream if self.on_cpu else 0
        hidden = (2 * e if e < FP32 else e) * h  # in the run's precision, and its gradient
        return {
            "logits": logits + copies,
            "last norm and head input": math.ceil((stream + hidden) * tokens),
            "head gradient": FP32 * rows_of_head * h,
        }
