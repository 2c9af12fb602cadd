"""The decoder-only transformer. It knows nothing of devices, parallelism or training.

Shape suffixes: B batch, N tokens, H query heads, G key/value heads, D head_dim, C hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.attention import KVCache, KVCaches, Pattern, attend, patterns_of
from longspan.config import Model, Run
from longspan.costs import is_adapter, lora_rank_of, rank_of, trains
from longspan.errors import UserError
from longspan.models.packed_attention import attend_packed, packs
from longspan.nn import (
    Dropout,
    GatedMLP,
    LoRALinear,
    MakeLinear,
    RMSNorm,
    RotaryEmbedding,
    apply_rope,
    cross_entropy_sum,
    logits_of,
)
from longspan.nn.precision import autocast_dtype
from longspan.nn.residual import linear_onto
from longspan.sketching.layers import LowRankLinear, SKLinear, seed_of


class SelfAttention(nn.Module):
    def __init__(self, model: Model, pattern: Pattern, linear: MakeLinear) -> None:
        super().__init__()
        self.pattern = pattern
        self.attend: Callable[..., Tensor] = attend
        """The attention function; `attend_sharded` replaces it when ranks split the sequence, and
        `ChunkAttention` when it is walked in chunks.
        """
        self.head_dim = model.head_dim
        self.sinks = nn.Parameter(torch.empty(model.heads)) if model.learnable_sinks else None
        q_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = linear("attention.query", model.hidden, q_dim)
        self.key = linear("attention.key", model.hidden, kv_dim)
        self.value = linear("attention.value", model.hidden, kv_dim)
        self.query_norm = _norm(model, model.head_dim) if model.qk_norm else nn.Identity()
        self.key_norm = _norm(model, model.head_dim) if model.qk_norm else nn.Identity()
        self.norm = _norm(model, q_dim) if model.sub_layer_norm else nn.Identity()
        self.out = linear("attention.out", q_dim, model.hidden)

    def forward(
        self,
        x_BNC: Tensor,
        rope: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The output, (batch, tokens, hidden) as x, plus `residual` if there is one."""
        layers = [self.query, self.key, self.value]
        if self._packs(cache, documents) and packs(layers, x_BNC, self.pattern, self.head_dim):
            y_BNHD = attend_packed(layers, x_BNC, rope, self.pattern, self.head_dim)
        else:
            y_BNHD = self._attend_apart(x_BNC, rope, cache, documents)
        return linear_onto(residual, self.out, self.norm(y_BNHD.flatten(-2)))

    def _attend_apart(
        self, x_BNC: Tensor, rope: Tensor, cache: KVCache | None, documents: Tensor | None
    ) -> Tensor:
        # One product for all three took 0.99 of the time, forward and backward, at hidden 768 and
        # 0.87 to 0.95 at 128 on a CPU core.
        q_BNHD = self.query(x_BNC).unflatten(-1, (-1, self.head_dim))
        k_BNGD = self.key(x_BNC).unflatten(-1, (-1, self.head_dim))
        v_BNGD = self.value(x_BNC).unflatten(-1, (-1, self.head_dim))
        q_BNHD, k_BNGD = self.query_norm(q_BNHD), self.key_norm(k_BNGD)
        if x_BNC.shape[1] == 1:  # a decoding step, whose time is that of launches
            both, heads = apply_rope(torch.cat([q_BNHD, k_BNGD], dim=2), rope), q_BNHD.shape[2]
            q_BNHD, k_BNGD = both[:, :, :heads], both[:, :, heads:]
        else:
            q_BNHD, k_BNGD = apply_rope(q_BNHD, rope), apply_rope(k_BNGD, rope)
        sinks: Tensor | None = self.sinks
        if isinstance(sinks, DTensor):  # split over ranks, as the heads are
            sinks = sinks.to_local()
        if cache is not None:
            return cache.attend(q_BNHD, k_BNGD, v_BNGD, sink_logits=sinks)
        return self.attend(
            q_BNHD, k_BNGD, v_BNGD, self.pattern, documents=documents, sink_logits=sinks
        )

    def _packs(self, cache: KVCache | None, documents: Tensor | None) -> bool:
        return (
            cache is None
            and documents is None
            and self.sinks is None
            and self.attend is attend
            and isinstance(self.query_norm, nn.Identity)
        )


class Block(nn.Module):
    def __init__(self, model: Model, pattern: Pattern, index: int, dropout: Dropout) -> None:
        super().__init__()
        self.index, self.dropout = index, dropout
        linear = partial(_linear, model, index)
        self.attention_norm = _norm(model, model.hidden)
        self.attention = SelfAttention(model, pattern, linear)
        self.mlp_norm = _norm(model, model.hidden)
        sub_layer_norm = _norm(model, model.ffn) if model.sub_layer_norm else None
        self.mlp = GatedMLP(model.hidden, model.ffn, linear, sub_layer_norm, model.activation)

    def forward(
        self,
        x_BNC: Tensor,
        rope: Tensor,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """`dropout_keys`: `Dropout.keys_of_layer` (batch, tokens); without, nothing is dropped."""
        if dropout_keys is None:
            x_BNC = self.attention(
                self.attention_norm(x_BNC), rope, cache, documents, residual=x_BNC
            )
            out: Tensor = self.mlp(self.mlp_norm(x_BNC), residual=x_BNC)
            return out
        y_BNC = self.attention(self.attention_norm(x_BNC), rope, cache, documents)
        x_BNC = x_BNC + self.dropout(y_BNC, dropout_keys, 1)
        y_BNC = self.mlp(self.mlp_norm(x_BNC))
        return x_BNC + self.dropout(y_BNC, dropout_keys, 2)


def _norm(model: Model, width: int) -> RMSNorm:
    return RMSNorm(width, model.rms_norm_eps, model.norm_offset)


def _linear(model: Model, block: int, name: str, in_features: int, out_features: int) -> nn.Module:
    """A block's linear layer: dense, low-rank or sketched, as `model` configures it."""
    full_name = f"blocks.{block}.{name}"
    rank = rank_of(model, full_name, in_features, out_features)
    bias = model.has_bias(name)
    if lora_rank := lora_rank_of(model, full_name):
        return LoRALinear(in_features, out_features, lora_rank, model.lora.alpha, bias=bias)
    if rank == 0:
        return nn.Linear(in_features, out_features, bias=bias)
    if model.linear == "low_rank":
        return LowRankLinear(in_features, out_features, rank, bias=bias)
    seed = seed_of(model.sketch.seed, full_name)
    return SKLinear(in_features, out_features, model.sketch.terms, rank, bias=bias, seed=seed)


class Decoder(nn.Module):
    def __init__(
        self,
        model: Model,
        patterns: Pattern | Sequence[Pattern],
        context: int,
        *,
        has_documents: bool = False,
        z_loss: float = 0.0,
        rounds_residual: bool = False,
        freeze: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """`patterns`: of each layer, or one for all; `has_documents`: whether `forward` will be
        given documents; `z_loss`: that of `cross_entropy_sum`; `rounds_residual`: whether
        the residual stream has the dtype of autocast instead of float32; `freeze`: globs over the
        names of parameters that are not trained; `seed`: of dropout.
        """
        super().__init__()
        if isinstance(patterns, Pattern):
            patterns = [patterns] * model.layers
        if len(patterns) != model.layers:
            raise ValueError(
                f"expected {model.layers} patterns, one per layer, got {len(patterns)}"
            )
        self.config, self.patterns, self.context = model, tuple(patterns), context
        self.has_documents, self.z_loss = has_documents, z_loss
        self.rounds_residual = rounds_residual
        self.rope = RotaryEmbedding(model.head_dim, model.rope_theta_for(context), model.rope)
        self.positions: Tensor | None = None
        """Positions (tokens,) of the tokens that `forward` is given, if they are not a sequence."""
        self.positions_in_documents: Tensor | None = None
        """The same (batch, tokens) in documents, if `forward` is not given those."""
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.seed, self.dropout = seed, Dropout(model.dropout, seed)
        self.blocks = nn.ModuleList(
            Block(model, x, i, self.dropout) for i, x in enumerate(patterns)
        )
        self.norm = _norm(model, model.hidden)
        # With tied embeddings there is no head, so that no weight is registered twice.
        self.head = (
            None if model.tie_embeddings else nn.Linear(model.hidden, model.vocab, bias=False)
        )
        self.freeze = tuple(freeze)
        self.freeze_parameters(self.named_parameters())

    def trains(self, name: str) -> bool:
        """Whether the parameter that has this name in one process is trained."""
        return trains(self.config, self.freeze, name)

    def freeze_parameters(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Turn off the gradients of those that are not trained."""
        for name, parameter in parameters:
            parameter.requires_grad_(self.trains(name))

    def dropout_keys(self, samples: Tensor | None, count: int) -> Tensor | None:
        """Of `count` tokens of each of samples (batch,), or this rank's part of them."""
        if samples is None:
            return None
        given = self.positions
        positions = torch.arange(count, device=samples.device) if given is None else given
        return self.dropout.keys(samples, positions)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy of tokens (batch, tokens) against targets; −100 is ignored.

        Without targets, the logits (batch, tokens, vocab). The loss never materialises them, and is
        what to train long contexts with. `documents`: integers (batch, tokens), of the whole
        sequence if ranks split it; runs of equal ones are documents, each as if it were alone.
        `samples`: a number for each row (batch,), on which dropout depends; without it nothing is
        dropped.
        """
        hidden = self.hidden(tokens, documents=documents, samples=samples)
        if targets is None:
            return logits_of(hidden, self.head_weight)
        return cross_entropy_sum(hidden, self.head_weight, targets, z_loss=self.z_loss)

    def run_blocks(self, tokens: Tensor, samples: Tensor | None = None) -> None:
        """Run tokens (batch, tokens) through all blocks, for what their attention keeps of them."""
        self.hidden(tokens, samples=samples)

    def next_logits(self, tokens: Tensor, caches: KVCaches | None = None) -> Tensor:
        """Logits (batch, vocab) of the token after the last of tokens (batch, tokens)."""
        return logits_of(self.hidden(tokens, caches)[:, -1], self.head_weight)

    def new_caches(self, capacity: int | None = None) -> KVCaches:
        """Empty KV caches for `hidden` and `next_logits`, of the context or `capacity` tokens."""
        patterns = [m.pattern for m in self.modules() if isinstance(m, SelfAttention)]
        return KVCaches(patterns, capacity or self.context)

    def hidden(
        self,
        tokens: Tensor,
        caches: KVCaches | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """The final hidden states (batch, tokens, hidden), which the head projects to logits.

        With `caches` the tokens continue those that the caches hold, one by one.
        """
        if caches is not None and caches.length and tokens.shape[1] > 1:
            steps = [self.hidden(token[:, None], caches) for token in tokens.unbind(1)]
            return torch.cat(steps, dim=1)
        if documents is not None:
            documents = documents.cpu()  # once, not in every block; FSDP may have copied them
        given = self.positions
        if self.positions_in_documents is not None:
            given = self.positions_in_documents
        rope = rope_table(
            self.rope, tokens, given, self.context, caches=caches, documents=documents
        )
        keys = self.dropout_keys(samples, tokens.shape[1])
        x_BNC = scaled_embedding(self.embedding, tokens, self.config.embedding_scale)
        if (dtype := autocast_dtype(x_BNC)) is not None:  # the embedding itself may be bf16
            x_BNC = x_BNC.to(dtype if self.rounds_residual else torch.float32)
        x_BNC = self.dropout(x_BNC, keys, 0)
        for index, block in enumerate(self.blocks):
            cache = caches.layers[index] if caches else None
            of_layer = self.dropout.keys_of_layer(keys, index)
            x_BNC = block(x_BNC, rope, cache, documents, of_layer)
        if caches is not None:
            caches.advance(tokens)
        out: Tensor = self.norm(x_BNC)
        return out

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def pipeline_copy(self) -> nn.Parameter | None:
        """The copy of a tied embedding that the last pipeline stage holds as its head, if any."""
        if self.head is None or not self.config.tie_embeddings:
            return None
        weight: nn.Parameter = self.head.weight  # type: ignore[assignment]
        return weight


def scaled_embedding(embedding: nn.Module, tokens: Tensor, scale: float) -> Tensor:
    """The embedding of tokens (batch, tokens), times `scale`."""
    x_BNC: Tensor = embedding(tokens)
    return x_BNC if scale == 1 else x_BNC * scale


def rope_table(
    rope: RotaryEmbedding,
    x: Tensor,
    given: Tensor | None,
    context: int,
    *,
    caches: KVCaches | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """RoPE's table for x (batch, tokens, …): its positions follow those in `caches`.

    `given`: positions of this rank's tokens, if ranks split the sequence of `context` tokens. With
    `documents` positions count in each of them.
    """
    if caches is not None:
        caches.positions.check(x.shape[1])
        if caches.length:  # one more token of each row
            positions = caches.positions.next[:, None]
            return rope.table(positions, positions + 1)
    elif documents is not None:
        positions = document_positions(documents)
        if given is not None:
            positions = positions[:, given.to(positions.device)]
        return rope.table(positions.to(x.device), None if given is None else context)
    elif given is not None:
        return rope.table(given.to(x.device), context)
    return rope.table(torch.arange(x.shape[1], device=x.device), x.shape[1])


def document_positions(documents: Tensor) -> Tensor:
    """The position of each token in its document: int64 like `documents` (batch, tokens)."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return index - index.where(is_first, 0).cummax(dim=1).values


def new_decoder(run: Run) -> Decoder:
    """The run's model on the meta device: names and shapes, nothing allocated."""
    if run.model.factory:
        raise UserError(
            "this needs the decoder that a run file describes, but this run has "
            f'model.factory = "{run.model.factory}": its model is known to train, verify and drill'
        )
    with torch.device("meta"):
        return Decoder(
            run.model,
            patterns_of(run.attention, run.model.layers),
            run.data.context,
            has_documents=run.data.isolates,
            z_loss=run.train.z_loss,
            rounds_residual=run.train.residual_precision != "fp32",
            freeze=run.train.freeze,
            seed=run.train.seed,
        )


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by name."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def stored_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The shapes of those parameters that a checkpoint holds: all, or with LoRA its updates."""
    shapes, has_lora = parameter_shapes(model), model.config.lora.rank > 0
    return {name: shape for name, shape in shapes.items() if not has_lora or is_adapter(name)}
