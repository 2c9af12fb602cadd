"""Named model sizes with their dilated attention settings. Plain data.

`config.Model` fills in `kv_heads` (equal to `heads`) and `ffn` (8/3 of `hidden`, rounded up to a
multiple of 128).
"""

from __future__ import annotations

from typing import Any

_Branches = dict[str, tuple[int, ...]]

_THREE: _Branches = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
_FOUR: _Branches = {"segment_lengths": (2048, 4096, 8192, 16384), "dilation_rates": (1, 2, 4, 8)}
_FIVE: _Branches = {
    "segment_lengths": (2048, 4096, 8192, 16384, 32768),
    "dilation_rates": (1, 2, 4, 8, 16),
}
_TINY: _Branches = {"segment_lengths": (256, 1024, 4096), "dilation_rates": (1, 4, 16)}

# 50304 is GPT-2's vocabulary of 50257 rounded up to a multiple of 64.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "vocab": 256, "tie_embeddings": True},
    "125m": {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50304, "tie_embeddings": True},
    "350m": {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50304, "tie_embeddings": True},
    "1.3b": {"layers": 24, "hidden": 2048, "heads": 32, "vocab": 50304, "tie_embeddings": True},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50304, "tie_embeddings": False},
    "13b": {"layers": 40, "hidden": 5120, "heads": 40, "vocab": 50304, "tie_embeddings": False},
}

BRANCHES: dict[str, _Branches] = {
    "tiny": _TINY,
    "125m": _THREE,
    "350m": _FOUR,
    "1.3b": _FIVE,
    "7b": _FIVE,
    "13b": _FIVE,
}
