"""How long a training step takes: a roofline of kernels, collectives and the host, for many runs
at once.

A device computes a layer's matrix products at a fraction of its peak that falls with their size,
moves the other activations at its memory bandwidth, and waits for tensor parallelism's collectives.
The host must launch all of it: whichever is slower, device or host, sets the pace. Micro-batches
fill a pipeline of stages with whole layers; the gradients are reduced at the end of a step.

Imports no torch. Arrays have one element per run, and broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.hardware import Device

Array = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)
BYTES = 2
"""Of an activation or weight in 16 bits."""
GRADIENT_BYTES = 4
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Workload:
    """Runs of decoders: shapes, batch and layout. ZeRO stages 0 and 1."""

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    ffn: Array
    is_gated: Array
    """1 if the MLP has a gate, so three matrices, else 0."""
    vocab: Array
    context: Array
    micro_batch: Array
    accumulation: Array
    """Micro-batches of a step on a data-parallel rank."""
    data: Array
    tensor: Array
    pipeline: Array
    zero: Array

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, rows: NDArray[np.bool_]) -> Workload:
        """Some of the runs."""
        return Workload(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def tokens(self) -> Array:
        """Of a micro-batch."""
        return self.micro_batch * self.context

    @property
    def step_tokens(self) -> Array:
        return self.tokens * self.accumulation * self.data

    @property
    def layer_parameters(self) -> Array:
        attention = self.hidden**2 * (2 + 2 * self.kv_heads / self.heads)
        return attention + (2 + self.is_gated) * self.hidden * self.ffn

    @property
    def local_parameters(self) -> Array:
        """Of a rank, before the data axis shards anything."""
        whole = self.layers * self.layer_parameters + self.vocab * self.hidden
        return whole / (self.tensor * self.pipeline)


@dataclass(frozen=True)
class MatmulRates:
    """At what rate matrix products run, by their size."""

    matmul: float = 0.75
    """Of the peak, by products so large that their size does not matter."""
    half_rows: float = 200.0
    """Tokens of a product that reaches half of that."""
    half_columns: float = 200.0
    """Features of a product, in or out, that reaches half of that."""


@dataclass(frozen=True)
class Efficiencies(MatmulRates):
    """What data sheets do not say: fitted to measured runs of one training system.

    The defaults are where a fit begins, and what it falls back to where data say nothing.
    """

    block_traffic: float = 30.0
    """Activations that a layer moves through memory besides products, in units of its input."""
    loss_traffic: float = 10.0
    """The same of the loss, in units of the logits."""
    link: float = 0.5
    """Of the link's rate, by collectives within a node."""
    network: float = 0.1
    """Of the network's rate, by collectives of tensor parallelism over two nodes."""
    send: float = 0.5
    """Of the network's rate, between pipeline stages."""
    reduce: float = 0.8
    """Of the network's rate, by the reduction of gradients; what is overlapped counts too."""
    host_s: float = 3e-3
    """Of the host to launch a layer, forward and backward."""
    host_tensor: float = 1.4
    """How often that with tensor parallelism."""
    host_node_s: float = 4e-3
    """More for a collective over nodes; · (nodes)^1.5."""
    host_pipeline_s: float = 7e-3
    """The host's time per layer if tensor and pipeline parallelism are used together, …"""
    host_pipeline_growth: float = 0.6
    """… times the tensor-parallel ranks in a node to this power …"""
    host_pipeline_nodes: float = 1.2
    """… and the nodes of a tensor-parallel group to this one."""
    sharpness: float = 4.0
    """p of the p-norm between device and host: infinite if the slower one hides the other."""


SPREAD = {"matmul": 0.1, "block_traffic": 0.5, "link": 0.2}
"""Constants that are known better than by a factor of e, as `fitting.fit` takes it: without it a
fit takes one for the other, where data do not tell them apart."""
ATTENTION = 0.4
"""Of the peak, by attention: at contexts far below a million its share is too small to fit."""
OPTIMIZER_BYTES = 20
"""Of a parameter, which the optimizer reads and writes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by part; they add up."""

    kernels: Array
    host: Array
    """Waiting for the host to launch kernels."""
    tensor: Array
    """Collectives of tensor parallelism."""
    bubble: Array
    """Waiting for other pipeline stages, of which some have more to do."""
    send: Array
    reduce: Array
    optimizer: Array

    @property
    def total(self) -> Array:
        total: Array = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return total


def step_time(work: Workload, device: Device, rates: Efficiencies) -> StepTime:
    """The time of a step of each run in `work`, on nodes of `device`."""
    peak = device.peak("bf16") or device.peak("fp16")
    assert peak is not None, "a device with 16-bit matrix products"
    products, collectives = _layer(work, device, rates, peak)
    device_s = products + collectives
    layer = slower_of(device_s, _host(work, rates), rates.sharpness)
    head = 3 * matmul_s(work.tokens, work.vocab / work.tensor, work.hidden, peak, rates)
    head += rates.loss_traffic * BYTES * work.tokens * work.vocab / work.tensor / device.bandwidth
    share = work.layers / work.pipeline
    slots = work.accumulation + work.pipeline - 1
    stage = _slowest_stage(work, layer, head)
    mean = (work.layers * layer + head) / work.pipeline
    boundary = BYTES * work.tokens * work.hidden / work.tensor
    is_piped = work.pipeline > 1
    sends = np.where(is_piped, 2 * boundary / (rates.send * device.network), 0.0)
    sharded = np.where(work.zero > 0, work.data, 1.0)
    return StepTime(
        kernels=work.accumulation * (share * products + head / work.pipeline),
        host=work.accumulation * share * (layer - device_s),
        tensor=work.accumulation * share * collectives,
        bubble=slots * stage - work.accumulation * mean,
        send=slots * sends,
        reduce=_reduce(work, device, rates),
        optimizer=OPTIMIZER_BYTES * work.local_parameters / sharded / device.bandwidth,
    )


def matmul_s(
    tokens: Numbers, out: Numbers, into: Numbers, peak: float, rates: MatmulRates
) -> Numbers:
    """Seconds of a matrix product (tokens, into) · (into, out)."""
    efficiency = rates.matmul * tokens / (tokens + rates.half_rows)
    efficiency = efficiency * out / (out + rates.half_columns)
    efficiency = efficiency * into / (into + rates.half_columns)
    return 2 * tokens * out * into / (peak * efficiency)


def slower_of(a: Numbers, b: Numbers, p: float) -> Numbers:
    """The p-norm of two times: the larger one if p is infinite, their sum if it is 1."""
    largest = np.maximum(a, b)
    norm: Numbers = largest * ((a / largest) ** p + (b / largest) ** p) ** (1 / p)
    return norm


def _layer(work: Workload, device: Device, rates: Efficiencies, peak: float) -> tuple[Array, Array]:
    """Seconds of the device for a layer and a micro-batch, forward and backward: kernels, and
    collectives of tensor parallelism.
    """  # fmt: skip
    tokens, hidden, tensor = work.tokens, work.hidden, work.tensor
    qkv = hidden * (1 + 2 * work.kv_heads / work.heads)
    shapes = [
        (qkv / tensor, hidden),
        (hidden, hidden / tensor),
        ((1 + work.is_gated) * work.ffn / tensor, hidden),
        (hidden, work.ffn / tensor),
    ]
    products = sum(matmul_s(tokens, out, into, peak, rates) for out, into in shapes)
    # Causal: half of 4 · tokens · context · hidden. The backward pass takes two products for one.
    attention = 2 * tokens * work.context * hidden / tensor / (peak * ATTENTION)
    traffic = rates.block_traffic * BYTES * tokens * hidden / tensor / device.bandwidth
    nodes = tensor / GPUS_PER_NODE
    rate = np.where(
        nodes > 1,
        # A ring over nodes: every GPU of a node has its own network card.
        rates.network * device.network * GPUS_PER_NODE * 2 / np.maximum(nodes, 1),
        rates.link * device.link,
    )
    moved = 2 * (tensor - 1) / tensor * BYTES * tokens * hidden  # of an all-reduce
    return 3 * (products + attention) + traffic, 4 * moved / rate


def _host(work: Workload, rates: Efficiencies) -> Array:
    """Seconds of the host for a layer and a micro-batch, forward and backward."""
    nodes = np.maximum(work.tensor / GPUS_PER_NODE, 1.0)
    is_split = work.tensor > 1
    launch = rates.host_s * np.where(is_split, rates.host_tensor, 1.0)
    launch = launch + np.where(nodes > 1, rates.host_node_s * nodes**1.5, 0.0)
    within = np.minimum(work.tensor, GPUS_PER_NODE) ** rates.host_pipeline_growth
    both = rates.host_pipeline_s * within * nodes**rates.host_pipeline_nodes
    return np.where(is_split & (work.pipeline > 1), np.maximum(launch, both), launch)


def _slowest_stage(work: Workload, layer: Array, head: Array) -> Array:
    """Seconds of the slowest stage for a micro-batch, if whole layers are split as well as
    possible: the last stage has the head, and fewer of them.
    """  # fmt: skip
    best = work.layers * layer + head
    for count in range(int(work.layers.max()) + 1):  # layers beside the head
        others = np.ceil((work.layers - count) / np.maximum(work.pipeline - 1, 1))
        found = np.maximum(head + count * layer, others * layer)
        is_possible = (work.pipeline > 1) & (count <= work.layers)
        best = np.where(is_possible, np.minimum(best, found), best)
    return best


def _reduce(work: Workload, device: Device, rates: Efficiencies) -> Array:
    """Seconds of the reduction of gradients over data-parallel ranks."""
    moved = 2 * (work.data - 1) / work.data * GRADIENT_BYTES * work.local_parameters
    within = work.tensor * work.data <= GPUS_PER_NODE
    rate = np.where(within, rates.link * device.link, rates.reduce * device.network)
    return np.where(work.data > 1, moved / rate, 0.0)
