"""`data.documents = "isolate"`: packed documents equal each document alone, in every layout.

Of these documents only the answers have a loss: layouts and engines divide by their number.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.attention import BlockSparse, Dense, Dilated, Pattern, Window
from longspan.config import Model
from longspan.data.build import build
from longspan.data.documents import Fields
from longspan.models.decoder import Decoder, document_positions
from longspan.models.initial import initialize
from longspan.training.step import train_step
from tests.engines.test_engines import run_in_fresh_processes, set_launcher_environment
from tests.harness import Ranks
from tests.parallel.test_apply import NO_BRANCHES, PATTERNS, run_of, single_process_steps, steps_of
from tests.slow import slow
from tests.steps import CPU, Steps, assert_same_steps, open_state

MODEL = Model(hidden=32, layers=2, heads=4, kv_heads=2, vocab=64, ffn=48)
LENGTHS = (13, 1, 22, 28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty documents of 10 to 89 bytes: some fit into 64 tokens, others do not.

    A third of each, or all but its end, is a prompt.
    """
    root = tmp_path_factory.mktemp("documents")
    texts = [f"{chr(97 + n % 26) * 3}{'xyzzy' * 18}"[: 10 + n] for n in range(80)]
    prompts = [text if n % 7 == 0 else text[: len(text) // 3] for n, text in enumerate(texts)]
    pairs = [{"q": q, "a": x[len(q) :].upper()} for q, x in zip(prompts, texts, strict=True)]
    (root / "in.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    fields = Fields(prompt="q", answer="a")
    build([root / "in.jsonl"], root / "shards", fields=fields, validation=0.1)
    return root / "shards"


@pytest.mark.parametrize("how", ["isolate", "join"])
def test_the_loss_is_that_of_answers_computed_by_hand(folder: Path, how: str) -> None:
    options = [f"data.source={folder}", f"data.documents={how}", "train.micro_batch=2"]
    run = run_of(1, *options)
    with open_state(run) as (state, data):
        model = copy.deepcopy(state.engine.model).double()
        assert isinstance(model, Decoder)
        loss, norm = train_step(state, data, run.train, CPU)
    total, count = torch.zeros((), dtype=torch.float64), 0
    stream = (folder / "train-00000.bin").read_bytes() + b"\0"
    for index in range(run.train.global_batch):
        sample = data.source.sample(run.train.seed, index)
        windows = [sample.tokens]
        if sample.documents is not None:
            ends = np.flatnonzero(np.diff(sample.documents)) + 1
            windows = np.split(sample.tokens[sample.documents >= 0], ends)
        for window in filter(len, windows):
            text = bytes(window.astype(np.uint8))
            after = stream.find(text) + len(text)
            logits = model.hidden(torch.from_numpy(window)[None])[0] @ model.head_weight.T
            now, following = torch.tensor([*text]), torch.tensor([*text[1:], stream[after]])
            # Answers, and the ends after them, are not lower case.
            has_loss = (now != 0) & ((following == 0) | (following >= 65) & (following < 97))
            nats = -logits.log_softmax(-1).gather(1, following[:, None])[:, 0]
            total, count = total + nats[has_loss].sum(), count + int(has_loss.sum())
    assert count > 50
    (total / count).backward()
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert float(loss) == pytest.approx(total.item() / count, rel=1e-6)
    assert float(norm) == pytest.approx(torch.stack(gradients).norm().item(), rel=1e-5)


MIXED = (*[Window(6, sinks=2)] * 3, Dilated((8, 32), (1, 4)))


def decoder(patterns: Pattern | tuple[Pattern, ...]) -> Decoder:
    """A decoder with one pattern, or with one per layer and learnable sinks."""
    config = MODEL
    if isinstance(patterns, tuple):
        config = MODEL.model_copy(update={"layers": len(patterns), "learnable_sinks": True})
    model = Decoder(config, patterns, sum(LENGTHS))
    initialize(model, 0, model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-2, 2, 4))
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
        MIXED,
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_loss_and_gradients_are_those_of_each_document_alone(
    pattern: Pattern | tuple[Pattern, ...],
) -> None:
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


@pytest.mark.parametrize(
    "pattern", [Dense(), Dilated((8, 32), (1, 4)), BlockSparse(4, stride=2), MIXED]
)
@torch.no_grad()
def test_a_document_moves_nothing_in_another_bit_for_bit(
    pattern: Pattern | tuple[Pattern, ...],
) -> None:
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
        pytest.param("dense", 4, ["layout.sequence=2", "layout.tensor=2"], marks=slow("parity")),
        ("dense with one key head", 3, ["layout.sequence=3", "data.context=63"]),
        ("block sparse", 2, ["layout.sequence=2"]),
        ("dilated block sparse", 4, ["layout.sequence=4", "model.heads=2"]),
        ("3 window and 1 dilated", 4, ["layout.sequence=4"]),
        pytest.param(
            "3 window and 1 dilated",
            4,
            ["layout.shard=2", "layout.tensor=2"],
            marks=slow("parity"),
        ),
        pytest.param(
            "3 window and 1 dilated",
            2,
            ["layout.zero=3", "train.activation_checkpointing=selective"],
            marks=slow("parity"),
        ),
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


@slow("parity")
def test_other_engines_take_the_same_steps(folder: Path) -> None:
    options = [*isolated(folder), "train.micro_batch=2"]
    found = run_in_fresh_processes(steps_of_engines, 2, options)
    for of_engine in zip(*found, strict=True):
        assert_same_steps(of_engine, single_process_steps(*isolated(folder)))
