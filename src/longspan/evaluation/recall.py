"""Recall by distance and depth: does the model find one fact in a long context?

"needle": a sentence with a number is hidden in other text (Kamradt 2023, "needle in a haystack").
"pairs": the context is a list of keys and values, of which one is asked (as in Liu et al. 2023,
"Lost in the Middle"). The answer counts as right if each of its tokens is the most likely one,
which is what greedy decoding would generate; so one forward pass is enough.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longspan.data.tokenizer import Tokenizer
from longspan.evaluation.losses import last_logits
from longspan.models import Decoder

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST = 128
WORDS = ("Paris", "Tokyo", "Lima", "Oslo", "Cairo", "Delhi", "Quito", "Rome", "Dakar", "Seoul")


@dataclass(frozen=True)
class Trial:
    """A context and its answer, which is at its end."""

    tokens: list[int]
    answer: int
    """Number of tokens of the answer."""
    distance: int
    """From the fact to the answer, in tokens."""


@dataclass(frozen=True)
class Cell:
    """Where the fact is: `depth` 0 is the beginning of a context of `length` tokens, 1 its end."""

    task: str
    length: int
    depth: float
    trial: int


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    distance: int
    is_right: bool


def cells(tasks: Sequence[str], context: int, trials: int) -> list[Cell]:
    """All trials: every task, length, depth and repetition; lengths halve from `context` on."""
    lengths = [context]
    while lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    return [
        Cell(task, length, depth, trial)
        for task in tasks
        for length in reversed(lengths)
        for depth in DEPTHS
        for trial in range(trials)
    ]


def run_cell(
    model: Decoder, tokenizer: Tokenizer, filler: Sequence[int], cell: Cell, device: torch.device
) -> Outcome | None:
    """Ask the model; None if the length has no room for the task."""
    rng = random.Random(f"{cell}")
    make = _needle if cell.task == "needle" else _pairs
    inner = replace(cell, length=cell.length - len(tokenizer.bos))
    if (trial := make(tokenizer, filler, inner, rng)) is None:
        return None
    tokens = torch.tensor([*tokenizer.bos, *trial.tokens], device=device)
    logits = last_logits(model, tokens[:-1], trial.answer)[:, : tokenizer.vocab]
    is_right = bool((logits.argmax(-1) == tokens[-trial.answer :]).all())
    return Outcome(cell, trial.distance, is_right)


def _needle(
    tokenizer: Tokenizer, filler: Sequence[int], cell: Cell, rng: random.Random
) -> Trial | None:
    question = tokenizer.encode(f"\nThe secret number of {rng.choice(WORDS)} is ")
    answer = tokenizer.encode(f"{rng.randrange(10_000, 100_000)}")
    fact = [*question, *answer, *tokenizer.encode(".\n")]
    room = cell.length - len(fact) - len(question) - len(answer)
    if room < 0 or not filler:
        return None
    start = rng.randrange(len(filler))
    text = [filler[(start + i) % len(filler)] for i in range(room)]
    at = round(cell.depth * room)
    tokens = [*text[:at], *fact, *text[at:], *question, *answer]
    return Trial(tokens, len(answer), len(tokens) - len(answer) - at - len(question))


def _pairs(
    tokenizer: Tokenizer, _filler: Sequence[int], cell: Cell, rng: random.Random
) -> Trial | None:
    asked, lines = f"{rng.randrange(16**4):04x}", list[list[int]]()
    question = tokenizer.encode(f"{asked}:")
    answer = tokenizer.encode(f"{rng.randrange(1000, 10_000)}")
    fact = [*question, *answer, *tokenizer.encode("\n")]
    left = cell.length - len(fact) - len(question) - len(answer)
    if left < 0:
        return None
    while True:
        key, value = f"{rng.randrange(16**4):04x}", f"{rng.randrange(1000, 10_000)}"
        line = [*tokenizer.encode(f"{key}:"), *tokenizer.encode(value), *tokenizer.encode("\n")]
        if len(line) > left:
            break
        if key != asked:
            lines.append(line)
            left -= len(line)
    at = round(cell.depth * len(lines))
    before = [token for line in lines[:at] for token in line]
    after = [token for line in lines[at:] for token in line]
    tokens = [*before, *fact, *after, *question, *answer]
    return Trial(tokens, len(answer), len(tokens) - len(answer) - len(before) - len(question))


def accuracies(outcomes: Sequence[Outcome]) -> list[dict[str, float | str]]:
    """Trials, right answers and the mean distance of each task, length and depth."""
    groups: dict[tuple[str, int, float], list[Outcome]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        groups.setdefault((cell.task, cell.length, cell.depth), []).append(outcome)
    return [
        {
            "task": task,
            "length": length,
            "depth": depth,
            "distance": sum(x.distance for x in found) / len(found),
            "trials": len(found),
            "right": sum(x.is_right for x in found),
        }
        for (task, length, depth), found in groups.items()
    ]
