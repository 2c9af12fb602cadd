"""Reads the config.json of a Hugging Face Llama, and refuses what this decoder does not compute.

Every field is honoured, known to be harmless, or refused by name. An unknown field is refused as
well: transformers adds fields that change what a model computes, and weights that load but compute
something else are the worst outcome. Who knows that a field is harmless can remove it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longspan.config import Attention, Model, Positive, Run
from longspan.errors import UserError
from longspan.files import read_json_object
from longspan.rules import attention_rules
from longspan.wording import shown

CONFIG = "config.json"
DENSE = {"attention": {"kind": "dense"}}
"""The table `longspan` of a config.json without it."""
MAX_BYTES = 1 << 20
"""Size limit of a config.json; real ones have a few kilobytes."""

SHAPES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
"""The keys of [model] that must equal a field of config.json."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "pretraining_tp": (1,),
    "sliding_window": (),
    "use_sliding_window": (False,),
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

ROPE_FIELDS = ("rope_parameters", "rope_scaling")
"""The table of RoPE's settings in transformers 5, and in 4."""

HONOURED = {*SHAPES.values(), *ROPE_FIELDS, "rope_theta", "rms_norm_eps", "head_dim", "layer_types"}
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
"""Fields that do not change what a causal Llama computes."""


class LlamaConfig(BaseModel):
    """What config.json says about a model, by the keys of [model]."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    layers: Positive = Field(alias="num_hidden_layers")
    hidden: Positive = Field(alias="hidden_size")
    heads: Positive = Field(alias="num_attention_heads")
    kv_heads: Positive = Field(alias="num_key_value_heads")
    ffn: Positive = Field(alias="intermediate_size")
    vocab: Positive = Field(alias="vocab_size")
    tie_embeddings: bool = Field(alias="tie_word_embeddings", default=False)
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    max_positions: Positive | None = Field(alias="max_position_embeddings", default=None)
    attention: Attention = Attention(kind="dense")
    """The pattern it was trained with, if `longspan export` wrote the folder."""

    def disagreements(self, model: Model) -> dict[str, str]:
        """What to change in [model] so that the weights fit, by key."""
        found = {}
        for key in SHAPES:
            theirs, ours = (json.dumps(getattr(x, key)) for x in (self, model))
            if theirs != ours:
                found[f"model.{key}"] = (
                    f"{ours} is not the {theirs} of train.init_from: set model.{key}={theirs}"
                )
        if model.sub_layer_norm:
            found["model.sub_layer_norm"] = (
                "true is not supported with train.init_from, as Llama has no such norms: use false"
            )
        return found

    def changes(self, run: Run) -> list[str]:
        """What the run computes otherwise than the model was trained with, in words."""
        model, context = run.model, run.data.context
        theta = model.rope_theta_for(context)
        found = []
        if theta != self.rope_theta:
            found.append(f"model.rope_theta {theta:g} instead of {self.rope_theta:g}")
        if model.rms_norm_eps != self.rms_norm_eps:
            eps = f"{model.rms_norm_eps:g} instead of {self.rms_norm_eps:g}"
            found.append(f"model.rms_norm_eps {eps}")
        if run.attention.kind != self.attention.kind:
            found.append(f"{run.attention.kind} attention instead of {self.attention.kind}")
        elif run.attention != self.attention and self.attention.kind != "dense":
            found.append(f"other settings of {self.attention.kind} attention")
        if self.max_positions is not None and context > self.max_positions:
            found.append(f"context {context:,} instead of at most {self.max_positions:,}")
        return found


def cache_root(folder: Path) -> Path:
    """The folder that links of a folder of weights may not leave.

    It is the folder itself, or models--ORGANISATION--NAME for a snapshot in a cache of Hugging
    Face, whose files are links from snapshots/REVISION/ to ../../blobs/.
    """
    parents = Path(os.path.realpath(folder)).parents
    is_cached = len(parents) > 1 and parents[0].name == "snapshots"
    return parents[1] if is_cached and parents[1].name.startswith("models--") else folder


def read_llama_config(folder: Path) -> LlamaConfig:
    """Read and check a folder's config.json; UserError lists everything that is not supported."""
    path = folder / CONFIG
    fields = read_json_object(path, MAX_BYTES, within=cache_root(folder))
    fields = {key: value for key, value in fields.items() if value is not None}  # null: not set
    if (kind := fields.get("model_type")) != "llama":  # the fields of others mean other things
        raise UserError(
            f"{path}: model_type = {shown(kind)} is not supported, only "
            '"llama": use a Llama model for train.init_from'
        )
    problems = [*_unsupported(fields), *_rope_problems(fields), *_head_dim_problems(fields)]
    values = {**fields, "rope_theta": _rope_thetas(fields)[0]}
    values.setdefault("num_key_value_heads", fields.get("num_attention_heads", 1))
    values["attention"], wrong = read_attention(fields.get("longspan", DENSE))
    problems += wrong
    try:
        config = LlamaConfig.model_validate(values)
    except ValidationError as error:
        problems += _described(error)
    if problems:
        raise UserError(
            "\n".join(
                [
                    f"{path} describes a model that cannot initialise this decoder:",
                    *(f"    {problem}" for problem in problems),
                ]
            )
        )
    return config


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


def _unsupported(fields: Mapping[str, Any]) -> Iterator[str]:
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
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        yield (
            f'layer_types = {shown(layer_types)} is not supported, only "full_attention": use '
            "another model"
        )


def _rope_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    for table in ROPE_FIELDS:
        rope = fields.get(table, {})
        if not isinstance(rope, dict):
            yield f"{table}: expected a table, got {shown(rope)}"
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            yield (
                f"{table} with rope_type = {shown(kind)} is not supported, only "
                '"default": use a model without RoPE scaling'
            )
            continue
        for name, value in rope.items():
            is_default = name == "partial_rotary_factor" and value == 1
            known = name in ("rope_type", "type", "rope_theta") or is_default or value is None
            if not known:
                yield f"{table}.{name} = {shown(value)} is not supported: use another model"
    thetas = _rope_thetas(fields)
    if any(theta != thetas[0] for theta in thetas):
        yield f"rope_theta has several values: {', '.join(map(shown, thetas))}; keep one"


def _rope_thetas(fields: Mapping[str, Any]) -> list[Any]:
    """The values of rope_theta in all its places; the default of transformers if there is none."""
    tables = [fields, *(fields.get(name) for name in ROPE_FIELDS)]
    found = [table.get("rope_theta") for table in tables if isinstance(table, dict)]
    return [theta for theta in found if theta is not None] or [10_000.0]


def _head_dim_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    head_dim, hidden, heads = (
        fields.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")
    )
    if head_dim is None or not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return
    if not isinstance(head_dim, int) or head_dim * heads != hidden:
        yield (
            f"head_dim = {shown(head_dim)} is not supported, only hidden_size / "
            f"num_attention_heads = {shown(hidden)} / {heads}: use another model"
        )
