"""Sequence parallel: each rank holds some of every sample's tokens.

All but attention is local to a token. Attention fetches what it sees elsewhere.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from longspan.attention import Heads, Shards, attend_sharded, best_shards, pattern_of
from longspan.config import Run
from longspan.models.decoder import Decoder, SelfAttention


def shards_of(run: Run, sequence_ranks: int, tensor_ranks: int) -> Shards:
    """How the run's samples are cut; `tensor_ranks` share the heads."""
    heads = Heads(run.model.heads // tensor_ranks, run.model.kv_heads // tensor_ranks)
    return best_shards(pattern_of(run.attention), run.data.context, sequence_ranks, heads)


def split_by_sequence(model: Decoder, group: dist.ProcessGroup, shards: Shards) -> None:
    """Let `model` take this rank's tokens of a sequence, and know where they stand."""
    model.positions = shards.positions(dist.get_rank(group))
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attend = partial(attend_sharded, group=group, shards=shards)
