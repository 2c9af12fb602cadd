"""Export to transformers and import from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from longspan.checkpoint import load
from longspan.cli import main
from longspan.errors import UserError
from longspan.export import huggingface
from longspan.parallel.world import World
from longspan.trained import load_trained
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import run_of

DENSE = [
    "attention.kind=dense",
    "attention.segment_lengths=[]",
    "attention.dilation_rates=[]",
    "model.kv_heads=2",
    "train.steps=1",
    "train.global_batch=2",
]
Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run folder by its overrides, trained once."""

    @cache
    def trained(*overrides: str) -> Path:
        run_dir = tmp_path_factory.mktemp("run") / "run"
        train(run_of(1, *DENSE, *overrides), run_dir)
        return run_dir

    return trained


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    ("shard_bytes", "linear"), [(1 << 30, "dense"), (20_000, "dense"), (1 << 30, "sketched")]
)
def test_transformers_gives_the_same_logits(
    trained: Trained,
    tmp_path: Path,
    tied: str,
    shard_bytes: int,
    linear: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", shard_bytes)
    run_dir = trained(f"model.tie_embeddings={tied}", f"model.linear={linear}")
    assert main(["export", str(run_dir), str(tmp_path / "llama")]) == 0
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    _, ours, _ = load_trained(run_dir)
    tokens = torch.randint(256, (2, 40))
    with torch.no_grad():
        found, expected = theirs(tokens).logits[:, -1], ours.next_logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (shard_bytes > 20_000) == (tmp_path / "llama" / "model.safetensors").exists()


def start_from(rank: int, world: int, weights: str, run_dir: str, layout: list[str]) -> None:
    options = [f"train.init_from={weights}", "train.steps=1", "train.lr=1e-30", *layout]
    train(run_of(world, *DENSE, *options), Path(run_dir), world=World(rank, world, rank))


@pytest.mark.parametrize(
    ("world", "layout"), [(1, []), (2, ["layout.zero=3"]), (2, ["layout.tensor=2"])]
)
def test_a_run_starts_from_weights_that_transformers_saved(
    ranks: Ranks, trained: Trained, tmp_path: Path, world: int, layout: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run_dir, llama, started = trained(), tmp_path / "llama", tmp_path / "started"
    huggingface.export(run_dir, tmp_path / "ours")
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(llama)
    ranks.run(start_from, world, str(llama), str(started), layout)
    before = load(run_dir / "checkpoints" / "step-00000001", "model")
    after = load(started / "checkpoints" / "step-00000001", "model")
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-7)


def test_another_attention_pattern_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_of(1, "train.steps=1", "train.global_batch=1"), tmp_path / "run")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    message = "the run has dilated attention, but transformers will compute dense attention"
    assert message in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["longspan"]["attention"]["segment_lengths"] == [16, 64]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--step", "9"]) == 2


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("file", [], "cannot initialise from"),
        ("shape", ["model.hidden=64"], r"expected model\.\S+ of shape .*, got"),
        ("index", [], "it refers to files outside the folder"),
        ("tensor", ["model.layers=3"], "cannot initialise from"),
    ],
)
def test_weights_that_do_not_match_are_refused(
    trained: Trained, tmp_path: Path, kind: str, options: list[str], message: str
) -> None:
    llama = tmp_path / "llama"
    huggingface.export(trained(), llama)
    if kind == "file":
        (llama / "model.safetensors").unlink()
    if kind == "index":
        index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
        (llama / huggingface.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        train(run_of(1, *DENSE, *options, f"train.init_from={llama}"), tmp_path / "next")
