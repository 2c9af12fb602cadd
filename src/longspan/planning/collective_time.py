"""How long ranks wait for the collectives of a step: latency and bandwidth, and what compute hides.

    seconds = latency + bus bytes / bandwidth

A group of ranks within a node uses the links between its devices; one over nodes uses the network,
of which every device has a card: those of a group that share a node use all of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from longspan.hardware import Device
from longspan.planning.communication import Traffic
from longspan.planning.rates import RunRates

PACKED = {"shard": 2, "sequence": 4}
"""How often a device reads or writes the bytes of a collective to pack and unpack them: FSDP2 its
flat buffers, a sparse KV exchange its rows, before and after."""


def exposed_s(
    traffic: Sequence[Traffic],
    ranks: Mapping[str, int],
    device: Device,
    rates: RunRates,
    compute_s: float,
) -> dict[str, float]:
    """Seconds of a step that a rank waits for collectives, by mesh axis.

    Those that overlap compute hide behind `rates.overlap` of it, but not their packing.
    """
    waited: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for x in traffic:
        seconds = hidden if x.overlaps else waited
        seconds[x.axis] = seconds.get(x.axis, 0.0) + x.calls * collective_s(x, ranks, device, rates)
        moved = PACKED.get(x.axis, 0) * x.calls * x.bytes
        packing = moved / (rates.bandwidth * device.bandwidth)
        waited[x.axis] = waited.get(x.axis, 0.0) + packing
    total = sum(hidden.values())
    left = max(0.0, total - rates.overlap * compute_s)
    for axis, seconds_s in hidden.items():
        waited[axis] = waited.get(axis, 0.0) + seconds_s * left / total
    return {axis: seconds_s for axis, seconds_s in waited.items() if seconds_s > 0}


def collective_s(x: Traffic, ranks: Mapping[str, int], device: Device, rates: RunRates) -> float:
    """Seconds of one call."""
    stride = _stride(x.axis, ranks)
    # Neighbouring stages only, of all those of a pipeline.
    span = stride * (2 if x.collective == "send_recv" else x.ranks)
    link = rates.link * device.link
    if span <= device.gpus_per_node:
        return rates.link_latency_s + x.bus_bytes / link
    together = max(1, min(x.ranks, device.gpus_per_node // stride))
    network = min(link, rates.network * device.network * together)
    nodes = max(2, span // device.gpus_per_node)
    return rates.network_latency_s * math.log2(nodes) + x.bus_bytes / network


def _stride(axis: str, ranks: Mapping[str, int]) -> int:
    """How far apart neighbours of an axis are in the world; see `parallel.mesh.MESH_AXES`.

    The ranks of a sequence shard parameters too, so that the shard axis begins with them.
    """
    shards = ranks["tensor"] * ranks["sequence"] * ranks["shard"]
    return {
        "sequence": ranks["tensor"],
        "shard": ranks["tensor"],
        "replicate": shards,
        "pipeline": shards * ranks["replicate"],
    }.get(axis, 1)
