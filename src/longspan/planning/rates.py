"""What Longspan's kernels and collectives reach of a device's rates: data, with its source.

Fitted to measured runs of Longspan (`longspan bench step-time`), and kept in `efficiencies.toml`.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from longspan.hardware import Device
from longspan.planning.step_time import MatmulRates
from longspan.toml import tomllib


@dataclass(frozen=True)
class RunRates(MatmulRates):
    """Fractions of a data sheet's rates, bytes that operators move, and seconds of the host.

    The defaults are where a fit begins.
    """

    matmul: float = 0.78
    half_rows: float = 100.0
    half_columns: float = 80.0
    fp8_matmul: float = 0.6
    """`matmul` of products in fp8, of the peak of those."""
    fp8_traffic: float = 7.0
    """Bytes that casts to fp8 move per token and feature, in or out of a linear layer: its largest
    magnitude is found (2 bytes), it is read (2) and written (1), and transposed (2). A count."""
    dense: float = 0.62
    """Attention by the dense pattern: of the peak, with heads so wide that it does not matter."""
    dilated: float = 0.45
    """The same of dilated branches, a pair of which counts once for each that contains it, and of
    the dense pattern where the same kernels serve it."""
    window: float = 0.45
    """The same of windows."""
    block_sparse: float = 0.5
    """The same of blocks, also of those in dilated branches."""
    half_head_dim: float = 25.0
    """Features of a head with which attention reaches half of that."""
    bandwidth: float = 0.85
    """Of the memory's, by operators that only move data."""
    block_traffic: float = 1.0
    """What norms, RoPE, residual and activation functions of compiled blocks move, in units of the
    bytes that they would if each read its inputs and wrote its output once."""
    eager_traffic: float = 1.5
    """The same of blocks that are not compiled, in units of compiled ones."""
    loss_traffic: float = 46.0
    """Bytes that the chunked loss moves per logit besides its matrix products."""
    split_loss_traffic: float = 46.0
    """The same if ranks split the vocabulary: the softmax is no single kernel then."""
    tile_s: float = 8e-5
    """Of a tile of an MLP, forward and backward, beyond its products and the sums of gradients."""
    chunk_overhead: float = 0.2
    """Time of a step in chunks beyond its passes, in units of these: rows are gathered, and kernels
    are short."""
    weight_traffic: float = 18.0
    """Bytes per parameter and micro-batch: the 16-bit copy, and the sum of its gradients."""
    optimizer_traffic: float = 40.0
    """Bytes per parameter and step: AdamW, the gradient norm and clipping."""
    optimizer_8bit: float = 2.4
    """How long that takes with moments in 8 bits, in units of it."""
    rounded_8bit: float = 2.0
    """The same with parameters in bf16 too."""
    host_s: float = 1e-3
    """Seconds of the host to launch a compiled block, forward and backward."""
    eager_host: float = 4.0
    """How often that if it is not compiled."""
    split_host: float = 2.0
    """How often that if ranks split the block's tensors: collectives are launched, and the compiler
    leaves them out."""
    graph_gaps_s: float = 1e-4
    """Seconds between the kernels of a block, forward and backward, that are one CUDA graph."""
    sharpness: float = 4.0
    """p of the p-norm between device and host: infinite if the slower one hides the other, 1 if
    each waits for the other."""
    step_s: float = 1e-3
    """Of a step, whatever its size."""
    link: float = 0.7
    """Of the link's rate, by collectives within a node."""
    network: float = 0.7
    """Of the network's rate, by collectives over nodes."""
    link_latency_s: float = 2e-5
    """Of a collective within a node."""
    network_latency_s: float = 4e-5
    """Of a collective over nodes; · log2 of the nodes."""
    overlap: float = 0.8
    """Of the compute behind which collectives can hide that need not be waited for."""
    host_link: float = 0.8
    """Of the rate of the link to the host's memory."""
    offload_waits: float = 0.23
    """The share of their time, each way, that compute waits for copies of activations which have
    the time of the whole pass."""
    host_optimizer: float = 1.2e10
    """Bytes/s of the optimizer on the CPU, per device, of which each has 16 cores."""


@dataclass(frozen=True)
class Band:
    """How far predicted tokens/s were from measured ones."""

    device: str
    gpus: int
    """The largest number of GPUs of a run."""
    runs: int
    median: float
    p90: float
    """Which nine of ten runs did not exceed."""
    of: str
    """What was measured."""


@cache
def efficiencies() -> dict[str, Any]:
    """The tables of `efficiencies.toml`."""
    text = resources.files("longspan.planning") / "efficiencies.toml"
    return tomllib.loads(text.read_text(encoding="utf-8"))


def rates_of(device: Device) -> RunRates:
    """The rates of GPUs, or those of CPU processes."""
    return rates_from_name("cpu" if device.name == "cpu" else "gpu")


def rates_from_name(kind: str) -> RunRates:
    """The rates of a kind of device: "gpu" or "cpu"."""
    return rates_from(efficiencies()[kind])


def rates_from(row: Mapping[str, float]) -> RunRates:
    known = {field.name for field in fields(RunRates)}
    assert set(row) <= known, f"efficiencies.toml has unknown keys: {set(row) - known}"
    return RunRates(**row)


def band_of(device: Device, gpus: int) -> Band | None:
    """The error of predictions for so many devices; None if no such runs were measured."""
    bands = (Band(**row) for row in efficiencies()["band"])
    return next((b for b in bands if b.device == device.name and gpus <= b.gpus), None)


def measured_rows() -> list[dict[str, Any]]:
    """The runs that the rates of GPUs are fitted to."""
    return list(efficiencies()["measured"])
