"""The whole run as frozen, typed data. Imports no torch and no other room.

`runfile.py` reads TOML, YAML and overrides into a `Run`, `rules.py` says what must hold between its
values; here stand the sections and their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longspan import presets
from longspan.costs import Cost, rank_for

LARGEST = 1 << 48  # no count here is larger; what is would overflow somewhere below
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[int, Field(ge=-1, le=LARGEST)]
Integers = Annotated[tuple[Positive, ...], Field(strict=False)]  # TOML gives a list


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Sketch(Section):
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a dense layer's numbers that a layer stores, where neither rank says more."""
    rank: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Rank of each term, for all layers."""
    ranks: dict[str, Annotated[int, Field(ge=0, le=1 << 20)]] = {}
    """Rank of each term by a pattern for names (`"blocks.*.mlp.*" = 48`); 0 leaves one dense."""
    terms: Annotated[int, Field(ge=1, le=1 << 10)] = 1
    """Sketched terms of a layer; a layer of l terms of rank k can do what one of rank l · k can."""
    layers: str = "*"
    """Which linear layers, as a pattern for their names (`blocks.*.mlp.*`); others are dense."""
    seed: Whole = 0
    """Of the fixed signs of sketched layers, which no checkpoint holds."""


class Model(Section):
    preset: Literal["tiny", "125m", "350m", "1.3b", "7b", "13b"] = "tiny"
    """A size by name; every other key of this section replaces one of its values."""
    layers: Positive = 2
    """Transformer blocks."""
    hidden: Positive = 128
    """Width of the residual stream; a multiple of `heads`."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 4
    """Heads of keys and values; fewer than `heads` is grouped-query attention."""
    ffn: Positive = 384
    """Width of the gated MLP; unless given, 8/3 of `hidden` rounded up to a multiple of 128."""
    vocab: Positive = 256
    """Tokens the model knows; at least as many as the tokenizer has."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding."""
    sub_layer_norm: bool = False
    """MAGNETO's extra norms before the attention's and the MLP's last projection, and its init."""
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary embedding; unless given, chosen from `data.context`."""
    linear: Literal["dense", "sketched", "low_rank"] = "dense"
    """How the blocks' linear layers are stored; see [model.sketch] for those that are not dense."""
    sketch: Sketch = Sketch()
    """A table of its own, [model.sketch]."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "tiny")
        base = presets.MODELS.get(preset, {}) if isinstance(preset, str) else {}
        filled = {**base, **given}
        filled.setdefault("kv_heads", filled.get("heads", 4))
        if "ffn" not in filled and isinstance(hidden := filled.get("hidden"), int):
            filled["ffn"] = max(1, -(-8 * hidden // 384) * 128)
        return filled

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def rank_of(self, name: str, in_features: int, out_features: int) -> int:
        """The rank of each term of a linear layer, `name` being blocks.3.mlp.up; 0 for a dense one.

        The first pattern of `sketch.ranks` that matches counts.
        """
        sketch = self.sketch
        if self.linear == "dense" or not fnmatchcase(name, sketch.layers):
            return 0
        matching = (rank for glob, rank in sketch.ranks.items() if fnmatchcase(name, glob))
        found = next(matching, sketch.rank)
        if found is not None:
            return found
        return max(1, rank_for(in_features, out_features, sketch.keep) // sketch.terms)

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linear layers, by name."""
        narrow = self.kv_heads * self.head_dim
        return {
            "attention.query": (self.hidden, self.hidden),
            "attention.key": (self.hidden, narrow),
            "attention.value": (self.hidden, narrow),
            "attention.out": (self.hidden, self.hidden),
            "mlp.gate": (self.hidden, self.ffn),
            "mlp.up": (self.hidden, self.ffn),
            "mlp.down": (self.ffn, self.hidden),
        }

    def linear_costs(self) -> tuple[Cost, Cost]:
        """Of the blocks' linear layers: as dense ones would, and as these take."""
        before = after = Cost(0, 0, 0)
        for block in range(self.layers):
            for name, size in self.linear_sizes.items():
                dense = Cost.dense(*size)
                rank = self.rank_of(f"blocks.{block}.{name}", *size) * self.sketch.terms
                form = Cost.low_rank if self.linear == "low_rank" else Cost.sketched
                before, after = before + dense, after + (form(*size, rank) if rank else dense)
        return before, after

    def rope_theta_for(self, context: int) -> float:
        """The base that turns the slowest pair of channels by at most ¼ radian over the context.

        Pair i of D/2 turns by base^(−2i/D) per token, so the slowest, i = D/2 − 1, turns by
        context · base^(−(D−2)/D) in all. 128K tokens at D = 128 give 6.5e5, near the 5e5 that
        Llama 3 uses there.
        """
        if self.rope_theta is not None:
            return self.rope_theta
        if self.head_dim <= 2:
            return 10_000.0
        return float(max(10_000.0, (4 * context) ** (self.head_dim / (self.head_dim - 2))))


class Attention(Section):
    kind: Literal["dense", "dilated", "block_sparse"] = "dilated"
    """Which keys a query sees."""
    segment_lengths: Integers = ()
    """Tokens per segment of each dilated branch; unless given, those of the model's preset."""
    dilation_rates: Integers = ()
    """Every how many positions each dilated branch keeps."""
    block_size: Positive = 128
    """Tokens per block of a block-sparse pattern, which always keeps the blocks of the diagonal."""
    local_window: Whole = 0
    """Tokens back and ahead that a block sees, in whole blocks, its own included."""
    global_tokens: Whole = 0
    """First tokens, in whole blocks, that all see and that see all."""
    stride: Whole = 0
    """Every how many blocks one is kept; 0 for none."""
    density: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of all blocks kept beside those, drawn from `block_seed`."""
    block_seed: Whole = 0
    """Which blocks are drawn."""


class Data(Section):
    source: Annotated[str, Field(min_length=1)] = "builtin"
    """The text: "builtin" (the Python standard library's source), "recall" (a synthetic task),
    or a folder made by `longspan data build`."""
    context: Positive = 4096
    """Tokens per sample."""
    recall_pairs: Positive = 16
    """Key-value pairs in each sequence of the "recall" source."""
    accept_changed: bool = False
    """Whether a run may go on with other data than its checkpoint was trained with."""


DILATED_KEYS = ("segment_lengths", "dilation_rates")
BLOCK_SPARSE_KEYS = ("local_window", "global_tokens", "stride", "density", "block_seed")

AXES = ("replicate", "shard", "sequence", "tensor", "pipeline")


class Layout(Section):
    """Ranks per mesh axis; -1 means the rest of the devices."""

    replicate: Ranks = 1
    """Copies of the model."""
    shard: Ranks = -1
    """Ranks that share one copy's parameters, gradients and optimizer state."""
    sequence: Ranks = 1
    """Ranks that share one sequence."""
    tensor: Ranks = 1
    """Ranks that share each matrix."""
    pipeline: Ranks = 1
    """Ranks that share the layers."""
    zero: Literal[0, 1, 2, 3] = 3
    """What the `shard` axis splits: 1 optimizer state, 2 gradients too, 3 parameters too; with 0
    its ranks are copies, as those of `replicate`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """In what order the ranks of the `pipeline` axis take micro-batches."""
    virtual_stages: Positive = 2
    """Stages per rank of the "interleaved" schedule; "zbv" has two, the others one."""
    megatron_sequence_parallel: bool = False
    """Whether the `tensor` axis also splits norms and residual stream, by tokens."""
    gradient_compression: Literal["none", "bf16", "powersgd"] = "none"
    """How copies of a model that is neither sharded nor split send each other gradients."""
    offload: bool = False
    """Whether a sharded model's parameters, gradients and optimizer state wait in the CPU's
    memory, where the optimizer then runs."""

    @property
    def stages_per_rank(self) -> int:
        """Of the pipeline."""
        return {"zbv": 2, "interleaved": self.virtual_stages}.get(self.schedule, 1)

    def ranks(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def fewest(self) -> int:
        """Processes that it takes at least: the product of the axes that are given."""
        return math.prod(n for n in self.ranks().values() if n > 0)

    def resolve(self, world: int) -> dict[str, int]:
        """Ranks per axis for `world` processes, with -1 filled in."""
        ranks = self.ranks()
        if problems := layout_problems(ranks, world):
            raise ValueError("; ".join(problems))
        found = {axis: world // self.fewest if n == -1 else n for axis, n in ranks.items()}
        if self.zero == 0:
            found |= {"replicate": found["replicate"] * found["shard"], "shard": 1}
        return found


class Train(Section):
    steps: Positive = 200
    """Optimizer steps in all."""
    init_from: str = ""
    """A Hugging Face folder of a Llama whose weights a new run begins with; else they are drawn."""
    micro_batch: Positive = 1
    """Sequences per forward pass."""
    global_batch: Positive = 1
    """Sequences per optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How `lr`, tuned at `base_batch`, follows `global_batch`."""
    base_batch: Positive | None = None
    """The global batch at which `lr` was tuned."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """What follows the warmup; "wsd" is stable, then a linear decay."""
    warmup: Whole = 20
    """Steps of linear warmup."""
    decay: Positive | None = None
    """Steps of the final decay of the "wsd" schedule."""
    min_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the decay ends, as a fraction of the learning rate."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW with its moments in 32 bits, or in 8 (torchao), which saves 6 bytes a parameter."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's; matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    grad_norm_spike: Annotated[float, Field(ge=0)] = 0.0
    """Skip steps whose gradient norm is more than so many times the usual one; 0 skips only those
    that are no numbers."""
    max_skipped_steps: Positive = 5
    """Skipped steps in a row after which the run goes back to its newest checkpoint and leaves
    their samples out."""
    max_rollbacks: Whole = 3
    """How often it may do that."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress after which a rank says where all are, and ends the run."""
    halve_on_oom: bool = False
    """Whether a run that is out of memory goes on from its newest checkpoint with half the
    micro-batch, and the same global batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run: "auto" is a CUDA GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The type of the arithmetic: "auto" is bf16 on a GPU that has it, fp32 elsewhere. Weights
    and optimizer stay fp32."""
    compile: Literal["auto", True, False] = "auto"
    """torch.compile of each block; "auto" is on for CUDA."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of being kept: of each block all but
    the matrix products and the attention ("selective"), or all ("full")."""
    offload_activations: bool = False
    """Whether kept activations wait in the CPU's memory between the passes."""
    seed: Whole = 0
    """Of the weights and of the order of samples."""
    eval_every: Whole = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_samples: Positive = 16
    """Validation sequences per evaluation."""

    @property
    def peak_lr(self) -> float:
        """`lr` scaled from `base_batch` to `global_batch`."""
        ratio = self.global_batch / (self.base_batch or self.global_batch)
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]
        return self.lr * factor


Place = Literal["none", "cpu", "nvme"]


class Engine(Section):
    name: Literal["native", "deepspeed", "accelerate"] = "native"
    """Who runs a step: PyTorch itself, DeepSpeed, or Hugging Face Accelerate."""
    mode: Literal["auto", "plain", "fsdp2", "deepspeed"] = "auto"
    """What Accelerate uses: "auto" is plain data parallelism where the ranks are copies, and FSDP2
    where they shard. The keys below are DeepSpeed's."""
    offload_optimizer: Place = "none"
    """Where its optimizer state waits, and the optimizer runs, instead of on the device."""
    offload_parameters: Place = "none"
    """Where ZeRO-3's parameters wait instead of on the device."""
    nvme_path: str = ""
    """A folder on a fast disk, for "nvme"."""
    overlap_comm: bool | None = None
    """Whether gradients travel during the backward pass; unless given, with ZeRO-3."""
    contiguous_gradients: bool | None = None
    """Whether gradients are copied to one buffer as they come; unless given, they are."""
    reduce_bucket: Positive | None = None
    """Numbers in one message of gradients; unless given, 5e8, or the model's if it has fewer."""
    allgather_bucket: Positive | None = None
    """Numbers in one message of parameters (ZeRO 1 and 2); unless given, as `reduce_bucket`."""
    prefetch_bucket: Whole | None = None
    """Parameters that ZeRO-3 fetches ahead of use; unless given, 5e7."""
    persistence_threshold: Whole | None = None
    """Parameters of fewer numbers ZeRO-3 keeps whole on every rank; unless given, 1e5."""
    deepspeed_json: str = ""
    """A DeepSpeed configuration file with settings that have no key here. It is refused where it
    disagrees with the run file; see `longspan config show --deepspeed`."""


class Checkpoint(Section):
    every: Whole = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 2
    """How many of the newest to keep."""
    keep_every: Whole = 0
    """Steps between checkpoints that are kept for good; 0 keeps none."""
    async_save: bool = True
    """Write behind the training, which waits only while tensors are copied to the CPU's memory."""


class Track(Section):
    log_every: Positive = 10
    """Steps between lines of metrics."""
    prompt: str = "def "
    """Start of the sample written at the end of a run; empty writes none."""


class Run(Section):
    """A run file: one table per section, each optional."""

    model: Model = Model()
    attention: Attention = Attention()
    data: Data = Data()
    layout: Layout = Layout()
    train: Train = Train()
    engine: Engine = Engine()
    checkpoint: Checkpoint = Checkpoint()
    track: Track = Track()


def derived_values(run: Run, world: int = 1) -> dict[str, str]:
    """What follows from a run file on `world` processes, in words for people."""
    train, context = run.train, run.data.context
    ranks = run.layout.resolve(world)
    data_ranks = ranks["replicate"] * ranks["shard"]
    tokens = train.global_batch * context
    linear = {} if run.model.linear == "dense" else {"linear layers": _linear_words(run.model)}
    return {
        **linear,
        "attention": f"{run.attention.kind}{_pattern_words(run.attention)}"
        + f", context {context:,}, rope base {run.model.rope_theta_for(context):,.0f}",
        "batch": f"{train.global_batch} = micro {train.micro_batch} × accumulation "
        f"{train.global_batch // (train.micro_batch * data_ranks)} × data-parallel {data_ranks}",
        "tokens": f"{tokens:,} a step × {train.steps:,} steps = {tokens * train.steps:,}",
        "learning rate": f"{train.peak_lr:g} peak, {train.schedule}, {train.warmup} warmup steps",
        "layout": " × ".join(f"{axis} {n}" for axis, n in ranks.items())
        + (f", ZeRO stage {run.layout.zero}" if ranks["shard"] > 1 else ""),
    }


def _linear_words(model: Model) -> str:
    dense, own = model.linear_costs()
    training = (own.forward + own.backward) / (dense.forward + dense.backward)
    return (
        f"{model.linear}, {own.stored:,} numbers where dense ones have {dense.stored:,} "
        f"({own.stored / dense.stored:.1%}), {own.forward / dense.forward:.1%} of their FLOPs "
        f"forward, {training:.1%} in training"
    )


def _pattern_words(attention: Attention) -> str:
    if attention.kind == "block_sparse":
        words = {
            key: getattr(attention, key)
            for key in ("block_size", *BLOCK_SPARSE_KEYS)
            if getattr(attention, key)
        }
        return "".join(f" {key} {value:g}" for key, value in words.items())
    branches = zip(attention.segment_lengths, attention.dilation_rates, strict=True)
    return "".join(f" {w}/{r}" for w, r in branches)


def fill_branches(tables: dict[str, Any]) -> dict[str, Any]:
    """Give a dilated [attention] without branches those of the model's preset."""
    model, attention = tables.get("model", {}), tables.get("attention", {})
    if not isinstance(model, Mapping) or not isinstance(attention, Mapping):
        return tables
    bare = not {"segment_lengths", "dilation_rates"} & set(attention)
    if attention.get("kind", "dilated") != "dilated" or not bare:
        return tables
    branches = presets.BRANCHES.get(str(model.get("preset", "tiny")), {})
    return {**tables, "attention": {**branches, **attention}}


def branch_problems(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...]) -> list[str]:
    """What keeps these from being the branches of a dilated pattern."""
    if len(segment_lengths) != len(dilation_rates) or not segment_lengths:
        return [
            "segment_lengths and dilation_rates need one entry per branch, got "
            f"{len(segment_lengths)} and {len(dilation_rates)}"
        ]
    problems = []
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        if w < 1 or r < 1:
            problems.append(f"a segment length and its rate must be at least 1, got {w} and {r}")
        elif w % r:
            nearest = max(r, round(w / r) * r)
            problems.append(
                f"segment length {w} must be a multiple of its dilation rate {r}: use {nearest}"
            )
    return problems


def block_problem(tokens: int, block_size: int) -> str | None:
    """What keeps this from being a number of tokens in whole blocks."""
    if tokens % block_size == 0:
        return None
    return (
        f"must be a multiple of block_size = {block_size}, got {tokens}: "
        f"use {round(tokens / block_size) * block_size}"
    )


def layout_problems(ranks: Mapping[str, int], world: int) -> list[str]:
    """What keeps these ranks per axis from covering `world` processes."""
    if zeros := [axis for axis, n in ranks.items() if n == 0]:
        return [f"{axis} must be at least 1, or -1 for the rest, got 0" for axis in zeros]
    rest = [axis for axis, n in ranks.items() if n == -1]
    if len(rest) > 1:
        return [f"only one axis can be -1, the rest of the devices, got {', '.join(rest)}"]
    fixed = math.prod(n for n in ranks.values() if n > 0)
    if world % fixed or (not rest and fixed != world):
        product = " × ".join(f"{axis} {n}" for axis, n in ranks.items() if n > 1)
        return [f"{product or 'the product 1'} needs {fixed} processes and there are {world}"]
    return []
