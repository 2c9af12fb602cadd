"""Named model sizes, and the branches of their dilated attention.

`config.Model` fills in `kv_heads` (equal to `heads`), `head_dim` (hidden / heads) and `ffn` (8/3 of
`hidden`, rounded up to a multiple of 128).
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


def _hugging_face(
    family: str,
    shape: tuple[int, int, int, int, int],
    vocab: int,
    theta: float,
    eps: float,
    **more: Any,
) -> dict[str, Any]:
    """A model as its config.json describes it; `shape`: layers, hidden, heads, kv_heads, ffn."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn")
    values = {"vocab": vocab, "tie_embeddings": False, "rope_theta": theta, "rms_norm_eps": eps}
    return {"family": family, **dict(zip(names, shape, strict=True)), **values, **more}


def _llama3(factor: float) -> dict[str, Any]:
    return {"type": "llama3", "factor": factor, "original_context": 8192}


MODELS |= {
    "llama2-7b": _hugging_face("llama", (32, 4096, 32, 32, 11008), 32000, 1e4, 1e-5),
    "llama3-8b": _hugging_face("llama", (32, 4096, 32, 8, 14336), 128256, 5e5, 1e-5),
    "llama3-70b": _hugging_face("llama", (80, 8192, 64, 8, 28672), 128256, 5e5, 1e-5),
    "llama3.1-8b": _hugging_face(
        "llama", (32, 4096, 32, 8, 14336), 128256, 5e5, 1e-5, rope=_llama3(8.0)
    ),
    "llama3.2-1b": _hugging_face(
        "llama",
        (16, 2048, 32, 8, 8192),
        128256,
        5e5,
        1e-5,
        rope=_llama3(32.0),
        tie_embeddings=True,
    ),
    "mistral-7b": _hugging_face("mistral", (32, 4096, 32, 8, 14336), 32768, 1e6, 1e-5),
    "qwen2.5-7b": _hugging_face("qwen2", (28, 3584, 28, 4, 18944), 152064, 1e6, 1e-6),
    "qwen3-0.6b": _hugging_face(
        "qwen3", (28, 1024, 16, 8, 3072), 151936, 1e6, 1e-6, head_dim=128, tie_embeddings=True
    ),
    "qwen3-8b": _hugging_face("qwen3", (36, 4096, 32, 8, 12288), 151936, 1e6, 1e-6, head_dim=128),
    "qwen3-32b": _hugging_face("qwen3", (64, 5120, 64, 8, 25600), 151936, 1e6, 1e-6, head_dim=128),
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
