"""The run file as frozen, typed data: its sections, keys and defaults. Imports no torch.

`runfile.py` reads TOML, YAML and overrides into a `Run`; `rules.py` checks what must hold between
its values; `derived.py` describes what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from longspan import presets
from longspan.checks import layout_problems
from longspan.hardware import may_have_gpu


def _as_integer(value: Any) -> Any:
    """Accept 1e3 and 1000.0 where an integer is expected."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
MAX_INT = 1 << 48  # larger counts would overflow somewhere below
Integer = Annotated[int, BeforeValidator(_as_integer)]
Positive = Annotated[Integer, Field(ge=1, le=MAX_INT)]
NonNegative = Annotated[Integer, Field(ge=0, le=MAX_INT)]
Ranks = Annotated[Integer, Field(ge=-1, le=MAX_INT)]
Integers = Annotated[tuple[Positive, ...], Field(strict=False)]  # TOML has lists, not tuples


class Section(BaseModel):
    """A table of the run file: frozen, with checked keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Sketch(Section):
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of a dense layer's parameters that each layer stores, unless `rank` or `ranks` sets
    its rank."""
    rank: Annotated[Integer, Field(ge=1, le=1 << 20)] | None = None
    """Sets the rank of each term, for all layers."""
    ranks: dict[str, Annotated[Integer, Field(ge=0, le=1 << 20)]] = {}
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


class Rope(Section):
    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    """How the frequencies of RoPE are scaled: `rope_type` of transformers. "default" does not scale
    them."""
    factor: Annotated[float, Field(ge=1)] = 1.0
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
    family: Literal["llama", "mistral", "qwen2", "qwen3", "gemma"] = "llama"
    """Model type of Hugging Face, which `longspan export` writes: "qwen2" has biases on query, key
    and value; "qwen3" normalises the queries and keys of each head; "gemma" scales the embedding by
    √hidden and adds 1 to the weights of norms; "mistral" is computed like "llama"."""
    layers: Positive = 2
    """Number of transformer blocks."""
    hidden: Positive = 128
    """Hidden size, the width of the residual stream."""
    heads: Positive = 4
    """Number of query heads."""
    kv_heads: Positive = 4
    """Number of key and value heads; fewer than `heads` gives grouped-query attention (GQA)."""
    head_dim: NonNegative = 32
    """Width of a head; by default hidden / heads."""
    ffn: Positive = 384
    """Width of the gated MLP; by default 8/3 of `hidden`, rounded up to a multiple of 128."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Activation of the gated MLP: "silu" makes it a SwiGLU; "gelu_tanh" approximates "gelu"."""
    attention_bias: bool = False
    """Adds biases to all four projections of attention (families "llama", "qwen3" and "gemma")."""
    mlp_bias: bool = False
    """Adds biases to the projections of the MLP (family "llama")."""
    vocab: Positive = 256
    """Vocabulary size, at least that of the tokenizer; by default that of `model.from` or
    `train.init_from`, else that of the tokenizer in the folder `data.source`, rounded up to a
    multiple of 64, else the preset's."""
    tie_embeddings: bool = True
    """Uses the token embedding as the weight of the output head."""
    sub_layer_norm: bool = False
    """Adds MAGNETO's norms before the last projections of attention and MLP, and uses its
    initialisation."""
    rope_theta: Annotated[float, Field(gt=1)] | None = None
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

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "tiny")
        base = presets.MODELS.get(preset, {}) if isinstance(preset, str) else {}
        filled = {**base, **given}
        filled.setdefault("kv_heads", filled.get("heads", 4))
        hidden, heads = (_as_integer(filled.get(key)) for key in ("hidden", "heads"))
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


class Attention(Section):
    kind: Literal["dense", "dilated", "block_sparse", "dilated_block_sparse", "window"] = "dilated"
    """Attention pattern, which decides which keys a query attends to; "dilated_block_sparse" is
    dilated, and block-sparse among the positions that a branch keeps of a segment; "window" is a
    sliding window that is exact to the token."""
    segment_lengths: Integers = ()
    """Tokens per segment of each dilated branch; by default they grow from 2,048 (preset "tiny":
    256) to the context."""
    dilation_rates: Integers = ()
    """Dilation rate of each branch, which attends to every n-th position of its segment; by default
    1, 4, 16 and 32, as many as the context needs."""
    block_size: Positive = 128
    """Tokens per block of a block-sparse pattern, which always keeps the blocks on the diagonal."""
    local_window: NonNegative = 0
    """Sliding window in tokens: how far a block attends back and ahead, its own block included;
    a multiple of `block_size`."""
    global_tokens: NonNegative = 0
    """Number of first tokens that attend to all tokens and that all tokens attend to; a multiple of
    `block_size`."""
    stride: NonNegative = 0
    """Keeps every n-th block, counted from the diagonal; 0 keeps none of them."""
    density: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of all blocks that is also kept at random, drawn with `block_seed`."""
    block_seed: NonNegative = 0
    """Seed for the random blocks of `density`."""
    window: NonNegative = 0
    """Number of tokens that a query of kind "window" attends to, itself included."""
    sinks: NonNegative = 0
    """Number of first tokens that all queries of kind "window" also attend to (attention sinks)."""
    window_dilation: NonNegative = 0
    """Distance between the tokens of a window; 0 and 1 are a window without gaps."""


class Data(Section):
    source: Annotated[str, Field(min_length=1)] = "builtin"
    """Training text: "builtin" (the source of the Python standard library), "recall" (a synthetic
    task), or a folder written by `longspan data build`."""
    context: Positive = 4096
    """Context length, the number of tokens per sample."""
    documents: Literal["isolate", "join"] = "join"
    """"isolate": attention, positions and losses stay within a document, and documents are packed
    into windows whole where they fit; "join": they are concatenated, and attention crosses
    their boundaries."""
    recall_pairs: Positive = 16
    """Number of key-value pairs in each sequence of the "recall" source."""
    accept_changed: bool = False
    """Lets a run resume on data other than its checkpoint was trained on."""
    verify: bool = True
    """Verifies the SHA-256 of every token shard at the start; shards that have not changed since
    the last time are not read again."""


DILATED = ("dilated", "dilated_block_sparse")
"""The kinds of attention with dilated branches."""
BLOCK_SPARSE = ("block_sparse", "dilated_block_sparse")
"""The kinds of attention with blocks."""
DILATED_KEYS = ("segment_lengths", "dilation_rates")
WINDOW_KEYS = ("window", "sinks", "window_dilation")
BLOCK_SPARSE_KEYS = ("local_window", "global_tokens", "stride", "density", "block_seed")

Backend = Literal["auto", "nccl", "gloo", "mpi"]
AXES = ("replicate", "shard", "sequence", "tensor", "pipeline")


class Layout(Section):
    """Number of ranks on each axis of the device mesh; -1 means the remaining devices."""

    replicate: Ranks = 1
    """Number of model replicas (data parallelism), whose gradients are averaged by all-reduce."""
    shard: Ranks = -1
    """Number of ranks that shard parameters, gradients and optimizer state (ZeRO / FSDP); with
    `replicate` > 1 this is HYBRID_SHARD (HSDP)."""
    sequence: Ranks = 1
    """Number of ranks that split each sequence (sequence, or context, parallelism)."""
    tensor: Ranks = 1
    """Number of ranks that split each weight matrix (tensor parallelism)."""
    pipeline: Ranks = 1
    """Number of ranks that split the layers into stages (pipeline parallelism)."""
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_as_integer)] = 3
    """ZeRO stage of the `shard` axis: 1 shards the optimizer state, 2 also the gradients
    (SHARD_GRAD_OP), 3 also the parameters (FULL_SHARD); 0 shards nothing (NO_SHARD), and its ranks
    are replicas."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """Pipeline schedule, the order in which the stages run micro-batches."""
    virtual_stages: Positive = 2
    """Stages per rank of the "interleaved" schedule; "zbv" always has two, the others one."""
    megatron_sequence_parallel: bool = False
    """Also splits norms and the residual stream along tokens over the tensor axis (Megatron-style
    sequence parallelism)."""
    gradient_compression: Literal["none", "bf16", "powersgd"] = "none"
    """Precision in which ranks reduce gradients: "none" is float32; "bf16" halves the bytes (FSDP's
    reduce_dtype, DeepSpeed's communication_data_type); "powersgd" all-reduces low-rank
    approximations, and needs `replicate` as the only axis."""
    offload: bool = False
    """Offloads sharded parameters, gradients and optimizer state to CPU, where the optimizer
    runs."""
    backend: Backend = "auto"
    """Library that communicates between ranks: "auto" is NCCL for GPUs (and gloo for tensors on the
    CPU), gloo on CPUs; "gloo" on GPUs needs `replicate` as the only axis; "mpi" needs a PyTorch
    that was built with MPI."""
    _why_auto: str | None = PrivateAttr(default=None)

    @property
    def why_auto(self) -> str | None:
        """Of a layout that `layout = "auto"` has given: why this one."""
        return self._why_auto

    @property
    def is_unresolved(self) -> bool:
        """Whether this stands for `layout = "auto"`, before the number of processes is known."""
        return self._why_auto == ""

    def taken_for(self, why: str) -> Layout:
        """This layout, as the one that `layout = "auto"` gives; without a reason, unresolved."""
        layout = self.model_copy()
        layout._why_auto = why
        return layout

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that each rank runs."""
        return {"zbv": 2, "interleaved": self.virtual_stages}.get(self.schedule, 1)

    def ranks(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def min_world_size(self) -> int:
        """Smallest number of processes: the product of the axes that are not -1."""
        return math.prod(n for n in self.ranks().values() if n > 0)

    def resolve(self, world: int) -> dict[str, int]:
        """Return the ranks per axis for `world` processes, with -1 resolved."""
        assert not self.is_unresolved, 'load_run(world=…) resolves layout = "auto"'
        ranks = self.ranks()
        if problems := layout_problems(ranks, world):
            raise ValueError("; ".join(problems))
        rest = world // self.min_world_size
        resolved = {axis: rest if n == -1 else n for axis, n in ranks.items()}
        if self.zero == 0:
            resolved |= {"replicate": resolved["replicate"] * resolved["shard"], "shard": 1}
        return resolved


class Train(Section):
    steps: Positive = 200
    """Total number of optimizer steps."""
    init_from: str = ""
    """Hugging Face folder whose weights initialise a new run, and whose config.json decides its
    model like `model.from`; by default weights are random."""
    micro_batch: Positive = 1
    """Sequences per forward pass on each data-parallel rank."""
    global_batch: Positive = 1
    """Sequences per optimizer step; gradient accumulation covers what `micro_batch` × data-parallel
    ranks does not."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate, reached after the warmup."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Rule by which `lr`, tuned at `base_batch`, scales with `global_batch`."""
    base_batch: Positive | None = None
    """Global batch at which `lr` was tuned."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Learning-rate schedule after the warmup; "wsd" (warmup-stable-decay) is constant, then decays
    linearly."""
    warmup_steps: NonNegative = 20
    """Number of linear warmup steps; by default 20, or `steps` if those are fewer."""
    decay_steps: Positive | None = None
    """Number of final decay steps of the "wsd" schedule."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate, as a fraction of the peak."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """Optimizer: AdamW with 32-bit moments, or with 8-bit moments (torchao), which saves 6 bytes
    per parameter."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, applied to matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate for the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay rate for the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, added to the denominator for numerical stability."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 turns gradient clipping off."""
    grad_norm_spike: Annotated[float, Field(ge=0)] = 0.0
    """Skips steps whose gradient norm exceeds this multiple of its running mean; 0 skips only NaN
    and infinite losses and gradients."""
    max_skipped_steps: Positive = 5
    """Consecutive skipped steps after which the run rolls back to its newest checkpoint and leaves
    their samples out."""
    max_rollbacks: NonNegative = 3
    """Maximum number of rollbacks before the run fails."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress in a step after which the watchdog reports where every rank is and
    ends the run."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """The same for the start, up to the end of the first step: restoring, compiling."""
    save_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """The same while training waits for a checkpoint or a profile to be written."""
    eval_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The same for each batch of an evaluation."""
    halve_on_oom: bool = False
    """Continues an out-of-memory run from its newest checkpoint with half the micro-batch and the
    same global batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; "auto" uses a CUDA GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute dtype of mixed precision (autocast); parameters and optimizer state stay fp32. "auto"
    is bf16 on a GPU that supports it, fp32 elsewhere."""
    compile: Literal["auto", True, False] = "auto"
    """Compiles each block with torch.compile; "auto" is on for CUDA."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing (recomputation in the backward pass) of each block: "selective"
    saves only matrix products and attention, "full" saves only the block's input."""
    offload_activations: bool = False
    """Offloads saved activations to CPU between the forward and backward passes."""
    seed: NonNegative = 0
    """Seed for weight initialisation and sample order."""
    eval_every: NonNegative = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_samples: Positive = 16
    """Number of validation sequences per evaluation."""

    @model_validator(mode="before")
    @classmethod
    def _shorten_warmup(cls, given: Any) -> Any:
        steps = _as_integer(given.get("steps")) if isinstance(given, Mapping) else None
        if not isinstance(steps, int) or "warmup_steps" in given:
            return given
        default: int = cls.model_fields["warmup_steps"].default
        return {**given, "warmup_steps": max(0, min(default, steps))}

    @property
    def peak_lr(self) -> float:
        """The learning rate `lr`, scaled from `base_batch` to `global_batch`."""
        ratio = self.global_batch / (self.base_batch or self.global_batch)
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]
        return self.lr * factor


OffloadTarget = Literal["none", "cpu", "nvme"]


class Engine(Section):
    name: Literal["native", "deepspeed", "accelerate"] = "native"
    """Library that runs a training step: PyTorch itself, DeepSpeed, or Hugging Face Accelerate."""
    accelerate_config: str = ""
    """Accelerate configuration file, in YAML, that must not contradict the run file (see `longspan
    config show --accelerate`)."""
    mode: Literal["auto", "plain", "fsdp2", "deepspeed"] = "auto"
    """Backend of Accelerate: "auto" is plain data parallelism (DDP) for replicas and FSDP2 for
    sharded ranks. The keys below configure DeepSpeed."""
    offload_optimizer: OffloadTarget = "none"
    """Offloads the optimizer state to CPU or NVMe; the optimizer then runs on CPU."""
    offload_param: OffloadTarget = "none"
    """Offloads ZeRO-3 parameters to CPU or NVMe."""
    nvme_path: str = ""
    """Folder on a fast disk, needed by "nvme"."""
    overlap_comm: bool | None = None
    """Overlaps gradient communication with the backward pass; by default only with ZeRO-3."""
    contiguous_gradients: bool | None = None
    """Copies gradients to one contiguous buffer as they are computed; on by default."""
    reduce_bucket_size: Positive | None = None
    """Elements per all-reduce or reduce-scatter of gradients; by default 5e8, or the model's
    parameter count if smaller."""
    allgather_bucket_size: Positive | None = None
    """Elements per all-gather of parameters (ZeRO 1 and 2); by default `reduce_bucket_size`."""
    prefetch_bucket_size: NonNegative | None = None
    """Parameter elements that ZeRO-3 prefetches; by default 5e7."""
    param_persistence_threshold: NonNegative | None = None
    """Keeps parameters with fewer elements unsharded under ZeRO-3; by default 1e5."""
    deepspeed_config: str = ""
    """DeepSpeed configuration file, in JSON, for settings that have no key here; it must not
    contradict the run file (see `longspan config show --deepspeed`)."""


class Checkpoint(Section):
    every: NonNegative = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Steps between checkpoints that are never deleted; 0 means none are exempt."""
    async_save: bool = True
    """Writes checkpoints in the background; training waits only while tensors are copied to CPU
    memory."""
    key_file: str = ""
    """Path of a file with a secret key of at least 32 bytes, which signs checkpoints (HMAC-SHA256);
    those that are not signed with it are refused."""


Sink = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Profile(Section):
    wait: NonNegative = 5
    """Steps after the start of the run, and between two cycles, that are not profiled."""
    warmup: NonNegative = 1
    """Steps before the profiled ones in which the profiler runs without a trace, since its start
    takes time."""
    active: NonNegative = 0
    """Number of steps to profile in a cycle; 0 turns profiling off."""
    repeat: Positive = 1
    """Number of cycles of `wait`, `warmup` and `active` steps."""

    @property
    def steps(self) -> int:
        """The steps that all cycles take."""
        return (self.wait + self.warmup + self.active) * self.repeat if self.active else 0


class Track(Section):
    log_every: Positive = 10
    """Steps between lines of metrics (loss, gradient norm, tokens per second, MFU, memory)."""
    prompt: str = "def "
    """Prompt for the sample generated at the end of a run; empty generates none."""
    sinks: Annotated[tuple[Sink, ...], Field(strict=False)] = ()
    """Where metrics go besides the console and metrics.jsonl: "tensorboard", "wandb", "mlflow" and
    "trackio", each of which must be installed."""
    project: Annotated[str, Field(min_length=1, max_length=128)] = "longspan"
    """Project of the run in wandb and trackio; its experiment in MLflow."""
    run_name: str = ""
    """Name of the run in wandb, trackio and MLflow; empty uses the name of the run folder."""
    per_layer_norms: bool = False
    """Log the norms of the gradients and of the parameters of each layer, too."""
    profile: Profile = Profile()
    """Which steps the profiler records, in the table [track.profile]."""
    memory_snapshot: bool = False
    """Records CUDA allocations. Snapshots for torch's memory viewer are written after
    the profiled steps, or at the end of a run without them, and when a step runs out of memory."""


class Run(Section):
    """A run file. It has one table per section, and each is optional."""

    model: Model = Model()
    attention: Attention = Attention()
    data: Data = Data()
    layout: Layout = Layout()
    train: Train = Train()
    engine: Engine = Engine()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()

    def replaces_lost_ranks(self, world: int) -> bool:
        """Whether a rank that is lost on one machine can be replaced while the others go on.

        Its state must lie on another rank too, and its collectives must be gloo's: those of NCCL
        cannot be left without ending the process. The other engines do not build their process
        groups a second time, and compiled blocks have not been tried.
        """
        train = self.train
        on_cpu = train.device == "cpu" or (train.device == "auto" and not may_have_gpu())
        is_native = self.engine.name == "native" and train.compile is not True
        is_native = is_native and self.layout.backend != "mpi"
        return on_cpu and is_native and self.layout.resolve(world)["replicate"] > 1
