"""Tiny random models of the families that transformers saves, and their loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.config import Run
from longspan.runfile import load_run
from tests.parallel.test_apply import OPTIONS

CONTEXT = 64
BATCH = 4
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": CONTEXT, "hidden_act": "gelu"}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 10}),
    "ministral-mixed": (
        "MinistralForCausalLM",
        {"sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"]}
        | {"head_dim": 8},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "rms_norm_eps": 0.01}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0, "head_dim": 16},
    ),
    "qwen2-mixed": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3-mixed": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 12, "head_dim": 16, "num_hidden_layers": 4}
        | {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ),
    "qwen3-biases": ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True}),
    # With pad_token_id transformers leaves out the gradient of that row of the embedding.
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "pad_token_id": None}),
}


def save_family(family: str, folder: Path, *, shard_size: str = "1GB", **fields: Any) -> Any:
    """A random model of a family that transformers saves in `folder`."""
    transformers = pytest.importorskip("transformers")
    name, own = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SHAPE, **own, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms, which are all 0 or 1
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def run_from(folder: Path, *overrides: str, world: int = 1, key: str = "train.init_from") -> Run:
    """A run whose model `folder` decides."""
    given = [option for option in OPTIONS if not option.startswith(("model.", "attention."))]
    given += [f"{key}={folder}", f"train.global_batch={BATCH}", *overrides]
    return load_run(None, given, world=world)


def loss_and_gradients(
    model: Any, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of transformers on (batch, tokens), and its gradients by name."""
    model.zero_grad()
    logits = model(tokens).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}
