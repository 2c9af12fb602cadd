"""`longspan plan`: the parameters, FLOPs and memory of a run, before it runs.

For a known device also time and cost, and what to change where the run does not fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from longspan.attention import patterns_of
from longspan.config import Run, Sketch
from longspan.costs import checkpoint_bytes, count_parameters
from longspan.derived import derived_values
from longspan.errors import UserError
from longspan.flops import flops_per_sample
from longspan.hardware import Device
from longspan.planning.forecast import Forecast, forecast
from longspan.planning.ladder import Ladder, faster_roundings, ladder
from longspan.planning.memory import PARTS, DeviceMemory, memory_per_rank
from longspan.planning.search import usable_memory
from longspan.wording import counted

GIB = 2**30
FRACTIONS = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))


@dataclass(frozen=True)
class Alternative:
    """The run with another kind of linear layers in its blocks."""

    linear: str
    fraction: str
    """Parameters as a fraction of the dense layers'."""
    parameters: int
    flops_per_token: float
    device_bytes: int
    """Memory that the fullest device must have."""


@dataclass(frozen=True)
class Plan:
    """Parameters, FLOPs and memory of a run."""

    gpus: int
    precision: str
    derived: dict[str, str]
    parameters: int
    matmul_flops: float
    """Per token, forward and backward."""
    attention_flops: float
    """Per token, forward and backward."""
    stages: list[DeviceMemory]
    """One entry per rank of the pipeline axis."""
    micro_batch_tokens: int
    """Tokens per forward pass on a rank, to which the activations are proportional."""
    checkpoint_bytes: int
    alternatives: list[Alternative]
    forecast: Forecast | None = None
    """Time and cost, if the device is known."""
    ladder: Ladder | None = None
    """What to change, if the run does not fit the device."""
    roundings: list[dict[str, Any]] = field(default_factory=list)
    """What rounds otherwise and is faster, if it fits."""

    def as_dict(self) -> dict[str, Any]:
        stages = [
            {**asdict(x), "allocated": x.allocated, "on_device": x.on_device} for x in self.stages
        ]
        forecast = None if self.forecast is None else self.forecast.as_dict()
        return {**asdict(replace(self, forecast=None)), "stages": stages, "forecast": forecast}

    def __str__(self) -> str:
        forecast = [] if self.forecast is None else [str(self.forecast)]
        parts = [self._summary(), *forecast, *self._fit(), *self._roundings(), self._alternatives()]
        return "\n\n".join(parts)

    def _fit(self) -> list[str]:
        return [self._memory()] if self.ladder is None else [self._memory(), str(self.ladder)]

    def _roundings(self) -> list[str]:
        lines = [
            f"  {x['setting']:<40}{x['speed'] - 1:+.1%} tokens/s, {x['needed'] / GIB:,.1f} GiB"
            for x in self.roundings
        ]
        return ["\n".join(["predicted to be faster, but rounded otherwise:", *lines])] * bool(lines)

    def _summary(self) -> str:
        total = self.matmul_flops + self.attention_flops
        rows = {
            "parameters": f"{self.parameters:,}",
            **self.derived,
            "FLOPs": f"{total / 1e9:,.3f} G per token in training, "
            f"{self.attention_flops / total:.0%} in attention",
            "checkpoint": f"{self.checkpoint_bytes / GIB:,.3f} GiB",
        }
        return "\n".join(f"{name:<15}{text}" for name, text in rows.items())

    def _memory(self) -> str:
        """One column per rank of the pipeline axis."""
        processes = counted(self.gpus, "process")
        lines = [f"memory per device in GiB at the peak of a step, {processes}, {self.precision}:"]
        if len(self.stages) > 1:
            heads = "".join(f"{f'pipeline {i}':>12}" for i in range(len(self.stages)))
            lines.append(f"  {'':<26}{heads}")
        rows = {name: [memory.peak.get(name, 0) for memory in self.stages] for name in PARTS}
        rows = {title: sizes for title, sizes in rows.items() if any(sizes)}
        rows["allocated"] = [memory.allocated for memory in self.stages]
        rows["CUDA and fragmentation"] = [memory.fragmentation for memory in self.stages]
        rows["device must have"] = [memory.on_device for memory in self.stages]
        rows["before the first step"] = [memory.start for memory in self.stages]
        rows["while it saves"] = [memory.save for memory in self.stages]
        if any(memory.offloaded for memory in self.stages):
            rows["offloaded to CPU"] = [memory.offloaded for memory in self.stages]
        lines += [
            f"  {title:<28}" + "".join(f"{size / GIB:>12,.3f}" for size in sizes).removeprefix("  ")
            for title, sizes in rows.items()
        ]
        fullest = max(self.stages, key=lambda memory: memory.on_device)
        tokens = f"{self.micro_batch_tokens:,} tokens per micro-batch on a device"
        lines.append(f"  the peak is in {fullest.peak_at}; {tokens}")
        if sum(fullest.kept.values()):
            parts = sorted(fullest.kept.items(), key=lambda part: -part[1])
            total = sum(fullest.kept.values())
            named = ", ".join(f"{name} {size / total:.0%}" for name, size in parts if size)
            lines.append(f"  activations: {named}")
        return "\n".join(lines)

    def _alternatives(self) -> str:
        """The same run with other linear layers."""
        head = f"  {'linear layers':<15}{'ratio':>7}{'parameters':>18}{'GFLOPs/token':>17}"
        title = "with other linear layers, all at the same ratio:"
        lines = [title, head + f"{'GiB/device':>15}"]
        for other in self.alternatives:
            lines.append(
                f"  {other.linear:<15}{other.fraction:>7}{other.parameters:>18,}"
                f"{other.flops_per_token / 1e9:>17,.3f}{other.device_bytes / GIB:>15,.3f}"
            )
        return "\n".join(lines)


def _documents_note(run: Run) -> dict[str, str]:
    """What a plan does not know of documents: their lengths."""
    if not run.data.isolates:
        return {}
    text = "planned as one per sample; shorter ones take less time for attention"
    if run.layout.sequence != 1 and not run.train.chunk_tokens:
        text += ", and where heads can be split over the sequence axis, ranks exchange heads for"
        text += " tokens (Ulysses), which is not planned"
    return {"documents": text}


def plan(run: Run, gpus: int, device: Device | None = None, tokens: int | None = None) -> Plan:
    """The parameters, FLOPs and memory of `run`, which `load_run` has checked for `gpus` processes.

    With a `device` also time and cost, of all the run's tokens or of so many. A precision of "auto"
    is planned as bf16, which it is on GPUs. `print(plan(run, 8, device_of("h100")))` shows what
    `longspan plan` does.
    """
    if run.engine.name != "native":
        raise UserError(
            f"longspan plan supports only engine.name = 'native', got {run.engine.name!r}: "
            "use engine.name=native"
        )
    if run.train.precision == "auto":
        train = run.train.model_copy(update={"precision": "bf16"})
        run = run.model_copy(update={"train": train})
    parameters = count_parameters(run.model)
    to_fit = None if device is None else ladder(run, gpus, device, int(usable_memory(device)))
    context, ranks = run.data.context, run.layout.resolve(gpus)
    matrices, attention = flops_per_sample(
        run.model, patterns_of(run.attention, run.model.layers), context, run.train.freeze
    )
    return Plan(
        gpus=gpus,
        precision=run.train.precision,
        derived={**derived_values(run, ranks), **_documents_note(run)},
        parameters=parameters,
        matmul_flops=matrices / context,
        attention_flops=attention / context,
        stages=memory_per_rank(run, gpus),
        micro_batch_tokens=run.train.micro_batch * context // ranks["sequence"],
        checkpoint_bytes=checkpoint_bytes(run.model, run.train),
        alternatives=_alternatives(run, gpus),
        forecast=None if device is None else forecast(run, gpus, device, tokens),
        ladder=to_fit,
        roundings=faster_roundings(run, gpus, device)
        if device is not None and to_fit is None
        else [],
    )


def _alternatives(run: Run, gpus: int) -> list[Alternative]:
    kinds = [("dense", Fraction(1))]
    kinds += [(linear, x) for linear in ("low_rank", "sketched") for x in FRACTIONS]
    return [_alternative(run, gpus, *kind) for kind in kinds]


def _alternative(run: Run, gpus: int, linear: str, fraction: Fraction) -> Alternative:
    sketch = Sketch(keep=float(fraction), layers=run.model.sketch.layers)
    model = run.model.model_copy(update={"linear": linear, "sketch": sketch})
    # Megatron-style sequence parallelism, fp8 and tiles are supported with dense layers only.
    layout = run.layout.model_copy(update={"megatron_sequence_parallel": False})
    train = run.train
    if linear != "dense":
        train = train.model_copy(update={"fp8": False, "mlp_tile_tokens": 0})
    other = run.model_copy(update={"model": model, "layout": layout, "train": train})
    patterns = patterns_of(run.attention, model.layers)
    flops = flops_per_sample(model, patterns, run.data.context, run.train.freeze)
    return Alternative(
        linear=linear,
        fraction=str(fraction),
        parameters=count_parameters(model),
        flops_per_token=sum(flops) / run.data.context,
        device_bytes=max(memory.on_device for memory in memory_per_rank(other, gpus)),
    )
