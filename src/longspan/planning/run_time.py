"""How long a step of a run of Longspan takes on a device, by part.

A roofline like that of `step_time.py`, for all that Longspan has: every axis, patterns of
attention, activation checkpointing, offload, and the chunked loss. The compute of a layer and of
the head follows from the run's shapes; `communication.py` says what is communicated; pipeline
stages are those of the training code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from longspan.attention.pattern import Dense, Dilated, Pattern, patterns_of
from longspan.attention.window import Window
from longspan.config import Layout, Run
from longspan.costs import (
    count_trained,
    head_name,
    linear_sizes,
    trains,
)
from longspan.flops import (
    StageFlops,
    activation_bytes,
    attention_flops,
    flops_per_sample,
    muon_flops,
    stage_flops,
)
from longspan.hardware import Device
from longspan.parallel.choices import pinned_bytes
from longspan.parallel.pipeline_schedule import plan_stages
from longspan.planning.chunks import ROWS, Chunks, chunks_of, row_bytes
from longspan.planning.collective_time import exposed_s
from longspan.planning.communication import communication
from longspan.planning.product_time import block_products, precision_peak, product_peak
from longspan.planning.rates import RunRates, rates_of
from longspan.planning.step_time import matmul_s, slower_of
from longspan.rules import takes_graphs

HIDDEN_BYTES, WIDE_BYTES = 64, 8
"""Bytes that a block's other operators move per token, forward and backward: of a hidden feature
norms and the float32 residual stream, which tensor parallelism does not split; of each feature of
queries and keys and (twice) of the MLP, elements in 16 bits."""
FORWARD_TRAFFIC = 0.35
"""The share of the forward pass in these bytes."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward pass of attention, in units of the forward pass."""
OWN_DENSE_KERNELS = ("h100-pcie", "h100", "h200")
"""Devices on which our kernels serve the dense pattern, where head_dim is 64."""
RECOMPUTE_HOST = {"none": 0.0, "selective": 0.35, "full": 0.35}
"""What the host launches again, of the launches of a block."""


@dataclass(frozen=True)
class RunTime:
    """Seconds of a step by part, and what follows from them."""

    device: Device
    gpus: int
    step_tokens: int
    flops: float
    """Of a step, as MFU counts them."""
    peak: float
    """FLOP/s of one device in the run's precision."""
    parts: Mapping[str, float]
    """They add up to the step."""

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.step_tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / (self.step_s * self.gpus * self.peak)

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "gpus": self.gpus,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "parts_s": dict(self.parts),
        }


def predict(run: Run, gpus: int, device: Device, rates: RunRates | None = None) -> RunTime:
    """The time of a step of `run` on `gpus` devices, for which `load_run` has checked it.

    "auto" is bf16 (fp32 on a CPU) for precision, and compiled on GPUs.
    """
    rates, run = rates or rates_of(device), with_precision(run, device)
    computed = compute_time(run, gpus, device, rates)
    return computed if gpus == 1 else with_communication(computed, run, rates)


def with_precision(run: Run, device: Device) -> Run:
    """The run with the precision that "auto" is on a device."""
    if run.train.precision != "auto":
        return run
    precision = "bf16" if device.peak("bf16") else "fp32"
    return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})


def compute_time(run: Run, gpus: int, device: Device, rates: RunRates) -> RunTime:
    """`predict` without what ranks wait for each other's collectives: a lower bound."""
    if chunks := chunks_of(run):
        return _in_chunks(run, chunks, gpus, device, rates)
    shape = _Shape(run, gpus, device)
    model, count, copies = run.model, shape.micro_batches, shape.copies
    layers = {pattern: _layer(run, shape, device, rates, pattern) for pattern in copies}
    layer_s = {pattern: sum(parts.values()) for pattern, parts in layers.items()}
    head = _head(run, shape, device, rates)
    times = [
        sum(n * layer_s[pattern] for pattern, n in held.items()) + has_head * sum(head.values())
        for held, has_head in _layers_on_ranks(run.layout, shape)
    ]
    mean, slowest = sum(times) / len(times), max(times)
    # The parts of the average rank; the slowest one's surplus is waited for like the bubble.
    parts: dict[str, float] = {}
    for n, of_part in [*((copies[pattern], layers[pattern]) for pattern in copies), (1, head)]:
        for name, seconds in of_part.items():
            parts[name] = parts.get(name, 0.0) + count * n / len(times) * seconds
    parts["pipeline bubble"] = count * (slowest - mean)
    parts["pipeline bubble"] += _bubble(run.layout, len(times)) * slowest
    parts["optimizer"], copied = _step_end(run, shape, device, rates)
    parts["offload"] = parts.get("offload", 0.0) + copied
    parts["other"] = rates.step_s
    context = run.data.context
    return RunTime(
        device=device,
        gpus=gpus,
        step_tokens=run.train.global_batch * context,
        flops=run.train.global_batch
        * sum(flops_per_sample(model, shape.patterns, context, run.train.freeze)),
        peak=shape.peak,
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
    )


def _in_chunks(run: Run, chunks: Chunks, gpus: int, device: Device, rates: RunRates) -> RunTime:
    """Those of chunks, whose queries also see earlier keys, and another forward pass of most."""
    of_chunk, context = chunks.of_chunk, run.data.context
    full = of_chunk.train.model_copy(
        update={"activation_checkpointing": "full", "recompute_layers": None}
    )
    twice = compute_time(of_chunk.model_copy(update={"train": full}), gpus, device, rates)
    found = compute_time(of_chunk, gpus, device, rates)
    patterns, tokens = patterns_of(run.attention, run.model.layers), run.train.chunk_tokens
    flops = [
        sum(attention_flops(run.model, pattern, length) for pattern in patterns)
        for length in (context, tokens)
    ]
    more = found.parts["attention"] * (flops[0] / (chunks.per_sample * flops[1]) - 1)
    forward = twice.parts["recomputation"] + more / (1 + ATTENTION_BACKWARD)
    parts = {
        **found.parts,
        "attention": found.parts["attention"] + more,
        "forward pass for rows": forward * (chunks.per_sample - 1) / chunks.per_sample,
    }
    parts["gathering rows of chunks"] = rates.chunk_overhead * sum(parts.values())
    if run.train.offload_chunk_rows:  # written once, read in each pass
        rows = row_bytes(run, run.layout.resolve(gpus))[ROWS]
        parts["offload"] = parts.get("offload", 0.0) + 3 * rows / (
            device.host_link * rates.host_link
        )
    of_run = sum(flops_per_sample(run.model, patterns, context, run.train.freeze))
    return replace(
        found,
        parts=parts,
        flops=run.train.global_batch * of_run,
        step_tokens=run.train.global_batch * context,
    )


def with_communication(computed: RunTime, run: Run, rates: RunRates) -> RunTime:
    """`compute_time`, and the collectives that it does not hide."""
    ranks = run.layout.resolve(computed.gpus)
    traffic = communication(run, computed.gpus, pipeline_rank=ranks["pipeline"] // 2)
    waited = exposed_s(traffic, ranks, computed.device, rates, computed.step_s)
    parts = {**computed.parts, **{f"communication, {axis}": s for axis, s in waited.items()}}
    return replace(computed, parts=parts)


class _Shape:
    """What the parts of a prediction share."""

    def __init__(self, run: Run, gpus: int, device: Device) -> None:
        train, model = run.train, run.model
        self.ranks = ranks = run.layout.resolve(gpus)
        self.tensor = ranks["tensor"]
        self.tokens = train.micro_batch * run.data.context / ranks["sequence"]
        """Of a micro-batch on a rank."""
        data = ranks["replicate"] * ranks["shard"]
        self.micro_batches = train.global_batch // (train.micro_batch * data)
        self.patterns = patterns_of(run.attention, model.layers)
        self.flops = stage_flops(model, self.patterns, run.data.context)
        # Layers share their pattern, and to hash it for each would take long.
        shared = {id(pattern): pattern for pattern in self.patterns}
        places = {key: place for place, key in enumerate(shared)}
        self.kinds = tuple(shared.values())
        self.kind_of_layer = tuple(places[id(pattern)] for pattern in self.patterns)
        self.copies = _counted(self.kinds, self.kind_of_layer)
        is_cpu = device.name == "cpu"
        precision = train.precision
        self.peak = product_peak(train, device)
        self.attention_peak = precision_peak(precision, device)
        self.width = 4 if precision == "fp32" else 2
        self.is_compiled = not is_cpu if train.compile == "auto" else train.compile
        self.has_graphs = not is_cpu and takes_graphs(run, gpus)
        shards = self.tensor * ranks["pipeline"] * ranks["shard"] * ranks["sequence"]
        self.local_parameters = count_trained(model, train.freeze) / shards
        """That the optimizer of a rank updates."""


def _counted(kinds: Sequence[Pattern], places: Iterable[int]) -> Counter[Pattern]:
    """How many of `places` in `kinds` each pattern has."""
    found: Counter[Pattern] = Counter()
    for place, count in Counter(places).items():
        found[kinds[place]] += count
    return found


def _layer(
    run: Run, shape: _Shape, device: Device, rates: RunRates, pattern: Pattern
) -> dict[str, float]:
    """Seconds of a block with `pattern` and a micro-batch, forward and backward, by part."""
    model, train, tokens = run.model, run.train, shape.tokens
    forward, backward, casts = block_products(run, tokens, shape.tensor, device, rates)
    samples = train.micro_batch / (shape.ranks["sequence"] * shape.tensor)
    flops = samples * attention_flops(model, pattern, run.data.context)
    attention = flops / (
        shape.attention_peak * attention_rate(pattern, model.head_dim, rates, device)
    )
    bandwidth = device.bandwidth * rates.bandwidth
    traffic = _block_bytes(run, shape) * rates.block_traffic / bandwidth
    if not shape.is_compiled:
        traffic *= rates.eager_traffic
    parameters = sum(i * o for i, o in linear_sizes(model).values()) / shape.tensor
    modes = Counter(train.checkpointing_of(block) for block in range(model.layers))
    again = FORWARD_TRAFFIC * traffic * (1 - modes["none"] / model.layers)
    again += (forward + attention) * modes["full"] / model.layers  # of the average block
    if train.tile_of(tokens):
        again += _again_in_tiles(run, forward, 1 - modes["full"] / model.layers)
        again += tokens / train.mlp_tile_tokens * _tile_s(run, bandwidth, rates)
    found = {
        "matrix products": forward + backward,
        "attention": attention * (1 + ATTENTION_BACKWARD),
        "memory-bound operators": traffic + rates.weight_traffic * parameters / bandwidth,
        "casts to fp8": casts,
        "recomputation": again,
    }
    host = rates.host_s * (1 if shape.is_compiled else rates.eager_host)
    host *= 1 + RECOMPUTE_HOST[train.activation_checkpointing]
    if shape.tensor > 1 or shape.ranks["sequence"] > 1:
        host *= rates.split_host
    device_s = sum(found.values())
    if shape.has_graphs:
        found["gaps in graphs"] = rates.graph_gaps_s
    else:
        found["host"] = float(slower_of(device_s, host, rates.sharpness)) - device_s
    if train.offload_activations:
        # Copied out during the forward pass and in during the backward pass, on their own streams.
        in_forward = forward + attention + FORWARD_TRAFFIC * traffic
        size = activation_bytes(model, train, shape.width, tokens) / shape.tensor
        copy, share = size / (device.host_link * rates.host_link), 1.0
        stages = shape.ranks["pipeline"]
        if train.offload_limit_gib is not None:  # room for a share of the blocks
            in_flight = min(shape.micro_batches, stages)  # micro-batches that share the limit
            fitting = train.offload_limit_gib * 2**30 // pinned_bytes(math.ceil(size)) / in_flight
            share = min(1.0, fitting / (model.layers / stages))
        in_backward = sum(found.values()) - in_forward
        if share == 1.0 and shape.is_compiled and train.activation_checkpointing != "full":
            in_backward = 0.0  # a compiled block asks at once for all that it has saved
        # The first blocks' copies have the time of all, unless other micro-batches come between.
        many, each = (1.0, copy * share) if stages == 1 else (share, copy)
        least = rates.offload_waits * each if share < 1 and stages == 1 else 0.0
        waits = max(least, each - in_forward) + max(least, each - in_backward)
        found["offload"] = many * waits
    return found


def _again_in_tiles(run: Run, forward: float, not_full: float) -> float:
    """Seconds for gate and up of an MLP in tiles, which blocks without "full", a fraction
    `not_full`, compute again; `forward`: of all products of a block.
    """
    sizes = {name: into * out for name, (into, out) in linear_sizes(run.model).items()}
    return not_full * forward * (sizes["mlp.gate"] + sizes["mlp.up"]) / sum(sizes.values())


def _tile_s(run: Run, bandwidth: float, rates: RunRates) -> float:
    """Seconds of each tile, which reads and writes the sums of gradients."""
    sizes = linear_sizes(run.model).items()
    weights = sum(into * out for name, (into, out) in sizes if name.startswith("mlp."))
    return 2 * 4 * weights / bandwidth + rates.tile_s


def attention_rate(pattern: Pattern, head_dim: int, rates: RunRates, device: Device) -> float:
    """The fraction of the peak that attention reaches."""
    is_dilated = isinstance(pattern, Dilated) and pattern.blocks is None
    if isinstance(pattern, Dense) and not (head_dim == 64 and device.name in OWN_DENSE_KERNELS):
        rate = rates.dense
    elif is_dilated or isinstance(pattern, Dense):
        rate = rates.dilated
    elif isinstance(pattern, Window):
        rate = rates.window
    else:
        rate = rates.block_sparse
    return rate * head_dim / (head_dim + rates.half_head_dim)


def _block_bytes(run: Run, shape: _Shape) -> float:
    """Bytes that the operators of a block move besides matrix products and attention."""
    model = run.model
    splits_norms = run.layout.megatron_sequence_parallel
    hidden_bytes = HIDDEN_BYTES / (1 if run.train.residual_precision == "fp32" else 2)
    hidden = hidden_bytes * model.hidden / (shape.tensor if splits_norms else 1)
    queries_and_keys = model.head_dim * (model.heads + model.kv_heads)
    wide = WIDE_BYTES * shape.width / 2 * (queries_and_keys + 2 * model.ffn) / shape.tensor
    return shape.tokens * (hidden + wide)


def _head(run: Run, shape: _Shape, device: Device, rates: RunRates) -> dict[str, float]:
    """Seconds of the loss of a micro-batch, whose gradients are computed with it."""
    model, bandwidth = run.model, device.bandwidth * rates.bandwidth
    vocab = model.vocab / shape.tensor
    products = 3 if trains(model, run.train.freeze, head_name(model)) else 2
    seconds = products * matmul_s(shape.tokens, vocab, float(model.hidden), shape.peak, rates)
    per_logit = rates.loss_traffic if shape.tensor == 1 else rates.split_loss_traffic
    moved = per_logit * shape.width / 2 * shape.tokens * vocab
    moved += rates.weight_traffic * vocab * model.hidden
    return {"loss": seconds + moved / bandwidth}


def _layers_on_ranks(layout: Layout, shape: _Shape) -> Sequence[tuple[Mapping[Pattern, int], bool]]:
    """Of each pipeline rank: its number of layers by pattern, and whether it has the head."""
    pipeline = shape.ranks["pipeline"]
    if pipeline == 1:
        return [(shape.copies, True)]
    settings = layout.schedule, layout.virtual_stages
    return _stages(*settings, shape.kinds, shape.kind_of_layer, shape.flops, pipeline)


@lru_cache(maxsize=4096)
def _stages(
    schedule: Any,
    virtual_stages: int,
    kinds: tuple[Pattern, ...],
    kind_of_layer: tuple[int, ...],
    flops: StageFlops,
    pipeline: int,
) -> Sequence[tuple[Mapping[Pattern, int], bool]]:
    layout = Layout(schedule=schedule, virtual_stages=virtual_stages)
    plan = plan_stages(layout, len(kind_of_layer), flops, pipeline)
    return [
        (
            _counted(
                kinds, (kind_of_layer[layer] for stage in stages for layer in plan.layers[stage])
            ),
            plan.last in stages,
        )
        for stages in plan.by_rank
    ]


def _bubble(layout: Layout, ranks: int) -> float:
    """How long a rank is idle while the pipeline fills and drains, in times of a micro-batch.

    Stages of "interleaved" are shorter. "zbv" fills the rest with gradients of weights: a forward
    pass of one of its two stages remains.
    """
    times = (ranks - 1) / layout.stages_per_rank
    return times / 3 if layout.schedule == "zbv" else times


def _step_end(run: Run, shape: _Shape, device: Device, rates: RunRates) -> tuple[float, float]:
    """Seconds of the optimizer, and of copies to and from the CPU with `layout.offload`."""
    parameters = shape.local_parameters
    moved = rates.optimizer_traffic * parameters
    if run.train.optimizer == "adamw8bit":
        is_rounded = run.train.parameter_precision == "bf16"
        moved *= rates.rounded_8bit if is_rounded else rates.optimizer_8bit
    if not run.layout.offload:
        flops = muon_flops(run.model) if run.train.optimizer == "muon" else 0.0
        iterations = flops / (shape.ranks["pipeline"] * shape.peak * rates.matmul)
        return moved / (device.bandwidth * rates.bandwidth) + iterations, 0.0
    gathers = shape.micro_batches * (2 if run.layout.zero == 3 else 1)
    returned = shape.micro_batches if run.layout.zero > 1 else 1
    copied = 4 * parameters * (gathers + returned)
    return moved / rates.host_optimizer, copied / (device.host_link * rates.host_link)
