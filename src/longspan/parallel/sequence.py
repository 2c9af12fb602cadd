"""Sequence (context) parallelism: each rank holds some of every sample's tokens.

Everything but attention is local to a token. Attention communicates the keys and values that a
rank's queries need from other ranks.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from longspan.attention import Heads, Shards, attend_sharded, choose_shards
from longspan.models.decoder import Decoder, SelfAttention


def apply_sequence_parallel(model: Decoder, group: dist.ProcessGroup, tensor_ranks: int) -> None:
    """Let `model` take this rank's tokens of a sequence, which `tensor_ranks` ranks hold alike."""
    config, ranks = model.config, dist.get_world_size(group)
    heads = Heads(config.heads // tensor_ranks, config.kv_heads // tensor_ranks)
    shards = choose_shards(model.patterns, model.context, ranks, heads)
    if model.has_documents:
        shards = Shards.even(model.context, ranks)
    model.positions = shards.positions(dist.get_rank(group))
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = partial(attend_sharded, group=group, shards=shards)


def local_tokens(model: Decoder, x: Tensor) -> Tensor:
    """This rank's tokens of x (batch, tokens)."""
    return x if model.positions is None else x[:, model.positions]
