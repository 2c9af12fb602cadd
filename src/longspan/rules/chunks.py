"""What `train.chunk_tokens`, context in time, asks of the other keys."""

from __future__ import annotations

from longspan.checks import layout_problems
from longspan.config import DILATED, Attention, Data, Engine, Layout, Model, Train
from longspan.rules.problem import Problem, Problems


def chunk_rules(train: Train, attention: Attention, data: Data) -> Problems:
    if train.has_auto_chunks:
        return
    if train.offload_chunk_rows and not train.chunk_tokens:
        message = "true has no effect without train.chunk_tokens: set it, or use false"
        yield Problem("train.offload_chunk_rows", message)
    if not train.chunk_tokens:
        return
    lengths = sorted(
        {
            w
            for layer in attention.cycle
            if layer.kind in DILATED
            for w in layer.segment_lengths
            if w < data.context
        }
    )
    if wrong := [w for w in lengths if not _are_aligned(train.chunk_tokens, w)]:
        # A segment that ends inside a later chunk than it began in has no fast kernel.
        fitting = [w for w in lengths if all(_are_aligned(w, other) for other in lengths)]
        below = [w for w in fitting if w < train.chunk_tokens]
        use = max(below) if below else min(fitting) if fitting else data.context
        yield Problem(
            "train.chunk_tokens",
            f"{train.chunk_tokens} is neither a multiple nor a divisor of the segment length "
            f"{wrong[0]}: use {use}",
        )


def chunk_layout_rules(
    train: Train, layout: Layout, model: Model, engine: Engine, world: int
) -> Problems:
    if not train.chunk_tokens or layout_problems(layout.ranks(), world):
        return
    ranks = layout.resolve(world)
    if engine.name != "native":
        message = f'needs engine.name = "native", but it is "{engine.name}": use 0'
        yield Problem("train.chunk_tokens", message)
    if ranks["pipeline"] > 1:
        message = f"is not supported with layout.pipeline = {ranks['pipeline']}: use 0, or 1 rank"
        yield Problem("train.chunk_tokens", message)
    yield from _sequence_problems(train, model, ranks["sequence"], ranks["tensor"])
    if layout.megatron_sequence_parallel and ranks["tensor"] > 1:
        message = "true is not supported with train.chunk_tokens: use false"
        yield Problem("layout.megatron_sequence_parallel", message)


def _sequence_problems(train: Train, model: Model, ranks: int, tensor: int) -> Problems:
    """What sequence-parallel ranks ask, each of which has some heads of all tokens of a chunk."""
    size = train.chunk_tokens
    if ranks > 1 and (size % ranks or size < 4 * ranks):
        message = f"{size} is not a multiple of layout.sequence = {ranks}, and at least four times"
        yield Problem("train.chunk_tokens", f"{message} it: use {max(4, size // ranks) * ranks}")
    heads, keys = model.heads // tensor, model.kv_heads // tensor
    if heads % ranks or (keys % ranks and ranks % keys):
        found = f"{heads} heads and {keys} key heads" + " of a tensor rank" * (tensor > 1)
        message = f"{ranks} ranks cannot split the {found} evenly, as train.chunk_tokens needs"
        yield Problem("layout.sequence", f"{message}: use a divisor of both, or whole sequences")


def _are_aligned(chunk: int, segment: int) -> bool:
    return chunk % segment == 0 or segment % chunk == 0
