"""`data.documents = "isolate"`: packed documents equal each document alone, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan.attention import BlockSparse, Dense, Dilated, Pattern, Window
from longspan.config import Model
from longspan.data.build import build
from longspan.models.decoder import Decoder, document_positions, initialize
from tests.engines.test_engines import run_in_fresh_processes, set_launcher_environment
from tests.harness import Ranks
from tests.parallel.test_apply import NO_BRANCHES, PATTERNS, single_process_steps, steps_of
from tests.steps import Steps, assert_same_steps

MODEL = Model(hidden=32, layers=2, heads=4, kv_heads=2, vocab=64, ffn=48)
LENGTHS = (13, 1, 22, 28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty documents of 10 to 89 bytes: some fit into 64 tokens, others do not."""
    root = tmp_path_factory.mktemp("documents")
    lines = [f'{{"text": "{chr(97 + n % 26) * 3}{"xyzzy " * 15}"}}'[: 10 + n] for n in range(80)]
    texts = root / "texts"
    texts.mkdir()
    for n, line in enumerate(lines):
        (texts / f"{n:02d}.txt").write_text(line)
    build([texts], root / "shards", validation=0.1)
    return root / "shards"


def decoder(pattern: Pattern) -> Decoder:
    model = Decoder(MODEL, pattern, sum(LENGTHS))
    initialize(model, 0, model.named_parameters())
    return model


def test_positions_start_again_in_each_document() -> None:
    documents = torch.tensor([[4, 4, 2, 2, 2, 4], [0, 1, 1, 1, 1, -1]])
    assert document_positions(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 0]]


@pytest.mark.parametrize(
    "pattern",
    [
        Dense(),
        Dilated((8, 32), (1, 4)),
        BlockSparse(4, local_window=8, density=0.3),
        Window(6, sinks=2),
        Dilated((16, 64), (1, 2), blocks=BlockSparse(4, local_window=8)),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_loss_and_gradients_are_those_of_each_document_alone(pattern: Pattern) -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(64, (2, 2, sum(LENGTHS)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).expand(2, -1)
    packed, alone = decoder(pattern), decoder(pattern)
    loss = packed(tokens, targets, documents)
    loss.backward()
    parts = zip(tokens.split(LENGTHS, dim=1), targets.split(LENGTHS, dim=1), strict=True)
    total = sum(alone(*part) for part in parts)
    total.backward()
    torch.testing.assert_close(loss, total)
    for (name, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("pattern", [Dense(), Dilated((8, 32), (1, 4)), BlockSparse(4, stride=2)])
@torch.no_grad()
def test_a_document_moves_nothing_in_another_bit_for_bit(pattern: Pattern) -> None:
    torch.manual_seed(0)
    model, tokens = decoder(pattern), torch.randint(64, (1, sum(LENGTHS)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]
    before = model.hidden(tokens, documents=documents)
    changed = torch.where(documents == 2, (tokens + 7) % 64, tokens)
    moved = (model.hidden(changed, documents=documents) != before).any(-1)
    assert moved[documents == 2].all()
    assert not moved[documents != 2].any()


@pytest.mark.parametrize(
    ("kind", "world", "layout"),
    [
        ("dilated", 2, ["layout.replicate=2", "layout.shard=1"]),
        ("dilated", 2, ["layout.zero=3", "train.activation_checkpointing=selective"]),
        ("dilated", 4, ["layout.sequence=4"]),
        ("dilated", 4, ["layout.shard=2", "layout.tensor=2"]),
        ("dilated", 4, ["layout.sequence=2", "layout.pipeline=2"]),
        ("dense", 4, ["layout.sequence=2", "layout.tensor=2"]),
        ("dense with one key head", 3, ["layout.sequence=3", "data.context=63"]),
        ("block sparse", 2, ["layout.sequence=2"]),
        ("dilated block sparse", 4, ["layout.sequence=4", "model.heads=2"]),
    ],
    ids=str,
)
def test_every_layout_takes_the_same_steps(
    ranks: Ranks, folder: Path, kind: str, world: int, layout: list[str]
) -> None:
    pattern = [] if kind == "dilated" else [*NO_BRANCHES, *PATTERNS[kind]]
    model = [x for x in layout if x.startswith(("model.", "data."))]
    settings = [*pattern, *isolated(folder), *model]
    found = ranks.run(steps_of, world, [*layout, *settings, "train.micro_batch=2"])
    assert_same_steps(found, single_process_steps(*settings))


def isolated(folder: Path) -> list[str]:
    return [f"data.source={folder}", "data.documents=isolate"]


def steps_of_engines(rank: int, world: int, options: list[str]) -> list[Steps]:
    set_launcher_environment(rank, world)
    engines = (
        ["engine.name=deepspeed", "layout.zero=3"],
        ["engine.name=accelerate", "layout.zero=0"],
    )
    return [steps_of(rank, world, [*options, *engine]) for engine in engines]


def test_other_engines_take_the_same_steps(folder: Path) -> None:
    options = [*isolated(folder), "train.micro_batch=2"]
    found = run_in_fresh_processes(steps_of_engines, 2, options)
    for of_engine in zip(*found, strict=True):
        assert_same_steps(of_engine, single_process_steps(*isolated(folder)))
