"""`longspan plan`: what a run takes, before it runs.

So far that is what follows from the run file alone: numbers, FLOPs, and the memory of model and
optimizer on each device. Activations, time and what travels are not in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from longspan.config import Run, Sketch, derived_values
from longspan.errors import UserError
from longspan.models import count_parameters, flops_per_sample
from longspan.planning.memory import States, states_of

GIB = 2**30
CLASSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "passing": "in passing",
    "copies": "16-bit copies",
    "signs": "signs of sketched layers",
}
SHARES = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))


@dataclass(frozen=True)
class Form:
    """A way to store the blocks' linear layers, and what the run takes with it."""

    linear: str
    share: str
    parameters: int
    flops_per_token: float
    device_bytes: int
    """Of model and optimizer, on the fullest device."""


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    gpus: int
    precision: str
    derived: dict[str, str]
    parameters: int
    matrix_flops: float
    """Per token, in training."""
    attention_flops: float
    """Likewise."""
    stages: list[States]
    """Of each rank of the pipeline axis."""
    checkpoint_bytes: int
    forms: list[Form]

    def as_dict(self) -> dict[str, Any]:
        of_stages = [{**asdict(states), "on_device": states.on_device} for states in self.stages]
        return {**asdict(self), "stages": of_stages}

    def __str__(self) -> str:
        return "\n\n".join([self._summary(), self._memory(), self._choice()])

    def _summary(self) -> str:
        total = self.matrix_flops + self.attention_flops
        words = {
            "parameters": f"{self.parameters:,}",
            **self.derived,
            "FLOPs": f"{total / 1e9:,.3f} G a token in training, "
            f"{self.attention_flops / total:.0%} of them attention",
            "checkpoint": f"{self.checkpoint_bytes / GIB:,.3f} GiB",
        }
        return "\n".join(f"{name:<15}{text}" for name, text in words.items())

    def _memory(self) -> str:
        """A column for each rank of the pipeline axis."""
        several = len(self.stages) > 1
        devices = "processes" if self.gpus > 1 else "process"
        lines = [f"memory of a device, GiB, {self.gpus:,} {devices}, {self.precision}:"]
        if several:
            heads = "".join(f"{f'pipeline {i}':>12}" for i in range(len(self.stages)))
            lines.append(f"  {'':<26}{heads}")
        rows = {words: [getattr(s, name) for s in self.stages] for name, words in CLASSES.items()}
        rows["of these in the CPU's memory"] = [states.offloaded for states in self.stages]
        rows = {words: sizes for words, sizes in rows.items() if any(sizes)}
        rows["on the device"] = [states.on_device for states in self.stages]
        lines += [
            f"  {words:<28}" + "".join(f"{size / GIB:>12,.3f}" for size in sizes).removeprefix("  ")
            for words, sizes in rows.items()
        ]
        return "\n".join([*lines, "  and activations, which this does not know yet"])

    def _choice(self) -> str:
        """What other forms of the linear layers would take."""
        head = f"  {'linear layers':<15}{'share':>7}{'parameters':>18}{'GFLOPs a token':>17}"
        lines = ["other linear layers, each in the same share:", head + f"{'GiB a device':>15}"]
        for form in self.forms:
            lines.append(
                f"  {form.linear:<15}{form.share:>7}{form.parameters:>18,}"
                f"{form.flops_per_token / 1e9:>17,.3f}{form.device_bytes / GIB:>15,.3f}"
            )
        return "\n".join(lines)


def plan(run: Run, gpus: int) -> Plan:
    """What `run`, checked for `gpus` processes, takes on each of them."""
    if run.engine.name != "native":
        raise UserError(
            f"a plan knows the memory of PyTorch itself, and engine.name is {run.engine.name!r}: "
            "use engine.name=native"
        )
    parameters = count_parameters(run.model)
    matrices, attention = flops_per_sample(run)
    context = run.data.context
    return Plan(
        gpus=gpus,
        precision=run.train.precision,
        derived=derived_values(run, gpus),
        parameters=parameters,
        matrix_flops=matrices / context,
        attention_flops=attention / context,
        stages=states_of(run, gpus),
        checkpoint_bytes=12 * parameters,  # and two moments each, in 32 bits
        forms=_forms(run, gpus),
    )


def _forms(run: Run, gpus: int) -> list[Form]:
    forms = [_form(run, gpus, "dense", Fraction(1))]
    forms += [_form(run, gpus, kind, x) for kind in ("low_rank", "sketched") for x in SHARES]
    return forms


def _form(run: Run, gpus: int, linear: str, share: Fraction) -> Form:
    sketch = Sketch(keep=float(share), layers=run.model.sketch.layers)
    model = run.model.model_copy(update={"linear": linear, "sketch": sketch})
    layout = run.layout.model_copy(
        update={"megatron_sequence_parallel": False}
    )  # which is of dense layers
    other = run.model_copy(update={"model": model, "layout": layout})
    return Form(
        linear=linear,
        share=str(share),
        parameters=count_parameters(model),
        flops_per_token=sum(flops_per_sample(other)) / run.data.context,
        device_bytes=max(states.on_device for states in states_of(other, gpus)),
    )
