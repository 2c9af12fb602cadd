"""The optimizer state and averages of weights in a checkpoint, checked before they are loaded."""

from __future__ import annotations

from torch import Tensor

from longspan.checkpoint import FLOATS, Checkpoint, Region
from longspan.engines import Engine
from longspan.engines.average import EMA, has_average
from longspan.engines.muon import Muon
from longspan.engines.optimizer import ADAMW_KEYS, state_keys
from longspan.errors import UserError
from longspan.models import Decoder

OptimizerEntry = tuple[str, str, bool]
"""A parameter, the kind of its state, and whether that is a scalar."""


def check_optimizer(
    saved: Checkpoint, engine: Engine, *, has_stepped: bool
) -> list[OptimizerEntry]:
    """Return (parameter, key, is scalar) of a checkpoint's optimizer state, if it is complete.

    `has_stepped`: whether a step was applied; without one, as when all were skipped, there may be
    no state.
    """
    shapes, found = saved.shapes("model"), saved.shapes("optimizer")
    model, optimizer = engine.model, engine.optimizer
    assert isinstance(model, Decoder)
    expected = {
        f"{name}.{key}": () if key == "step" else shape
        for name, shape in shapes.items()
        if model.trains(name)
        for key in state_keys(optimizer, name, shape)
    }
    kind = "Muon" if isinstance(optimizer, Muon) else "AdamW"
    for name in sorted(expected.keys() | found.keys()) if found or has_stepped else ():
        if found.get(name) != expected.get(name):
            raise UserError(
                f"the optimizer state in {saved.path} is not that of {kind} for this model: {name} "
                f"has shape {found.get(name)}, expected {expected.get(name)}; use the "
                "train.optimizer or the checkpoint of before, or start a new run"
            )
        dtype = saved.dtype(f"optimizer/{name}")
        if expected[name] != () and dtype not in FLOATS:
            raise UserError(f"{name} is {dtype} in {saved.path}, not floating point")
    return [(*_split(name), not shape) for name, shape in found.items()]


def check_own_optimizer(saved: Checkpoint) -> list[OptimizerEntry]:
    """The same for a user's optimizer or model, where parameters that no loss has used have none.

    An optimizer other than AdamW may keep other state for some parameters than for others.
    """
    shapes, found = saved.shapes("model"), saved.shapes("optimizer")
    keys: dict[str, set[str]] = {}
    for name, shape in found.items():
        parameter, key = _split(name)
        if parameter not in shapes or shape not in ((), shapes[parameter]):
            raise UserError(
                f"the optimizer state in {saved.path} does not fit this model: {name} has shape "
                f"{shape}, and the parameter {shapes.get(parameter)}"
            )
        keys.setdefault(parameter, set()).add(key)
    expected = set().union(*keys.values())
    if expected - ADAMW_KEYS:
        expected = set()
    for parameter, have in keys.items():
        if missing := expected - have:
            raise UserError(
                f"the optimizer state in {saved.path} has no {min(missing)} of {parameter}"
            )
    return [(*_split(name), not shape) for name, shape in found.items()]


def check_averages(saved: Checkpoint, engine: Engine, *, has_stepped: bool) -> list[OptimizerEntry]:
    """The entries of a checkpoint's averages of weights, if there are all that there should be."""
    model, found = engine.model, saved.shapes(EMA)
    shapes = saved.shapes("model").items()
    expected = {
        name: shape
        for name, shape in shapes
        if has_average(engine.optimizer) and isinstance(model, Decoder) and model.trains(name)
    }
    if found != expected and (found or has_stepped):
        name = min(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise UserError(
            f"the averages of weights in {saved.path} do not fit this model: {name} has shape "
            f"{found.get(name)}, expected {expected.get(name)}"
        )
    for name in found:
        if (dtype := saved.dtype(f"{EMA}/{name}")) not in FLOATS:
            raise UserError(f"the average of {name} is {dtype} in {saved.path}, not floating point")
    return [(name, EMA, False) for name in found]


def read_optimizer(saved: Checkpoint, name: str, region: Region) -> Tensor:
    if name.endswith(f".{EMA}"):
        return saved.read(f"{EMA}/{name.removesuffix(f'.{EMA}')}", region)
    values = saved.read(f"optimizer/{name}", region)
    if name.endswith(".step") and not 0 <= float(values) <= saved.step:
        raise UserError(f"{saved.path} is of step {saved.step}, but {name} is {float(values):g}")
    return values


def group_of_average(name: str) -> str:
    """The name in a checkpoint of what an engine calls "optimizer/….ema": "ema/…"."""
    stem, mark, shard = name.partition("#")
    if not (stem.startswith("optimizer/") and stem.endswith(f".{EMA}")):
        return name
    return f"{EMA}/{stem.removeprefix('optimizer/').removesuffix(f'.{EMA}')}{mark}{shard}"


def _split(name: str) -> tuple[str, str]:
    parameter, _, key = name.rpartition(".")
    return parameter, key
