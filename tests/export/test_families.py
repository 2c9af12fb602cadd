"""Models of each family that transformers saves: the same logits and gradients, and back again."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.checkpoint import Region
from longspan.data import Batch
from longspan.export import huggingface
from longspan.export.config_json import hf_name
from longspan.parallel.dtensor import local_offset, reduced_grad
from longspan.parallel.parameters import named_parameters, pipeline_copy
from tests.export.families import (
    BATCH,
    CONTEXT,
    FAMILIES,
    loss_and_gradients,
    run_from,
    save_family,
)
from tests.harness import Ranks
from tests.steps import open_state

Gradients = dict[str, tuple[tuple[int, ...], Tensor]]


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(256, (2, BATCH, CONTEXT), generator=generator).unbind()
    return tokens, targets


def compute(rank: int, world: int, folder: str, overrides: list[str]) -> tuple[Any, Gradients]:
    """A rank's logits, the positions of its tokens, how much it read, and its gradients' shards."""
    run = run_from(Path(folder), *overrides, world=world)
    with open_state(run, rank, world) as (state, _):
        engine, mesh = state.engine, state.mesh
        read, elements = huggingface.weight_reader(Path(folder), run), 0

        def count(name: str, region: Region) -> Tensor:
            nonlocal elements
            values = read(name, region)
            elements += values.numel()
            return values

        engine.load_weights(count)
        tokens, targets = samples()
        positions = engine.model.positions
        with torch.no_grad():
            if positions is None:
                positions = torch.tensor([CONTEXT - 1])
                model = engine.inference_model
                logits = model.next_logits(tokens, model.new_caches())[:, None]
            else:
                logits = engine.model(tokens[:, positions])
        rows = list(mesh.local_samples(list(range(BATCH))))
        scale = torch.tensor(mesh.gradient_ranks / targets.numel())
        engine.backward(Batch(tokens[rows], targets[rows]), scale)
        copy = pipeline_copy(engine.model)
        gradients = {}
        for name, parameter in named_parameters(engine.model):
            gradient = reduced_grad(parameter)
            if parameter is not copy and gradient is not None:
                gradients[name] = (local_offset(parameter), gradient.clone())
        return (logits, positions, elements), gradients


def compare(model: Any, ranks: list[tuple[Any, Gradients]]) -> None:
    """Compare logits of all ranks with those of transformers in float64, and gradients."""
    tokens, targets = samples()
    with torch.no_grad():
        every = deepcopy(model).double()(tokens).logits
    for (logits, positions, _), _ in ranks:
        expected = every[:, positions]
        # Of each token: which elements are rounded most depends on the processor.
        difference = (logits - expected).norm(dim=-1)
        assert (difference <= 5e-6 * expected.norm(dim=-1)).all()
    _, theirs = loss_and_gradients(model, tokens, targets)
    found: dict[str, Tensor] = {}
    for _, gradients in ranks:
        for name, (start, values) in gradients.items():
            key = hf_name(name)
            full = found.setdefault(key, torch.full_like(theirs[key], torch.nan))
            index = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            full[index] = values
    assert found.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path)
    compare(model, [compute(0, 1, str(tmp_path), [])])


LAYOUTS = {
    "sequence": ["layout.sequence=2"],
    "tensor": ["layout.tensor=2"],
    "megatron": ["layout.tensor=2", "layout.megatron_sequence_parallel=true"],
    "pipeline": ["layout.pipeline=2"],
    "zero3": ["layout.shard=2", "layout.zero=3"],
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *[(family, layout) for family in ("qwen2", "qwen3") for layout in LAYOUTS],
        ("llama-biases", "tensor"),
        ("llama-biases", "megatron"),
        ("mistral-window", "sequence"),
        ("qwen3-mixed", "sequence"),
        ("qwen3-mixed", "pipeline"),
        ("gemma", "megatron"),
        ("gemma", "pipeline"),
    ],
)
def test_layouts_compute_the_same(ranks: Ranks, family: str, layout: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path, shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists()
    found = ranks.run(compute, 2, str(tmp_path), LAYOUTS[layout])
    compare(model, found)
    # Each rank reads its own shards; only small tensors, and a pipeline's tied embedding, are on
    # both.
    total = sum(p.numel() for p in model.parameters())
    twice = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    if layout == "pipeline" and model.config.tie_word_embeddings:
        twice = {"embedding": model.model.embed_tokens.weight}
    allowed = 0 if layout in ("zero3", "sequence") else sum(p.numel() for p in twice.values())
    assert total <= sum(elements for (_, _, elements), _ in found) <= total + allowed


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 1e4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {**YARN, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    "yarn-attention": {**YARN, "attention_factor": 1.5, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_slow": 0.5},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_scaled_as_transformers_does(rope: str, tmp_path: Path) -> None:
    positions = 32 if rope == "dynamic" else CONTEXT
    shape = {"max_position_embeddings": positions, "hidden_size": 64, "initializer_range": 0.1}
    model = save_family("llama", tmp_path, rope_parameters=ROPES[rope], **shape)
    ours = [compute(0, 1, str(tmp_path), [])]
    compare(model, ours)
    unscaled = save_family("llama", tmp_path / "unscaled", **shape)
    with pytest.raises(AssertionError):  # the comparison would see it
        compare(unscaled, ours)


def test_dynamic_rope_under_sequence_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    """Its base follows the length of the sequence, of which a rank has a part."""
    fields = {"max_position_embeddings": 32, "rope_parameters": ROPES["dynamic"]}
    model = save_family("llama", tmp_path, **fields)
    compare(model, ranks.run(compute, 2, str(tmp_path), LAYOUTS["sequence"]))
