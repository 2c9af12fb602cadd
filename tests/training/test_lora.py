"""LoRA: frozen weights, small checkpoints, the same steps under every layout, merged on export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.checkpoint import Region, load
from longspan.costs import count_adapters, count_parameters, is_adapter
from longspan.errors import UserError
from longspan.export.huggingface import export, weight_reader
from longspan.models import new_decoder, parameter_shapes
from longspan.runfile import load_run
from longspan.trained import load_trained
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import ids, single_process_steps, steps_of
from tests.slow import slow
from tests.steps import assert_same_steps

LORA = ["model.lora.rank=4", "model.lora.alpha=8", "train.lr=0.05"]
SMALL = [
    *("model.hidden=32", "model.heads=2", "model.ffn=48", "model.vocab=256", "data.context=64"),
    *("attention.kind=dense", "train.global_batch=1", "train.warmup_steps=1", "track.prompt="),
    *("train.schedule=constant", "train.lr=0.01", "train.eval_samples=1"),
]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.zero=3"]),
        pytest.param(2, ["layout.tensor=2"], marks=slow("parity")),
        (2, ["layout.pipeline=2", "model.lora.layers=blocks.1.*"]),
        (2, ["layout.replicate=2", "layout.shard=1"]),
        (4, ["layout.tensor=2", "layout.shard=2"]),
        (2, ["layout.sequence=2", "model.lora.layers=blocks.*.attention.*"]),
    ],
    ids=ids,
)
def test_a_layout_takes_the_same_steps(ranks: Ranks, world: int, layout: list[str]) -> None:
    settings = [x for x in layout if not x.startswith("layout.")]
    alone = single_process_steps(*LORA, *settings)
    assert all(is_adapter(name) for name in alone.shards)
    found = ranks.run(steps_of, world, [*layout, *LORA])
    assert_same_steps(found, alone)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_blocks_take_the_same_steps(mode: str) -> None:
    """The input of the first block has no gradient, as the embedding is frozen."""
    found = single_process_steps(*LORA, f"train.activation_checkpointing={mode}")
    assert_same_steps([found], single_process_steps(*LORA))


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def tensors(path: Path) -> dict[str, Tensor]:
    return {f"{g}/{n}": x for g in ("model", "optimizer") for n, x in load(path, g).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a model that was trained for two steps."""
    folder = tmp_path_factory.mktemp("base")
    train(load_run(None, [*SMALL, "train.steps=2"]), folder / "run")
    export(folder / "run", folder / "hf")
    return folder / "hf"


def tuned(base: Path, steps: int) -> Any:
    options = [*SMALL, *LORA[:2], f"train.init_from={base}", f"train.steps={steps}"]
    return load_run(None, options)


def test_a_run_resumes_to_the_same_bytes_from_small_checkpoints(base: Path, tmp_path: Path) -> None:
    run = tuned(base, 4)
    train(run, tmp_path / "whole")
    train(tuned(base, 2), tmp_path / "resumed")
    train(run, tmp_path / "resumed", resume=True)
    expected = tensors(checkpoint(tmp_path / "whole", 4))
    found = tensors(checkpoint(tmp_path / "resumed", 4))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    weights = [x for name, x in expected.items() if name.startswith("model/")]
    assert sum(x.numel() for x in weights) == count_adapters(run.model)
    assert 0 < count_adapters(run.model) < count_parameters(run.model) / 3
    assert all(".lora_" in name for name in expected)


def test_updates_are_not_added_to_other_weights(base: Path, tmp_path: Path) -> None:
    """Neither by export nor by what loads a run, if a folder has other weights than it had."""
    moved, run_dir = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, moved)
    train(tuned(moved, 1), run_dir)
    path = moved / "model.safetensors"
    content = {name: x + 1 for name, x in load_file(path).items()}
    save_file(content, path, {"format": "pt"})
    for use in (lambda: export(run_dir, tmp_path / "hf"), lambda: load_trained(run_dir)):
        with pytest.raises(UserError, match=r"trained on other weights than train\.init_from"):
            use()
    shutil.rmtree(moved)
    with pytest.raises(UserError, match="base has no weights, which LoRA adds its updates to"):
        export(run_dir, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_weights_of_another_seed_are_refused(tmp_path: Path) -> None:
    """Without a folder the frozen weights follow from the seed."""
    train(load_run(None, [*SMALL, *LORA[:2], "train.steps=1"]), tmp_path / "run")
    with pytest.raises(UserError, match=r"trained on other weights than train\.seed = 1"):
        load_trained(tmp_path / "run", overrides=["train.seed=1"])
    run, model, _ = load_trained(tmp_path / "run")
    longer, same, _ = load_trained(tmp_path / "run", overrides=["data.context=4096"])
    assert longer.data.context == 4096
    tokens = torch.arange(48).reshape(1, 48)
    with torch.no_grad():  # RoPE's theta is that of training, also in a longer context
        assert torch.equal(model(tokens), same(tokens))
    other = load_run(None, [*SMALL, "data.context=4096"])
    assert other.model.rope_theta_for(4096) != run.model.rope_theta_for(64)


def test_the_merged_export_has_the_logits_of_the_run(base: Path, tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "hf"
    train(tuned(base, 3), run_dir)
    done = export(run_dir, out)
    assert "merged" in str(done)
    run, model, _ = load_trained(run_dir)
    plain = load_run(None, [*SMALL, f"train.init_from={out}"])
    read, merged = weight_reader(out, plain), new_decoder(plain)
    merged.to_empty(device="cpu")
    before = weight_reader(base, plain)
    changed = set()
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            region = Region.full(tuple(parameter.shape))
            parameter.copy_(read(name, region))
            if not torch.equal(parameter, before(name, region)):
                changed.add(name)
    linear = {n for n in parameter_shapes(merged) if "norm" not in n and n.startswith("blocks.")}
    assert changed == linear  # all others are bit-identical
    tokens = torch.arange(48).reshape(1, 48) % 250
    with torch.no_grad():
        difference = (model(tokens) - merged(tokens)).abs().max()
    assert difference < 1e-6 * merged(tokens).abs().max() + 1e-6
    assert run.model.lora.rank == 4


def test_other_base_weights_and_other_ranks_are_refused_on_resume(
    base: Path, tmp_path: Path
) -> None:
    train(tuned(base, 1), tmp_path / "run")
    other = load_run(None, [*SMALL, "train.steps=1", "train.seed=7"])
    train(other, tmp_path / "other")
    export(tmp_path / "other", tmp_path / "hf")
    with pytest.raises(UserError, match=r"train\.init_from was weights"):
        train(tuned(tmp_path / "hf", 2), tmp_path / "run", resume=True)
    run = tuned(base, 2)
    wider = run.model.model_copy(update={"lora": run.model.lora.model_copy(update={"rank": 8})})
    with pytest.raises(UserError, match=r"model\.lora was"):
        train(run.model_copy(update={"model": wider}), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["engine.name=deepspeed"], "model.lora.rank"),
        (["engine.name=accelerate"], "model.lora.rank"),
        (["model.linear=low_rank"], "model.lora.rank"),
        (["train.optimizer=muon"], "train.optimizer"),
        (["model.lora.layers=blocks.*.mpl.*"], "model.lora.layers"),
        (["model.lora.rank=0"], "model.lora"),
        (["layout.pipeline=2", "layout.schedule=zbv"], "layout.schedule"),
    ],
)
def test_what_it_does_not_support_is_refused(options: list[str], key: str) -> None:
    with pytest.raises(UserError, match=rf"(?m)^  {key} "):
        load_run(None, [*LORA, *options], world=2)
