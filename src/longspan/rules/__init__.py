"""What must hold between the values of a run file, and what to change where it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from longspan.config import Model, Section
from longspan.rules.chunks import chunk_layout_rules, chunk_rules
from longspan.rules.data import mix_rules
from longspan.rules.fp8 import fp8_layout_rules, fp8_rules
from longspan.rules.graphs import graph_layout_rules, graph_rules, takes_graphs
from longspan.rules.layout import decoder_layout_rules, layout_rules, module_layout_rules
from longspan.rules.model import (
    BIASES,
    ROPE_KEYS,
    attention_rules,
    blocks_rules,
    documents_rules,
    factory_rules,
    family_rules,
    freeze_rules,
    init_from_rules,
    layers_rules,
    lora_rules,
    model_rules,
    optimizer_rules,
    recall_rules,
    sketch_rules,
)
from longspan.rules.parameter_precision import parameter_precision_rules
from longspan.rules.problem import Problem, Problems
from longspan.rules.recomputation import recomputation_rules
from longspan.rules.residual import residual_rules
from longspan.rules.tiles import tile_rules
from longspan.rules.train import engine_rules, track_rules, train_rules

__all__ = [
    "BIASES",
    "ROPE_KEYS",
    "Problem",
    "attention_rules",
    "check_rules",
    "first_layout_problem",
    "takes_graphs",
]

RULES: tuple[Callable[..., Problems], ...] = (
    train_rules,
    layout_rules,
    engine_rules,
    track_rules,
)
DECODER_RULES: tuple[Callable[..., Problems], ...] = (
    model_rules,
    family_rules,
    sketch_rules,
    attention_rules,
    blocks_rules,
    layers_rules,
    init_from_rules,
    lora_rules,
    optimizer_rules,
    freeze_rules,
    documents_rules,
    mix_rules,
    recall_rules,
    decoder_layout_rules,
    chunk_rules,
    chunk_layout_rules,
    residual_rules,
    parameter_precision_rules,
    recomputation_rules,
    tile_rules,
    fp8_rules,
    fp8_layout_rules,
    graph_rules,
    graph_layout_rules,
)
MODULE_RULES: tuple[Callable[..., Problems], ...] = (factory_rules, module_layout_rules)


def check_rules(sections: Mapping[str, Section], world: int | None) -> list[Problem]:
    """Return the problems of every rule whose sections are valid; `world` is the process count."""
    known: dict[str, Any] = {**sections, **({} if world is None else {"world": world})}
    problems: list[Problem] = []
    for rule in _rules_of(sections):
        needs = _needs(rule)
        if needs <= known.keys():
            problems += rule(**{name: known[name] for name in needs})
    return problems


def first_layout_problem(sections: Mapping[str, Section], world: int) -> Problem | None:
    """Return the first problem of those rules that depend on the number of processes.

    Of a run whose other rules hold, this is what a search for a layout asks thousands of times.
    """
    known: dict[str, Any] = {**sections, "world": world}
    for rule in _rules_of(sections):
        needs = _needs(rule)
        if "world" in needs:
            for problem in rule(**{name: known[name] for name in needs}):
                return problem
    return None


def _rules_of(sections: Mapping[str, Section]) -> tuple[Callable[..., Problems], ...]:
    model = sections.get("model")
    has_factory = isinstance(model, Model) and bool(model.factory)
    return (*(MODULE_RULES if has_factory else DECODER_RULES), *RULES)


@cache
def _needs(rule: Callable[..., Problems]) -> frozenset[str]:
    return frozenset(inspect.signature(rule).parameters)
