"""Sequence parallel: each rank holds some consecutive tokens of every sample.

All but attention is local to a token. Attention fetches the key rows it sees elsewhere.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from longspan.attention import Shards, attend_sharded
from longspan.models.decoder import Decoder, SelfAttention


def split_by_sequence(model: Decoder, group: dist.ProcessGroup, context: int) -> None:
    """Let `model` take one shard of a sequence of `context` tokens, and know which."""
    shards = Shards.even(context, dist.get_world_size(group))
    model.first_position = shards.of(dist.get_rank(group)).start
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = partial(attend_sharded, group=group, shards=shards)
