"""`longspan data info`: what a folder of shards holds, once its files are verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longspan.data.lengths import contexts_for, cut_by, histogram
from longspan.data.shards import SPLITS, ShardFile, read_index, read_loss
from longspan.data.verification import Verification
from longspan.errors import UserError


def inspect_folder(folder: Path, contexts: Sequence[int] = ()) -> dict[str, Any]:
    """Summarize a folder of shards, after verifying every file.

    `contexts`: those of which to say what they would cut; by default some usual ones.
    """
    if any(context < 1 for context in contexts):
        raise UserError(f"--context must be at least 1, got {min(contexts)}")
    index = read_index(folder)
    for shard in index.shards:
        ShardFile(folder, index, shard)  # its size, which needs no reading
    with Verification(folder, index, again=True) as verification:
        verification.wait()
    splits = {}
    for split in SPLITS:
        shards = [shard for shard in index.shards if shard.split == split]
        starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        ends = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [np.asarray(x.document_ends) + n for x, n in zip(shards, starts, strict=False)]
        )
        longest = int(np.diff(ends, prepend=0).max(initial=0))
        losses = [read_loss(folder, shard) for shard in shards]
        splits[split] = {
            "shards": len(shards),
            "tokens": sum(shard.tokens for shard in shards),
            "targets": sum(
                shard.tokens if loss is None else int((loss[:, 1] - loss[:, 0]).sum())
                for shard, loss in zip(shards, losses, strict=True)
            ),
            "documents": len(ends),
            "longest": longest,
            "histogram": histogram(ends),
            "contexts": [cut_by(ends, each) for each in contexts_for(longest, contexts)],
        }
    return {"tokenizer": index.tokenizer, "vocab": index.vocab, "splits": splits}
