"""Named model sizes, and the branches of their dilated attention.

`config.Model` fills in `kv_heads` (equal to `heads`) and `ffn` (8/3 of `hidden`, rounded up to a
multiple of 128).
"""

from __future__ import annotations

from typing import Any

# 50304 is GPT-2's vocabulary of 50257 rounded up to a multiple of 64.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "vocab": 256, "tie_embeddings": True},
    "125m": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "tie_embeddings": True},
    "350m": {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50304, "tie_embeddings": True},
    "1.3b": {"layers": 24, "hidden": 2048, "heads": 32, "vocab": 50304, "tie_embeddings": True},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50304, "tie_embeddings": False},
    "13b": {"layers": 40, "hidden": 5120, "heads": 40, "vocab": 50304, "tie_embeddings": False},
    "65b": {"layers": 80, "hidden": 8192, "heads": 64, "vocab": 50304, "tie_embeddings": False},
    "70b": {
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "vocab": 50304,
        "tie_embeddings": False,
    },
    "175b": {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50304, "tie_embeddings": False},
}

SEGMENTS = {name: 256 if name == "tiny" else 2048 for name in MODELS}
"""Length of the shortest segment of the dilated attention."""

RATES = (1, 4, 16, 32)
"""Dilation rates. The largest is 32 times the smallest, with which the GPU kernels are fastest."""


def branches(segment: int, context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segment lengths and dilation rates whose last segment holds the whole context.

    A segment of w tokens costs w/r² keys per query, so those of up to 32,768 tokens together cost
    less than a third more than the first, and one of a million tokens half as much as the first.
    """
    lengths = [segment]
    for rate in RATES[1:]:
        if lengths[-1] >= context:
            break
        lengths.append(segment * rate)
    lengths[-1] = max(lengths[-1], -(-context // lengths[-1]) * lengths[-1])
    return tuple(lengths), RATES[: len(lengths)]
