"""The sections [model], [model.rope], [model.sketch] and [model.lora]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longspan import presets
from longspan.config.section import (
    MAX_INT,
    Integer,
    Layers,
    NonNegative,
    Positive,
    Section,
    Theta,
    Width,
    as_integer,
)

Preset = Literal[
    "tiny",
    "125m",
    "350m",
    "1.3b",
    "7b",
    "13b",
    "65b",
    "70b",
    "175b",
    "llama2-7b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-8b",
    "llama3.2-1b",
    "mistral-7b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
]


class Sketch(Section):
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of a dense layer's parameters that each layer stores, unless `rank` or `ranks` sets
    its rank."""
    rank: Annotated[Integer, Field(ge=1, le=1 << 20)] | None = None
    """Sets the rank of each term, for all layers."""
    ranks: dict[str, Annotated[Integer, Field(ge=0, le=1 << 20)]] = Field(default={})
    """Sets the rank of each term by a glob over layer names (`"blocks.*.mlp.*" = 48`); 0 keeps a
    layer dense."""
    terms: Annotated[Integer, Field(ge=1, le=1 << 10)] = 1
    """Number of sketched terms in a layer; l terms of rank k can represent what one term of rank l
    · k can."""
    layers: str = "*"
    """Glob over the names of the linear layers to replace (`blocks.*.mlp.*`); the others stay
    dense."""
    seed: NonNegative = 0
    """Seed for the fixed random signs of sketched layers, which are not stored in checkpoints."""


class Lora(Section):
    rank: Annotated[Integer, Field(ge=0, le=1 << 14)] = 0
    """Rank of the trained updates of frozen weights (LoRA); 0 trains the weights themselves."""
    alpha: Annotated[float, Field(gt=0, le=MAX_INT)] = 16.0
    """Scale of the updates, which are multiplied by alpha / rank."""
    layers: str = "*"
    """Glob over the names of the linear layers that get an update (`blocks.*.attention.*`)."""


class Rope(Section):
    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    """How the frequencies of RoPE are scaled: `rope_type` of transformers. "default" does not scale
    them."""
    factor: Annotated[float, Field(ge=1, le=MAX_INT)] = 1.0
    """Factor by which scaling extends the context, for every type but "default"."""
    original_context: Positive | None = None
    """Context before scaling, required by "dynamic" (`max_position_embeddings` of transformers),
    "llama3" and "yarn" (`original_max_position_embeddings`)."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Of "llama3": pairs that rotate fewer times than this in the original context are scaled."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Of "llama3": pairs that rotate more often than this are not scaled."""
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """Of "yarn": pairs that rotate more often than this in the original context are not scaled."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """Of "yarn": pairs that rotate fewer times than this are scaled."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Of "yarn": factor of queries and keys; by default derived from `factor`."""
    mscale: Annotated[float, Field(ge=0)] | None = None
    """Of "yarn": weight of the logarithm of `factor` in `attention_factor`; used with
    `mscale_all_dim`."""
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    """Of "yarn": the same in the denominator of `attention_factor`."""
    truncate: bool = True
    """Of "yarn": rounds the range of pairs between `beta_fast` and `beta_slow` to whole pairs."""

    def describe(self) -> str:
        """How RoPE is scaled, in words."""
        if self.type == "default":
            return "not scaled"
        original = f" from {self.original_context:,} tokens" if self.original_context else ""
        return f"scaled by {self.type} × {self.factor:g}{original}"


def default_ffn(hidden: int) -> int:
    """Return the width of the MLP: 8/3 of `hidden`, rounded up to a multiple of 128."""
    return max(1, -(-8 * hidden // 384) * 128)


class Model(Section):
    factory: str = ""
    """Trains your own model instead of the decoder: "package.module:function", which is called with
    the run and returns a `longspan.Task`. The other keys of [model], [attention] and [data] have no
    effect then, and are refused."""
    __annotations__["from"] = "str"  # a keyword of Python, which cannot be annotated
    vars()["from"] = Field(
        default="",
        description="Hugging Face folder whose config.json decides the model, without its weights; "
        "`train.init_from` also loads those. A key that the run file sets must agree with it, "
        "except for RoPE, `rms_norm_eps` and [attention].",
    )
    preset: Preset = "tiny"
    """Named model size; every other key of this section overrides one of its values."""
    family: Literal["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma"] = "llama"
    """Model type of Hugging Face, which `longspan export` writes: "qwen2" has biases on query, key
    and value; "qwen3" normalises the queries and keys of each head; "gemma" scales the embedding by
    √hidden and adds 1 to the weights of norms; "mistral" and "ministral" are computed like
    "llama"."""
    layers: Layers = 2
    """Number of transformer blocks."""
    hidden: Width = 128
    """Hidden size, the width of the residual stream."""
    heads: Width = 4
    """Number of query heads."""
    kv_heads: Width = 4
    """Number of key and value heads; fewer than `heads` gives grouped-query attention (GQA)."""
    head_dim: Annotated[Integer, Field(ge=0, le=1 << 24)] = 32
    """Width of a head; by default hidden / heads."""
    ffn: Width = 384
    """Width of the gated MLP; by default 8/3 of `hidden`, rounded up to a multiple of 128."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Activation of the gated MLP: "silu" makes it a SwiGLU; "gelu_tanh" approximates "gelu"."""
    attention_bias: bool = False
    """Adds biases to all four projections of attention (families "llama", "qwen3" and "gemma")."""
    mlp_bias: bool = False
    """Adds biases to the projections of the MLP (family "llama")."""
    vocab: Width = 256
    """Vocabulary size, at least that of the tokenizer; by default that of `model.from` or
    `train.init_from`, else that of the tokenizer in the folder `data.source`, rounded up to a
    multiple of 64, else the preset's."""
    tie_embeddings: bool = True
    """Uses the token embedding as the weight of the output head."""
    learnable_sinks: bool = False
    """Adds a learnable attention sink to each head: a logit in the denominator of its softmax, with
    any pattern, as in gpt-oss. It starts at 0."""
    sub_layer_norm: bool = False
    """Adds MAGNETO's norms before the last projections of attention and MLP, and uses its
    initialisation."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which training drops an element of the embedding's output and of what
    attention and MLP add to the residual stream, as in GPT-2; evaluation drops nothing."""
    rope_theta: Theta | None = None
    """Base of the rotary position embedding (RoPE); by default that of `model.from` or
    `train.init_from`, see `extend_context`, else derived from `data.context`."""
    rope: Rope = Rope()
    """Scaling of RoPE, in the table [model.rope]; by default that of `model.from` or
    `train.init_from`."""
    extend_context: Literal["theta", "yarn", "none"] = "theta"
    """How RoPE is extended if `data.context` exceeds the `max_position_embeddings` of `model.from`
    or `train.init_from`: "theta" raises its base so that the slowest pair rotates over the new
    context as it did over the old; "yarn" scales by YaRN; "none" leaves it. Ignored if the run file
    sets `rope_theta` or [model.rope]."""
    max_positions: Positive | None = None
    """Longest context that the model is made for, which `longspan export` writes as
    `max_position_embeddings`; by default `data.context`, or that of `model.from` or
    `train.init_from` if it is longer."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of every RMSNorm; by default that of `model.from` or `train.init_from`, else
    1e-6."""
    linear: Literal["dense", "sketched", "low_rank"] = "dense"
    """Form of the blocks' linear layers; [model.sketch] configures the forms that are not dense."""
    sketch: Sketch = Sketch()
    """Settings of sketched and low-rank layers, in the table [model.sketch]."""
    lora: Lora = Lora()
    """Low-rank updates to train instead of the weights (LoRA), in the table [model.lora]."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "tiny")
        base = presets.MODELS.get(preset, {}) if isinstance(preset, str) else {}
        filled = {**base, **given}
        filled.setdefault("kv_heads", filled.get("heads", 4))
        hidden, heads = (as_integer(filled.get(key)) for key in ("hidden", "heads"))
        if "head_dim" not in filled and isinstance(hidden, int) and isinstance(heads, int):
            # 0 if there is none; the rules say it
            filled["head_dim"] = hidden // heads if heads > 0 and hidden % heads == 0 else 0
        if "ffn" not in filled and isinstance(hidden, int):
            filled["ffn"] = default_ffn(hidden)
        return filled

    @property
    def folder(self) -> str:
        """The key `from`."""
        folder: str = getattr(self, "from")
        return folder

    @property
    def qk_norm(self) -> bool:
        """Whether the queries and keys of each head are normalised."""
        return self.family == "qwen3"

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms."""
        return 1.0 if self.family == "gemma" else 0.0

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedding's output."""
        return math.sqrt(self.hidden) if self.family == "gemma" else 1.0

    def has_bias(self, layer: str) -> bool:
        """Whether a block's linear layer (mlp.up) has a bias."""
        if layer.startswith("mlp."):
            return self.mlp_bias
        return self.attention_bias or (self.family == "qwen2" and layer != "attention.out")

    def rope_theta_for(self, context: int) -> float:
        """Return the base that rotates the slowest channel pair by at most ¼ radian per context.

        Pair i of D/2 rotates by base^(−2i/D) per token, so the slowest, i = D/2 − 1, rotates by
        context · base^(−(D−2)/D) in all. 128K tokens at D = 128 give 6.5e5, close to the 5e5 of
        Llama 3.
        """
        if self.rope_theta is not None:
            return self.rope_theta
        if self.head_dim <= 2:
            return 10_000.0
        return float(max(10_000.0, (4 * context) ** (self.head_dim / (self.head_dim - 2))))
