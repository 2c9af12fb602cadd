"""Reads the config.json of a Hugging Face model, and refuses what this decoder does not compute.

Every field is honoured, known to be harmless, or refused by name. An unknown field is refused as
well: transformers adds fields that change what a model computes, and weights that load but compute
something else are the worst outcome. Who knows that a field is harmless can remove it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longspan.config import Attention, Layers, Model, NonNegative, Positive, Rope, Run, Theta, Width
from longspan.errors import UserError
from longspan.files import read_json_object
from longspan.hf_rope import TABLES, read_rope
from longspan.rules import BIASES, attention_rules
from longspan.wording import shown

CONFIG = "config.json"
DENSE = {"attention": {"kind": "dense"}}
"""The table `longspan` of a config.json without it."""
MAX_BYTES = 1 << 20
"""Size limit of a config.json; real ones have a few kilobytes."""

QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
QWEN |= {"max_position_embeddings": 32768}
MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "gemma": {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}
"""The values of transformers for fields that are missing, by model_type, if they are not those of
`FolderConfig`; null stands for no value."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Values of hidden_act, and of `model.activation`."""

SHAPES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
EQUAL = ("family", *SHAPES, "activation")
"""The keys of [model] that must equal what config.json says; SHAPES has their names there."""
KEYS = (*EQUAL, "rope_theta", "rope", "rms_norm_eps", "max_positions")
"""The keys of [model] that config.json decides."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "pretraining_tp": (1,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "quantization_config": (),
    "auto_map": (),
    "pruned_heads": ({},),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
}
"""Fields that change the computation, and the values with which they do not; null is one too."""

WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

HONOURED = {*SHAPES.values(), *TABLES, *WINDOW_FIELDS, "rope_theta", "rms_norm_eps", "hidden_act"}
HONOURED |= {"model_type", "max_position_embeddings", "longspan"}

HARMLESS = {
    # Names and versions.
    *("_name_or_path", "name_or_path", "architectures", "transformers_version", "tokenizer_class"),
    *("is_llama_config", "transformers.js_config", "model_name", "_commit_hash"),
    # How the weights were stored, initialised and executed.
    *("torch_dtype", "dtype", "initializer_range", "use_cache", "use_bfloat16", "torchscript"),
    *("_attn_implementation", "attn_implementation", "is_decoder", "return_dict"),
    *("output_attentions", "output_hidden_states", "use_return_dict", "tf_legacy_loss"),
    # Ids and sampling defaults of generation.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "prefix"),
    # Classification heads, which a language model does not have.
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    "task_specific_params",
}
"""Fields that do not change what a causal language model computes."""


class FolderConfig(BaseModel):
    """What config.json says about a model, by the keys of [model]."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    family: Literal["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma"] = Field(
        alias="model_type"
    )
    layers: Layers = Field(alias="num_hidden_layers")
    hidden: Width = Field(alias="hidden_size")
    heads: Width = Field(alias="num_attention_heads")
    kv_heads: Width = Field(alias="num_key_value_heads")
    head_dim: Width
    ffn: Width = Field(alias="intermediate_size")
    vocab: Width = Field(alias="vocab_size")
    tie_embeddings: bool = Field(alias="tie_word_embeddings", default=False)
    activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Theta
    rope: Rope
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    max_positions: Positive = Field(alias="max_position_embeddings")
    attention: Attention = Attention(kind="dense")
    """The pattern it was trained with, if `longspan export` wrote the folder."""
    window: Positive | None = None
    """Sliding window in tokens: a query sees itself and the window − 1 tokens before it."""
    first_window_layer: NonNegative = 0
    """Layers from this one on have the window, unless `layer_types` says which."""
    layer_types: tuple[str, ...] | None = Field(default=None, strict=False)

    @property
    def windows(self) -> list[bool]:
        """Whether each layer has the sliding window."""
        if self.window is None:
            return [False] * self.layers
        if self.layer_types is not None:
            return [kind == "sliding_attention" for kind in self.layer_types]
        return [layer >= self.first_window_layer for layer in range(self.layers)]

    def hides(self, context: int) -> bool:
        """Whether the sliding window of some layer hides tokens of a context."""
        return any(self.windows) and self.window is not None and self.window < context

    def pattern(self, context: int) -> Attention:
        """The attention of the layers over a context."""
        if self.attention.kinds != ("dense",) or not self.hides(context):
            return self.attention
        return self.window_pattern()

    def window_pattern(self) -> Attention:
        """The attention of layers with and without the sliding window."""
        window: dict[str, Any] = {"kind": "window", "window": self.window}
        has_window = self.windows
        if all(has_window):
            return Attention(**window)
        if not any(has_window):
            return Attention(kind="dense")
        length = next(n for n in range(1, self.layers + 1) if _repeats(has_window, n))
        layers = [
            {**(window if is_window else {"kind": "dense"}), "repeat": len(list(same))}
            for is_window, same in groupby(has_window[:length])
        ]
        return Attention.model_validate({"kind": "dense", "layers": layers})

    def disagreement(self) -> str | None:
        """What is wrong if the sliding window is not the pattern of the table `longspan`."""
        if not any(self.windows) or self.attention.kinds == ("dense",):
            return None
        if self.attention.settings(self.layers) == self.window_pattern().settings(self.layers):
            return None
        return f"sliding_window = {shown(self.window)} and longspan disagree: keep one"

    def model_keys(self) -> dict[str, Any]:
        """The values of [model]."""
        keys = {key: getattr(self, key) for key in KEYS}
        return {**keys, "rope": self.rope.model_dump(mode="json", exclude_none=True)}

    def disagreements(self, model: Model, folder: str = "train.init_from") -> dict[str, str]:
        """What to change in [model] so that the weights fit, by key."""
        found = {}
        for key in EQUAL:
            theirs, ours = (json.dumps(getattr(x, key)) for x in (self, model))
            if theirs != ours:
                found[f"model.{key}"] = (
                    f"{ours} is not the {theirs} of {folder}: set model.{key}={theirs}"
                )
        for key, what in (("sub_layer_norm", "norms"), ("learnable_sinks", "sinks")):
            if getattr(model, key):
                found[f"model.{key}"] = (
                    f"true is not supported with {folder}, as its model has no such {what}: use "
                    "false"
                )
        return found

    def changes(self, run: Run) -> list[str]:
        """What the run computes otherwise than the model was trained with, in words."""
        model, context = run.model, run.data.context
        theta = model.rope_theta_for(context)
        found = []
        if context > self.max_positions:
            found.append(f"context {context:,} instead of at most {self.max_positions:,}")
        if theta != self.rope_theta:
            found.append(f"RoPE theta {theta:,.0f} instead of {self.rope_theta:,.0f}")
        if model.rope != self.rope:
            found.append(f"RoPE {model.rope.describe()} instead of {self.rope.describe()}")
        if model.rms_norm_eps != self.rms_norm_eps:
            eps = f"{model.rms_norm_eps:g} instead of {self.rms_norm_eps:g}"
            found.append(f"model.rms_norm_eps {eps}")
        theirs = self.pattern(context)
        kinds, their_kinds = (" and ".join(x.kinds) for x in (run.attention, theirs))
        if kinds != their_kinds:
            found.append(f"{kinds} attention instead of {their_kinds}")
        elif run.attention.settings(model.layers) != theirs.settings(model.layers):
            found.append(f"other settings of {their_kinds} attention")
        return found


def _repeats(values: list[bool], length: int) -> bool:
    """Whether `values` are its first `length` again and again."""
    return all(value == values[index % length] for index, value in enumerate(values))


def cache_root(folder: Path) -> Path:
    """The folder that links of a folder of weights may not leave.

    It is the folder itself, or models--ORGANISATION--NAME for a snapshot in a cache of Hugging
    Face, whose files are links from snapshots/REVISION/ to ../../blobs/.
    """
    if "\0" in str(folder):  # no path of a system, which the reader says
        return folder
    parents = Path(os.path.realpath(folder)).parents
    is_cached = len(parents) > 1 and parents[0].name == "snapshots"
    return parents[1] if is_cached and parents[1].name.startswith("models--") else folder


def read_folder_config(folder: Path) -> FolderConfig:
    """Read and check a folder's config.json; UserError lists everything that is not supported."""
    path = folder / CONFIG
    fields = read_json_object(path, MAX_BYTES, within=cache_root(folder))
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in DEFAULTS:  # its fields mean other things
        only = ", ".join(f'"{known}"' for known in DEFAULTS)
        raise UserError(
            f"{path}: model_type = {shown(family)} is not supported, only {only}: use a model of "
            "one of these families"
        )
    fields = {**DEFAULTS[family], **fields}
    fields = {key: value for key, value in fields.items() if value is not None}  # null: not set
    rope, problems = read_rope(fields, fields.get("max_position_embeddings"))
    values = {**fields, **rope, **_windows(family, fields)}
    values["activation"] = _activation(family, fields)
    values.setdefault("num_key_value_heads", fields.get("num_attention_heads", 1))
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        values.setdefault("head_dim", hidden // heads)
    problems += [*_unsupported(family, fields), *_window_problems(family, fields)]
    values["attention"], wrong = read_attention(fields.get("longspan", DENSE))
    problems += wrong
    try:
        config = FolderConfig.model_validate(values)
        problems += filter(None, [config.disagreement()])
    except ValidationError as error:
        problems += _described(error)
    if problems:
        raise UserError(
            "\n".join(
                [
                    f"{path} describes a model that this decoder does not compute:",
                    *(f"    {problem}" for problem in problems),
                ]
            )
        )
    return config


def _activation(family: str, fields: Mapping[str, Any]) -> str:
    name = fields.get("hidden_act", "silu")
    if family == "gemma" and name == "gelu":  # by which transformers means the approximation
        name = "gelu_pytorch_tanh"
    return ACTIVATIONS.get(name, "") if isinstance(name, str) else ""


def _windows(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window, and the layers that have it."""
    is_qwen = family in ("qwen2", "qwen3")
    has_window = family in ("mistral", "ministral")
    if is_qwen:
        has_window = fields.get("use_sliding_window", False)
    return {
        "window": fields.get("sliding_window") if has_window else None,
        "first_window_layer": fields.get("max_window_layers", 0) if is_qwen else 0,
        "layer_types": fields.get("layer_types") if is_qwen or family == "ministral" else None,
    }


def read_attention(table: object) -> tuple[Attention, list[str]]:
    """The pattern in the table `longspan` of a config, and what is wrong with it."""
    if not isinstance(table, dict) or list(table) != ["attention"]:
        return Attention(kind="dense"), [
            'longspan must be {"attention": {"kind": …}} with keys of [attention] in a run file, '
            f"got {shown(table)}"
        ]
    try:
        attention = Attention.model_validate(table["attention"])
    except ValidationError as error:
        return Attention(kind="dense"), _described(error, "longspan", "attention")
    return attention, [f"longspan.{p.path} {p.message}" for p in attention_rules(attention)]


def _described(error: ValidationError, *within: str) -> list[str]:
    """The problems of fields in words, each with the field's name."""
    found = []
    for detail in error.errors():
        name = ".".join(map(str, (*within, *detail["loc"])))
        got = "" if detail["type"] == "missing" else f", got {shown(detail['input'])}"
        found.append(f"{name}: {detail['msg']}{got}")
    return found


def _unsupported(family: str, fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if name in SUPPORTED:
            if value not in SUPPORTED[name]:
                only = " or ".join(map(shown, SUPPORTED[name])) or "null"
                yield f"{name} = {shown(value)} is not supported, only {only}: use another model"
        elif name not in HONOURED | HARMLESS:
            plain = name if name.isidentifier() else shown(name)  # no control characters
            yield (
                f"{plain} = {shown(value)} is an unknown field: remove it from {CONFIG} if it does "
                "not change what the model computes"
            )
    for name, families in BIASES.items():
        if fields.get(name, False) is not False and family not in families:
            text = f"{name} = {shown(fields[name])} is not supported with model_type"
            yield f'{text} = "{family}", only false: use another model'
    if not _activation(family, fields):
        only = " or ".join(f'"{name}"' for name in ACTIVATIONS)
        text = f"hidden_act = {shown(fields.get('hidden_act'))} is not supported, only {only}"
        yield f"{text}: use another model"


def _window_problems(family: str, fields: Mapping[str, Any]) -> Iterator[str]:
    window, types = fields.get("sliding_window"), fields.get("layer_types", [])
    if family in ("llama", "gemma"):
        known = ["full_attention"]
        for name in ("sliding_window", "use_sliding_window", "max_window_layers"):
            if value := fields.get(name):
                text = f"{name} = {shown(value)} is not supported with model_type"
                yield f'{text} = "{family}", only null: use another model'
    elif family == "mistral":  # has the window in all layers or in none
        known = ["full_attention" if window is None else "sliding_attention"]
    elif family == "ministral":
        known = ["full_attention", *(["sliding_attention"] if window is not None else [])]
    else:
        known = ["full_attention"]
        uses = fields.get("use_sliding_window", False)
        if not isinstance(uses, bool):
            yield f"use_sliding_window: expected true or false, got {shown(uses)}"
        elif uses and window is not None:
            known.append("sliding_attention")
    layers = fields.get("num_hidden_layers")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        only = " or ".join(f'"{kind}"' for kind in known)
        yield f"layer_types = {shown(types)} is not supported, only {only}: use another model"
    elif "layer_types" in fields and len(types) != layers:
        yield f"layer_types has {len(types)} entries, but num_hidden_layers = {shown(layers)}"
