"""What is exported is what transformers reads, and what it reads a run can begin with."""

from __future__ import annotations

import json
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
    "train.steps=3",
    "train.global_batch=2",
]


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    ("file_bytes", "linear"), [(1 << 30, "dense"), (20_000, "dense"), (1 << 30, "sketched")]
)
def test_transformers_gives_the_same_logits(
    tmp_path: Path, tied: str, file_bytes: int, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface, "FILE_BYTES", file_bytes)
    train(
        run_of(1, *DENSE, f"model.tie_embeddings={tied}", f"model.linear={linear}"),
        tmp_path / "run",
    )
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "llama")]) == 0
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    _, ours, _ = load_trained(tmp_path / "run")
    tokens = torch.randint(256, (2, 40))
    with torch.no_grad():
        found, expected = theirs(tokens).logits[:, -1], ours.next_logits(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (file_bytes > 20_000) == (tmp_path / "llama" / "model.safetensors").exists()


def begin(rank: int, world: int, folder: str, layout: list[str]) -> float | None:
    initial = f"train.init_from={folder}/llama"
    run = run_of(world, *DENSE, *layout, initial, "train.steps=1", "train.lr=1e-30")
    train(run, Path(folder, "next"), world=World(rank, world, rank))
    return None


@pytest.mark.parametrize(
    ("world", "layout"), [(1, []), (2, ["layout.zero=3"]), (2, ["layout.tensor=2"])]
)
def test_a_run_begins_with_what_transformers_wrote(
    ranks: Ranks, tmp_path: Path, world: int, layout: list[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    train(run_of(1, *DENSE), tmp_path / "run")
    huggingface.export(tmp_path / "run", tmp_path / "ours")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "llama")
    ranks.run(begin, world, str(tmp_path), layout)
    before = load(tmp_path / "run" / "checkpoints" / "step-00000003", "model")
    after = load(tmp_path / "next" / "checkpoints" / "step-00000001", "model")
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-7)


def test_another_attention_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_of(1, "train.steps=1", "train.global_batch=1"), tmp_path / "run")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "transformers will attend densely, the run is dilated" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["longspan"]["attention"]["segment_lengths"] == [16, 64]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--step", "9"]) == 2


@pytest.mark.parametrize("kind", ["missing", "shape", "outside", "tensor"])
def test_weights_that_do_not_fit_are_told(tmp_path: Path, kind: str) -> None:
    train(run_of(1, *DENSE), tmp_path / "run")
    llama = tmp_path / "llama"
    huggingface.export(tmp_path / "run", llama)
    options = ["model.hidden=64"] if kind == "shape" else []
    options += ["model.layers=3"] if kind == "tensor" else []
    if kind == "missing":
        (llama / "model.safetensors").unlink()
    if kind == "outside":
        index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
        (llama / huggingface.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="cannot"):
        train(run_of(1, *DENSE, *options, f"train.init_from={llama}"), tmp_path / "next")
