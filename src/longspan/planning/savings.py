"""What a run can change to need less memory and compute the same, one step at a time.

A higher ZeRO stage, recomputation of more layers, the MLP in tiles, smaller chunks, activations or
rows of chunks offloaded. Nearly every step saves memory and takes at least as long; but rows of
chunks may need more than the activations that they save.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.config import Layout, Run, Section, Train
from longspan.planning.chunks import chunk_sizes
from longspan.planning.memory import needed_by
from longspan.planning.parameters import Degrees
from longspan.rules import Problem, check_rules, first_layout_problem

TILE_TOKENS = (1 << 16, 1 << 13)
"""Of the tiles that are taken: the larger ones are faster, and need more memory."""
CHUNKED_CONTEXT, LEAST_CHUNK = 1 << 16, 1 << 14
"""Contexts from which on chunks are taken, and the smallest of these: the kernels of smaller ones
are short, and their rows of earlier chunks many."""
LAST = 6
"""Steps that may need more memory than fewer of them: recomputation of all but few layers."""
EMPTY = 1 / 8
"""Of a context, what its last chunk may lack: it takes as long as a full one."""
FAST_IN_CHUNKS = ("dense", "dilated", "window")
"""Kinds of attention that have kernels for the rows of earlier chunks."""

CHECKPOINTING, RECOMPUTED = "activation_checkpointing", "recompute_layers"
TILES, CHUNKS = "mlp_tile_tokens", "chunk_tokens"
OFFLOAD, ROWS = "offload_activations", "offload_chunk_rows"
SAVING_KEYS = (CHECKPOINTING, RECOMPUTED, TILES, CHUNKS, OFFLOAD, ROWS)
"""The keys of [train] that are changed."""


@dataclass(frozen=True)
class Savings:
    """Which steps are taken on so many devices."""

    gpus: int
    fixed: Collection[str] = ()
    """Keys of [train] that are kept."""
    others: bool = False
    """Tiles and chunks, besides ZeRO stages and recomputation."""
    offloads: bool = False
    """To CPU, of activations and of rows of chunks."""

    def after(self, run: Run) -> Iterator[Run]:
        """The run with one step more, of each kind that the rules allow."""
        yield from self._sharded_or_recomputed(run)
        more = [*(self._offloads(run) if self.offloads else ())]
        if self.others and TILES not in self.fixed and (size := next_tile(run, self.gpus)):
            more.append(with_train(run, **{TILES: size}))
        yield from (x for x in more if is_allowed(x, self.gpus))
        if self.others and CHUNKS not in self.fixed and may_chunk(run):
            chunked = (x for x in _in_smaller_chunks(run) if is_allowed(x, self.gpus))
            yield from itertools.islice(chunked, 1)

    def of_step(self, run: Run) -> list[Run]:
        """The runs that recompute more layers than the step before `run`, and no more than it.

        Those that recompute fewest first.
        """
        train, layers = run.train, run.model.layers
        is_full = train.activation_checkpointing == "full"
        if not is_full or train.offload_activations:  # with which it may save memory and time
            return [run]
        if not {CHECKPOINTING, RECOMPUTED}.isdisjoint(self.fixed):
            return [run]
        count = train.recompute_layers or layers
        before = (count - 1) // _quarter(layers) * _quarter(layers)
        fewer = [with_train(run, **{RECOMPUTED: n}) for n in range(before + 1, count)]
        if fewer and layout_problem(fewer[0], self.gpus) is not None:
            return [run]
        return [*fewer, run]

    def first_that_fits(self, run: Run, fits: Callable[[Run], bool]) -> Run | None:
        """The one of `of_step` that recomputes fewest layers and fits; None if none does."""
        of_step = self.of_step(run)
        for end in _ends(of_step):
            if fits(end):
                return of_step[bisect_left(of_step, True, hi=of_step.index(end), key=fits)]
        return None

    def least(self, run: Run, limit: float) -> tuple[int, Run]:
        """The fewest bytes that the run needs on the fullest device after steps, and that run.

        Of the last steps, with chunks and without, up to the first that needs no more than `limit`.
        """
        paths = [self._path(run)]
        if self.others:
            paths.append(replace(self, fixed={*self.fixed, CHUNKS})._path(run))
        found = list[tuple[int, Run]]()
        for each in itertools.zip_longest(*(path[: -LAST - 1 : -1] for path in paths)):
            ends = (_ends(self.of_step(x)) for x in each if x is not None)
            found += [(needed_by(x, self.gpus), x) for x in itertools.chain.from_iterable(ends)]
            if not self.others or min(found, key=_bytes)[0] <= limit:
                break
        return min(found, key=_bytes)

    def _path(self, run: Run) -> list[Run]:
        path = [run]
        while following := list(self.after(run)):
            run = following[-1]
            path.append(run)
        return path

    def _sharded_or_recomputed(self, run: Run) -> Iterator[Run]:
        layout = run.layout
        if uses_zero(layout, self.gpus) and layout.zero < 3:
            more = layout.model_copy(update={"zero": layout.zero + 1})
            yield from self._allowed(run.model_copy(update={"layout": more}))
        update = _more_recomputation(run.train, run.model.layers)
        if update and CHECKPOINTING not in self.fixed:
            yield from self._allowed(with_train(run, **update))

    def _allowed(self, run: Run) -> Iterator[Run]:
        """The run, or what comes after it if a rule refuses it."""
        if layout_problem(run, self.gpus) is None:
            yield run
        else:
            yield from self._sharded_or_recomputed(run)

    def _offloads(self, run: Run) -> Iterator[Run]:
        """Activations where all blocks are recomputed, which leaves one copy of each."""
        train = run.train
        is_full = train.activation_checkpointing == "full" and train.recompute_layers is None
        if OFFLOAD not in self.fixed and is_full and not train.offload_activations:
            yield with_train(run, **{OFFLOAD: True})
        if ROWS not in self.fixed and train.chunk_tokens and not train.offload_chunk_rows:
            yield with_train(run, **{ROWS: True})


def next_tile(run: Run, gpus: int) -> int:
    """The largest of TILE_TOKENS below what a rank computes at once; 0 if none is."""
    train, ranks = run.train, run.layout.resolve(gpus)
    tokens = train.micro_batch * (train.chunk_tokens or run.data.context) // ranks["sequence"]
    return next((size for size in TILE_TOKENS if size < (train.tile_of(tokens) or tokens)), 0)


def may_chunk(run: Run) -> bool:
    is_fast = all(kind in FAST_IN_CHUNKS for kind in run.attention.kinds)
    return is_fast and run.data.context >= CHUNKED_CONTEXT


def _in_smaller_chunks(run: Run) -> Iterator[Run]:
    """The largest first; but for those that leave much of the last empty."""
    context = run.data.context
    for size in chunk_sizes(run):
        is_full = -(-context // size) * size <= (1 + EMPTY) * context
        if is_full and (size >= LEAST_CHUNK or not run.train.chunk_tokens):
            yield run.model_copy(update={"train": run.train.with_chunks(size)})


def _bytes(found: tuple[int, Run]) -> int:
    return found[0]


def modes_of(train: Train, layers: int) -> Iterator[dict[str, Any]]:
    """All steps of recomputation, from none on."""
    update: dict[str, Any] = {CHECKPOINTING: "none", RECOMPUTED: None}
    while update:
        yield update
        train = train.model_copy(update=update)
        update = _more_recomputation(train, layers)


def _more_recomputation(train: Train, layers: int) -> dict[str, Any]:
    """The next step of activation checkpointing: "full" in quarters of the layers, between which
    `Savings.of_step` has the others. None after all.

    Each step saves memory and takes longer.
    """
    if train.activation_checkpointing == "none":
        return {CHECKPOINTING: "selective"}
    quarter = _quarter(layers)
    if train.activation_checkpointing == "selective":
        return {CHECKPOINTING: "full", RECOMPUTED: quarter if quarter < layers else None}
    if train.recompute_layers is None:
        return {}
    count = train.recompute_layers + quarter
    return {RECOMPUTED: count if count < layers else None}


def _ends(of_step: Sequence[Run]) -> Sequence[Run]:
    """Those that may need least: all layers may need more memory than all but one."""
    recomputes_all = of_step[-1].train.recompute_layers is None
    return of_step[-2:] if recomputes_all else of_step[-1:]


def _quarter(layers: int) -> int:
    return -(-layers // 4)


def with_train(run: Run, **update: Any) -> Run:
    """The run with other values of [train]."""
    return run.model_copy(update={"train": run.train.model_copy(update=update)})


def uses_zero(layout: Layout, gpus: int) -> bool:
    """Whether FSDP2 reduces gradients, over any ranks but those of DDP, or offloads them."""
    return Degrees.of(layout, gpus).is_fsdp


def is_allowed(run: Run, gpus: int) -> bool:
    return not check_rules(_sections(run), gpus)


def layout_problem(run: Run, gpus: int) -> Problem | None:
    """The first of what the rules of layouts refuse, which is quicker to ask than all rules."""
    return first_layout_problem(_sections(run), gpus)


def _sections(run: Run) -> dict[str, Section]:
    return {name: getattr(run, name) for name in type(run).model_fields}


def savings_text(train: Train) -> str:
    """In words."""
    count = train.recompute_layers
    mode = f"{train.activation_checkpointing}{f' of {count} layers' if count else ''}"
    words = [f"activation checkpointing {mode}"]
    if train.mlp_tile_tokens:
        words.append(f"MLP in tiles of {train.mlp_tile_tokens:,} tokens")
    if train.offload_activations:
        words.append("activations offloaded")
    if train.chunk_tokens:
        rows = " with rows offloaded" if train.offload_chunk_rows else ""
        words.append(f"chunks of {train.chunk_tokens:,} tokens{rows}")
    return ", ".join(words)
