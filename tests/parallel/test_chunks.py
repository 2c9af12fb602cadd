"""`train.chunk_tokens`: a step in chunks equals the step over whole sequences."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention import BlockSparse, Dense, Dilated, Pattern, Window
from longspan.config import Model
from longspan.constants import IGNORE_INDEX
from longspan.data import Batch
from longspan.models.decoder import Decoder
from longspan.models.initial import initialize
from longspan.parallel.chunks import ChunkedDecoder, chunk_boundaries, split_chunks
from longspan.planning.tracing import LiveMemory
from tests.harness import Ranks
from tests.parallel.test_apply import NO_BRANCHES, run_of, single_process_steps, steps_of
from tests.parallel.test_apply import PATTERNS as APPLY_PATTERNS
from tests.parallel.test_documents import folder  # noqa: F401, a fixture
from tests.slow import slow
from tests.steps import assert_same_steps

TOKENS = 96
MODEL = Model(hidden=32, layers=2, heads=4, kv_heads=2, vocab=64, ffn=48, learnable_sinks=True)
DILATED = Dilated((16, 48, 96), (1, 3, 6))
PATTERNS: dict[str, tuple[Pattern, Pattern]] = {
    "dense": (Dense(), Dense()),
    "window": (Window(20, sinks=3), Window(5, dilation=4)),
    "dilated": (DILATED, DILATED),
    "block sparse": (
        BlockSparse(8, local_window=16, global_tokens=8),
        Dilated((48, 96), (1, 2), blocks=BlockSparse(8, local_window=16)),
    ),
    "per layer": (Window(30), DILATED),
}


def decoder(patterns: tuple[Pattern, ...], tokens: int = TOKENS) -> Decoder:
    model = Decoder(MODEL, patterns, tokens)
    initialize(model, 0, model.named_parameters())
    return model


def batch_of(tokens: int = TOKENS, *, has_documents: bool = False) -> Batch:
    """Two samples; some targets have no loss."""
    torch.manual_seed(0)
    inputs, targets = torch.randint(MODEL.vocab, (2, 2, tokens))
    targets[:, ::7] = IGNORE_INDEX
    ids = torch.arange(tokens)
    documents = torch.stack([ids // 31, (ids > 60).long()]) if has_documents else None
    return Batch(inputs, targets, documents)


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def step_in_chunks(model: Decoder, batch: Batch, chunk_tokens: int, **options: bool) -> Tensor:
    chunked = ChunkedDecoder(model, chunk_tokens, offload=options.get("offload", False))
    inputs = batch.tokens, batch.targets, batch.documents, batch.samples
    return chunked.backward(model, inputs, torch.tensor(0.01), nullcontext, lambda _: nullcontext())


@pytest.mark.parametrize("has_documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS.keys())
def test_chunks_give_the_gradients_of_whole_sequences(
    patterns: tuple[Pattern, ...], has_documents: bool
) -> None:
    """In float32, with grouped heads, learnable sinks, and targets without a loss."""
    whole, batch = decoder(patterns), batch_of(has_documents=has_documents)
    loss = 0.01 * whole(batch.tokens, batch.targets, batch.documents)
    loss.backward()
    model, chunk_tokens = decoder(patterns), 48 if has_documents else 16
    found = step_in_chunks(model, batch, chunk_tokens)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=0)
    for name, expected in gradients(whole).items():
        assert (gradients(model)[name] - expected).norm() <= 1e-5 * expected.norm(), name
    evaluated = ChunkedDecoder(model, chunk_tokens, offload=False)
    losses = (x(batch.tokens, batch.targets, batch.documents).detach() for x in (evaluated, model))
    for x in losses:  # of chunks, and of the whole sequence as before
        torch.testing.assert_close(0.01 * x, loss.detach())


QUICK = [("dense", True), ("block sparse", True), ("dilated", False)]


def step_over_ranks(_rank: int, _world: int, case: str, has_documents: bool) -> list[Tensor]:
    """The loss and all gradients of ranks that split chunks, summed, and the loss evaluated."""
    model, batch = decoder(PATTERNS[case]), batch_of(has_documents=has_documents)
    chunk_tokens, group = 48 if has_documents else 16, dist.group.WORLD
    chunked = ChunkedDecoder(model, chunk_tokens, offload=False, group=group)
    inputs = batch.tokens, batch.targets, batch.documents, None
    scale = torch.tensor(0.01)
    loss = chunked.backward(model, inputs, scale, nullcontext, lambda _: nullcontext())
    evaluated = scale * chunked(batch.tokens, batch.targets, batch.documents)
    found = [loss, evaluated, *gradients(model).values()]
    for x in found:
        dist.all_reduce(x)
    return found


@pytest.mark.parametrize(
    ("case", "has_documents"),
    [
        case if case in QUICK else pytest.param(*case, marks=slow("parity"))
        for case in product(PATTERNS, (False, True))
    ],
)
def test_ranks_that_split_chunks_have_the_gradients_of_one(
    ranks: Ranks, case: str, has_documents: bool
) -> None:
    """Sequence (context) parallelism: two ranks, of which each keeps the rows of its heads."""
    whole, batch = decoder(PATTERNS[case]), batch_of(has_documents=has_documents)
    loss = 0.01 * whole(batch.tokens, batch.targets, batch.documents)
    loss.backward()
    for found, evaluated, *grads in ranks.run(step_over_ranks, 2, case, has_documents):
        for x in (found, evaluated):
            torch.testing.assert_close(x, loss.detach(), rtol=1e-5, atol=0)
        for grad, (name, expected) in zip(grads, gradients(whole).items(), strict=True):
            assert (grad - expected).norm() <= 1e-5 * expected.norm(), name


def test_one_chunk_is_the_whole_sequence_bit_for_bit() -> None:
    whole, model, batch = decoder((DILATED, Dense())), decoder((DILATED, Dense())), batch_of()
    loss = 0.01 * whole(batch.tokens, batch.targets)
    loss.backward()
    assert torch.equal(step_in_chunks(model, batch, TOKENS), loss.detach())
    for name, expected in gradients(whole).items():
        assert torch.equal(gradients(model)[name], expected), name


def test_offloaded_rows_change_nothing() -> None:
    batch, found = batch_of(), []
    for offload in (False, True):
        model = decoder((DILATED, Dense()))
        loss = step_in_chunks(model, batch, 16, offload=offload)
        found.append((loss, gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(x, found[1][1][name]) for name, x in found[0][1].items())


def test_memory_grows_with_the_kept_rows_alone() -> None:
    """Four times the context: beside tokens only rows, their gradients and copies are more."""
    pattern, peaks = Dilated((16, 1024), (1, 64)), {}
    for tokens in (256, 1024):
        model, batch = decoder((pattern, pattern), tokens), batch_of(tokens)
        step_in_chunks(model, batch, 64)  # plans and gradients are there now
        with LiveMemory() as memory:
            step_in_chunks(model, batch, 64)
        peaks[tokens] = memory.peak
    rows = MODEL.layers * MODEL.heads * (1024 - 256) // 64
    bytes_of_row = 2 * 2 * MODEL.head_dim * 4  # a key and a value of two samples
    assert 0 < peaks[1024] - peaks[256] <= 8 * rows * bytes_of_row
    whole = decoder((pattern, pattern), 1024)
    with LiveMemory() as memory:
        (0.01 * whole(batch.tokens, batch.targets)).backward()
    assert memory.peak > 4 * peaks[1024]


LAYOUTS = [
    ["layout.replicate=2", "train.micro_batch=2"],
    ["layout.shard=2", "train.micro_batch=2", "train.activation_checkpointing=full"],
    ["layout.tensor=2", "train.micro_batch=4", "train.activation_checkpointing=selective"],
    ["layout.sequence=2", "train.micro_batch=4", "train.activation_checkpointing=full"],
]


LONGER = [
    ["layout.sequence=4", "train.micro_batch=4", "layout.zero=1"],
    ["layout.sequence=2", "layout.tensor=2", "train.activation_checkpointing=selective"],
    ["layout.sequence=2", "layout.replicate=2", "train.offload_chunk_rows=true"],
    ["layout.sequence=2", "layout.shard=2", "train.activation_checkpointing=full"],
]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *[(2, layout) for layout in LAYOUTS],
        *[pytest.param(4, layout, marks=slow("parity")) for layout in LONGER],
    ],
    ids=str,
)
def test_layouts_in_chunks_take_the_steps_of_one_process(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    """The reference takes whole sequences; accumulation and validation loss are compared too."""
    found = ranks.run(steps_of, world, [*layout, "train.chunk_tokens=16"])
    assert_same_steps(found, single_process_steps())


@slow("parity")
@pytest.mark.parametrize("kind", APPLY_PATTERNS)
def test_one_key_head_and_other_patterns_over_four_ranks(ranks: Ranks, kind: str) -> None:
    """With two key heads or one, which several ranks read."""
    pattern = ("model.kv_heads=2", *NO_BRANCHES, *APPLY_PATTERNS[kind])
    options = [*pattern, "layout.sequence=4", "train.micro_batch=4", "train.chunk_tokens=16"]
    assert_same_steps(ranks.run(steps_of, 4, options), single_process_steps(*pattern))


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.shard=2"],
        pytest.param(["layout.sequence=2"], marks=slow("parity")),
        pytest.param(["layout.sequence=2", "layout.shard=2"], marks=slow("parity")),
        pytest.param(["layout.sequence=2", "layout.tensor=2"], marks=slow("parity")),
    ],
    ids=str,
)
def test_documents_and_loss_masks_of_a_run(
    ranks: Ranks,
    folder: Path,  # noqa: F811
    layout: list[str],
) -> None:
    """Some documents are longer than a chunk, only answers have a loss, and there is dropout.

    Ranks with other samples have other chunks, and must gather parameters equally often.
    """
    options = [f"data.source={folder}", "train.micro_batch=2", "model.dropout=0.1"]
    chunks = ["train.chunk_tokens=32", "train.activation_checkpointing=full"]
    found = ranks.run(steps_of, 2 * len(layout), [*options, *chunks, *layout])
    assert_same_steps(found, single_process_steps(*options))


def test_chunks_are_split_until_ranks_have_equally_many() -> None:
    starts = (0, 3, 5, 6)
    chunks = chunk_boundaries(starts, 24, 8)
    assert chunks == (0, 6, 14, 22, 24)
    assert split_chunks(chunks, starts, 4, 8) == chunks
    assert split_chunks(chunks, starts, 6, 8) == (0, 6, 10, 14, 18, 22, 24)  # halves of 8
    assert split_chunks(chunks, starts, 7, 8) == (0, 3, 6, 10, 14, 18, 22, 24)  # at a document


@pytest.mark.parametrize("least", [2, 4])
def test_every_rank_has_tokens_of_every_chunk(least: int) -> None:
    """Whatever the documents, which are random here, and however many chunks other ranks have."""
    torch.manual_seed(0)
    for size in (least, 4 * least, 8 * least):
        found = []
        for _ in range(50):
            cuts = torch.randint(1, 64, (torch.randint(20, ()),))
            starts = (0, *sorted(set(cuts.tolist())))
            found.append((chunk_boundaries(starts, 64, size, least), starts))
        most = max(len(chunks) - 1 for chunks, _ in found)
        for chunks, starts in found:
            chunks = split_chunks(chunks, starts, most, size, least)
            assert len(chunks) == most + 1
            lengths = [b - a for a, b in pairwise(chunks)]
            assert sum(lengths) == 64
            assert least <= min(lengths)
            assert max(lengths) <= size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.chunk_tokens=24"], "neither a multiple nor a divisor of the segment length 16"),
        (["train.offload_chunk_rows=true"], "has no effect without train.chunk_tokens"),
        (["train.chunk_tokens=6", "layout.sequence=2"], "at least four times it: use 8"),
        (
            ["train.chunk_tokens=16", "layout.sequence=2", "model.heads=1", "model.kv_heads=1"],
            "2 ranks cannot split the 1 heads and 1 key heads evenly",
        ),
        (["train.chunk_tokens=16", "layout.pipeline=2"], "layout.pipeline = 2"),
        (["train.chunk_tokens=16", "engine.name=deepspeed"], 'engine.name = "native"'),
        (
            [
                "train.chunk_tokens=16",
                "layout.tensor=2",
                "layout.megatron_sequence_parallel=true",
            ],
            "layout.megatron_sequence_parallel",
        ),
    ],
)
def test_what_chunks_cannot_do_is_refused(options: list[str], message: str) -> None:
    from longspan.errors import UserError

    world = 2 if any(x.startswith("layout") for x in options) else 1
    with pytest.raises(UserError, match=message):
        run_of(world, *options)
