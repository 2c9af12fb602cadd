"""What must hold between the values of [data]."""

from __future__ import annotations

from longspan.config import Data
from longspan.rules.problem import Problem, Problems


def mix_rules(data: Data) -> Problems:
    if data.mix is None:
        return
    if not data.mix:
        yield Problem("data.mix", "is empty: add a table [[data.mix]] with source and weight")
    elif not any(part.weight for part in data.mix):
        yield Problem("data.mix", "the weights sum to zero: raise at least one")
    if data.source != "builtin":
        message = f'"{data.source}" has no effect with data.mix: remove it, or add it to the mix'
        yield Problem("data.source", message)
    names = [part.source for part in data.mix]
    for number, name in enumerate(names):
        if name in names[:number]:
            message = f'"{name}" occurs twice: list it once, with the sum of the weights'
            yield Problem(f"data.mix.{number}.source", message)
        if name == "recall":
            message = '"recall" is not supported in a mixture: use it as data.source'
            yield Problem(f"data.mix.{number}.source", message)
