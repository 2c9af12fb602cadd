"""The names of weights and the config.json of a decoder as a Hugging Face model."""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import Any

from longspan.config import Run
from longspan.hf_config import FolderConfig
from longspan.hf_rope import write_rope

HF_MODULES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}


WINDOWED = ("mistral", "ministral", "qwen2", "qwen3")
"""The families that may have a sliding window."""


def hf_name(name: str) -> str:
    """Translate a name: blocks.3.mlp.up.weight is model.layers.3.mlp.up_proj.weight."""
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None, name
    layer, module, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{HF_MODULES[module]}.{kind}"


def sliding_window(run: Run) -> int | None:
    """The sliding window of a run's layers, if its family computes them in transformers.

    All but Mistral may have it in some layers, and dense attention in the others.
    """
    attention, family = run.attention, run.model.family
    windows = {layer.window for layer in attention.cycle if layer.kind == "window"}
    kinds = ("window",) if family == "mistral" else ("window", "dense")
    is_plain = all(
        layer.kind in kinds and layer.sinks == 0 and layer.window_dilation <= 1
        for layer in attention.cycle
    )
    if len(windows) != 1 or not is_plain or family not in WINDOWED:
        return None
    return windows.pop()


def hf_config(
    run: Run, ids: dict[str, Any], dtype: str = "float32", start: FolderConfig | None = None
) -> dict[str, Any]:
    """The config.json of the run's model; `ids` are those of special tokens.

    Fields whose defaults in transformers depend on the family are all written. `start`: the model
    that the run started from, whose sliding window stays if the run's context does not exceed it.
    """
    model, context = run.model, run.data.context
    positions = max(context, model.max_positions or 0)
    if model.rope.type == "dynamic":  # what transformers takes for the context before scaling
        positions = model.rope.original_context or positions
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": ACTIVATIONS[model.activation],
        "max_position_embeddings": positions,
        "rms_norm_eps": model.rms_norm_eps,
        **write_rope(model.rope, model.rope_theta_for(context)),
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": dtype,
        **ids,
    }
    if model.family in ("llama", "qwen3", "gemma"):
        config["attention_bias"] = model.attention_bias
    if model.family == "llama":
        config["mlp_bias"] = model.mlp_bias
    config |= _window_fields(run, start)
    config["longspan"] = {"attention": run.attention.model_dump(mode="json")}
    if needs_longspan(run):  # so that transformers does not compute dense attention
        config["attn_implementation"] = "longspan"
    return config


def needs_longspan(run: Run) -> bool:
    """Whether transformers computes a run's attention only with `longspan.hf`."""
    return run.attention.kinds != ("dense",) and sliding_window(run) is None


def _window_fields(run: Run, start: FolderConfig | None) -> dict[str, Any]:
    family, count = run.model.family, run.model.layers
    if family not in WINDOWED:
        return {}
    window, kinds = sliding_window(run), run.attention.kinds
    first, types = 0, None
    if len(kinds) > 1:
        names = {"window": "sliding_attention", "dense": "full_attention"}
        in_turn = islice(cycle(run.attention.cycle), count)
        types = [names.get(layer.kind) for layer in in_turn]
    if start and kinds == ("dense",) and not start.hides(run.data.context):
        window, first = start.window, start.first_window_layer
        types = None if start.layer_types is None else list(start.layer_types)
    if family == "ministral" and window is None:  # transformers needs a window, used or not
        positions = max(run.data.context, run.model.max_positions or 0)
        window, types = positions, ["full_attention"] * count
    layer_types = {} if types is None else {"layer_types": types}
    if family == "mistral":
        return {"sliding_window": window}
    if family == "ministral":
        return {"sliding_window": window, **layer_types}
    if window is None:
        return {"sliding_window": None, "use_sliding_window": False}
    fields = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": first}
    return {**fields, **layer_types}
