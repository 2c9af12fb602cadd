"""The section [train]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from longspan.config.section import NonNegative, Positive, Section, as_integer


class Train(Section):
    steps: Positive = 200
    """Total number of optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training data, instead of `steps`, which then follow from the data: samples
    per epoch / `global_batch`, rounded up at the end. Each epoch has its own order."""
    init_from: str = ""
    """Hugging Face folder whose weights initialise a new run, and whose config.json decides its
    model like `model.from`; by default weights are random."""
    micro_batch: Positive = 1
    """Sequences per forward pass on each data-parallel rank."""
    global_batch: Positive = 1
    """Sequences per optimizer step; gradient accumulation covers what `micro_batch` × data-parallel
    ranks does not."""
    global_batch_tokens: Positive | None = None
    """Tokens per optimizer step, padding included, instead of `global_batch`, which then is this
    divided by `data.context`."""
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
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """Optimizer: AdamW with 32-bit moments, or with 8-bit moments (torchao), which saves 6 bytes
    per parameter; "muon" orthogonalises the updates of the blocks' matrices, which saves 4, and
    uses AdamW for the rest."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay rate for the average of gradients."""
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
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999, which checkpoints hold
    beside them and `longspan eval`, `generate` and `export` use with --ema; 0 averages nothing."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Globs over the names of parameters that are not trained (`["embedding.*", "blocks.0.*"]`):
    they have no gradient and no optimizer state."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Coefficient c of the z-loss c · log²Z per token (PaLM: 1e-4), which keeps the denominator Z
    of the output softmax near 1. It adds to the gradient; the logged loss is the cross-entropy."""
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
    gpu: str = ""
    """What `layout = "auto"`, predictions and MFU take for this machine's device: a name such as
    "h100", or a TOML file that `longspan doctor --calibrate` wrote; by default the GPU's driver
    says."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Compute dtype of mixed precision (autocast); parameters and optimizer state stay fp32, unless
    `parameter_precision` and `optimizer` say otherwise. "auto" is bf16 on a GPU that supports it,
    fp32 elsewhere."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of float32 matrix products, by `torch.set_float32_matmul_precision`: "high" uses
    TF32 on GPUs that have it (Ampere or newer), "highest" does not. By default PyTorch's setting is
    left as it is, "highest" unless you change it. Attention kernels do not depend on it."""
    parameter_precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of matrices among the parameters, and of their gradients. "bf16" keeps no fp32 master
    weights: 8-bit AdamW, which it needs, rounds each update stochastically. 6 bytes per parameter
    instead of 10, and noisier steps; for the native engine on one process."""
    residual_precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the residual stream, which blocks add to. "bf16" halves its memory and traffic, and
    rounds each sum; for the native engine without tensor and pipeline parallelism."""
    fp8: bool = False
    """Multiplies in fp8 (float8) in the blocks' linear layers while training, on GPUs with compute
    capability 8.9 or newer: faster with large hidden sizes, and less exact. Parameters, checkpoints
    and evaluation are those of `precision`, which must be bf16."""
    compile: Literal["auto", True, False] = "auto"
    """Compiles each block with torch.compile; "auto" is on for CUDA."""
    cuda_graphs: Literal["auto", True, False] = "auto"
    """Captures the forward and backward pass of a micro-batch as CUDA graphs, for steps of so few
    tokens that the host limits them. "auto" does so on one GPU with up to 65,536 tokens per
    micro-batch and `data.documents` "join", where nothing else stands against it."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing (recomputation in the backward pass) of each block: "selective"
    saves only matrix products and attention, "full" saves only the block's input."""
    recompute_layers: Positive | None = None
    """With "full", the number of first blocks that it applies to; the others have "selective". The
    fewer the memory allows, the faster the step. By default all."""
    offload_activations: bool = False
    """Offloads saved activations to CPU between the forward and backward passes; the copies overlap
    compute."""
    offload_limit_gib: Annotated[float, Field(gt=0)] | None = None
    """With `offload_activations`, the GiB of pinned CPU memory that each process takes for them at
    most: the first activations are offloaded, which wait longest, and the rest stay on the device.
    By default all are offloaded."""
    mlp_tile_tokens: NonNegative = 0
    """Tokens of a tile, in which each MLP works through a micro-batch (ALST's TiledMLP): hidden
    activations exist for one tile at a time, and are recomputed in the backward pass. 0 takes
    all tokens at once."""
    chunk_tokens: NonNegative = 0
    """Tokens of a chunk, in which each sequence is walked ("context in time"): its memory is that
    of one chunk, and of the keys and values that later chunks see. 0 takes sequences whole; "auto"
    does so if they fit the devices, else the largest chunks that do."""
    offload_chunk_rows: bool = False
    """Offloads those keys and values to CPU."""
    seed: NonNegative = 0
    """Seed for weight initialisation and sample order."""
    eval_every: NonNegative = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_samples: Positive = 16
    """Number of validation sequences per evaluation."""

    _has_auto_chunks: bool = PrivateAttr(default=False)

    @property
    def has_auto_chunks(self) -> bool:
        """Whether `chunk_tokens` is "auto", before the number of processes is known."""
        return self._has_auto_chunks

    def checkpointing_of(self, block: int) -> str:
        """The mode of activation checkpointing of a block."""
        mode, count = self.activation_checkpointing, self.recompute_layers
        is_recomputed = mode != "full" or count is None or block < count
        return mode if is_recomputed else "selective"

    def tile_of(self, tokens: float) -> int:
        """Tokens of a tile of an MLP that is given `tokens`; 0 if it takes them at once."""
        return self.mlp_tile_tokens if self.mlp_tile_tokens < tokens else 0

    def with_chunks(self, tokens: int | None) -> Train:
        """This section with chunks of so many tokens; None for those that are still to be chosen.

        Of whole sequences there are no rows to offload.
        """
        offload = self.offload_chunk_rows and tokens != 0
        update = {"chunk_tokens": tokens or 0, "offload_chunk_rows": offload}
        train = self.model_copy(update=update)
        train._has_auto_chunks = tokens is None
        return train

    @model_validator(mode="before")
    @classmethod
    def _shorten_warmup(cls, given: Any) -> Any:
        steps = as_integer(given.get("steps")) if isinstance(given, Mapping) else None
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
