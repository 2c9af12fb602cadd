"""What the planner predicts for a run, to be shown beside what it measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longspan.config import Run
from longspan.errors import UserError
from longspan.hardware import Device, known_device
from longspan.planning import memory_per_rank, predict

GIB = 2**30


@dataclass(frozen=True)
class Predicted:
    """Tokens per second of all devices, and the bytes that the fullest one allocates."""

    tokens_per_s: float
    memory_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, {self.memory_bytes / GIB:,.2f} GiB at the peak of "
            "a step"
        )

    def beside(self, tokens_per_s: float | None, memory_bytes: float | None) -> str:
        """Prediction and measurement in one line."""
        pairs = [
            (self.tokens_per_s, tokens_per_s, 1.0, ",.0f", "tokens/s"),
            (self.memory_bytes, memory_bytes, GIB, ",.2f", "GiB"),
        ]
        texts = [
            f"{format(planned / unit, style)} {name} predicted, "
            f"{format(found / unit, style)} measured ({found / planned - 1:+.1%})"
            for planned, found, unit, style, name in pairs
            if found
        ]
        return "; ".join(texts) or f"{self} predicted, nothing measured"


def predict_for(run: Run, world: int, device: torch.device) -> Predicted | str | None:
    """The prediction for `run` on the kind of GPU that `device` is; or why there is none.

    None on a CPU, of which no rates are known unless `train.gpu` gives them.
    """
    gpu = run.train.gpu
    if device.type != "cuda" and not gpu:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = known_device(gpu, name)
    if known is None:
        return (
            f'none: the rates of "{name}" are unknown; longspan doctor --calibrate -o FILE.toml '
            "measures them for train.gpu"
        )
    return predict_on(run, world, known)


def predict_on(run: Run, world: int, device: Device) -> Predicted | str:
    """The prediction for `world` such devices; or why there is none, which never stops a run."""
    if run.model.factory or run.engine.name != "native":
        what = "model.factory" if run.model.factory else f"engine.name = {run.engine.name!r}"
        return f"none: {what} is not planned"
    try:
        stages = memory_per_rank(run, world)
        time = predict(run, world, device)
    except (UserError, ValueError) as error:
        return f"none: {error}"
    return Predicted(time.tokens_per_s, max(memory.allocated for memory in stages))
