"""`create_model`: whole, or laid out over ranks with the gradients of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan import UserError, create_model
from longspan.parallel.pipeline import PipelinedDecoder
from tests.harness import Ranks

ITEMS = ["model.hidden=32", "model.layers=2", "model.heads=4", "data.context=64"]
ITEMS += ["attention.segment_lengths=[16,64]", "attention.dilation_rates=[1,4]"]
ITEMS += ["train.activation_checkpointing=full"]
BATCH = 4


def samples() -> tuple[Tensor, Tensor]:
    """Tokens and targets (BATCH, 64), the same on every rank."""
    text = torch.randint(256, (BATCH, 65), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def laid_out_step(rank: int, world: int, layout: dict[str, int]) -> dict[str, Tensor]:
    """Gradients of the mean loss, and the loss, by the names of one process."""
    model = create_model(*ITEMS, "train.global_batch=4", layout=layout)
    tokens, targets = samples()
    data_ranks = world // layout.get("tensor", 1) // layout.get("sequence", 1)
    data_ranks //= layout.get("pipeline", 1)
    index = rank // layout.get("tensor", 1) // layout.get("sequence", 1) % data_ranks
    tokens, targets = tokens.chunk(data_ranks)[index], targets.chunk(data_ranks)[index]
    if (positions := getattr(model, "positions", None)) is not None:
        tokens, targets = tokens[:, positions], targets[:, positions]
    if isinstance(model, PipelinedDecoder):
        model.backward(tokens, targets, torch.tensor(1 / targets.numel()))
        loss = model(tokens, targets) / targets.numel()
    else:
        loss = model(tokens, targets) / targets.numel()
        loss.backward()
        loss = loss.detach()
    dist.all_reduce(loss)
    found = {"loss": loss / world}
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    for name, parameter in whole.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        name = name.replace("_checkpoint_wrapped_module.", "")
        if "pipeline" in layout:  # each of two stages has one of two blocks
            name = name.removeprefix("stages.0.").replace("blocks.0", f"blocks.{rank}")
            name = name.replace("head.", "embedding.")  # tied
        found[name] = full
    return found


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {}),
        (2, {"replicate": 2, "shard": 1}),
        (2, {"tensor": 2}),
        (2, {"sequence": 2}),
        (2, {"pipeline": 2, "schedule": "gpipe"}),
        (4, {"tensor": 2, "sequence": 2}),
        (4, {"tensor": 2, "zero": 1}),
    ],
    ids=str,
)
def test_a_laid_out_model_has_the_gradients_of_one_process(
    ranks: Ranks, world: int, layout: dict[str, int]
) -> None:
    model = create_model(*ITEMS, "train.activation_checkpointing=none")
    tokens, targets = samples()
    loss = model(tokens, targets) / targets.numel()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in ranks.run(laid_out_step, world, layout):
        torch.testing.assert_close(found.pop("loss"), loss.detach())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_one_process_needs_no_process_group() -> None:
    model = create_model(*ITEMS, device="cpu", layout={})
    tokens, targets = samples()
    whole = create_model(*ITEMS)
    torch.testing.assert_close(model(tokens, targets), whole(tokens, targets))


def wrong_layouts(rank: int, world: int) -> list[str]:
    errors = []
    for items, layout in (
        ([], {"tensor": 3}),
        (["model.heads=3", "model.hidden=48"], {"tensor": 2}),
        (["engine.name=deepspeed"], {}),
        ([], {"tensr": 2}),
    ):
        with pytest.raises(UserError) as error:
            create_model(*ITEMS, *items, layout=layout)
        errors.append(str(error.value))
    return errors


def test_a_layout_that_does_not_fit_is_refused(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = ranks.run(wrong_layouts, 2)[0]
    words = "there are 2", "layout.tensor", "engine.name=deepspeed has no effect on a model"
    for error, word in zip(errors, [*words, "did you mean layout.tensor?"], strict=True):
        assert word in error, error
    with pytest.raises(UserError, match=r"pass layout=\{'tensor': 2\}"):
        create_model("layout.tensor=2")
    with pytest.raises(UserError, match=r"train.precision=bf16 has no effect without .*layout={}"):
        create_model("train.precision=bf16")
    with pytest.raises(UserError, match=r"train.lr=0.1 has no effect on a model: leave it out"):
        create_model("train.lr=0.1", layout={})
    with pytest.raises(UserError, match=r"did you mean train\.seed"):
        create_model("train.sed=1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"call torch.distributed.init_process_group\(\) first"):
        create_model(layout={})


def test_a_run_file_with_its_layout(tmp_path: Path) -> None:
    """A batch that fits other ranks than these is no concern of the model."""
    file = tmp_path / "run.toml"
    file.write_text("[layout]\nzero = 2\n[train]\nglobal_batch = 3\nmicro_batch = 3\n")
    assert create_model(file, "data.context=64", device="cpu", layout={}) is not None
    for text, word in (
        ('[engine]\nname = "deepspeed"', "engine.name is 'deepspeed'"),
        ("[train]\noffload_activations = true", "offload_activations = true"),
    ):
        file.write_text(text)
        assert create_model(file) is not None  # the engine and the loop are yours
        with pytest.raises(UserError, match=word):
            create_model(file, layout={})


def test_create_model_takes_overrides_as_a_run_does() -> None:
    model = create_model("model.hidden=32", "model.layers=1", "model.heads=2")
    assert model.embedding.weight.shape == (256, 32)
    with pytest.raises(ValueError, match="expected one run file"):
        create_model("a.toml", "b.toml")


def test_the_blocks_are_checkpointed_as_the_run_says() -> None:
    models = [create_model(*ITEMS, f"train.activation_checkpointing={x}") for x in ("none", "full")]
    saved = []
    for model in models:
        sizes: list[int] = []

        def save(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            model(*samples())
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 4
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


def test_create_model_does_not_pretend_to_load_weights(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 256}
    config = {"model_type": "llama", **shape, "intermediate_size": 128, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["model.layers=1", "model.hidden=32", "model.heads=2", f"train.init_from={tmp_path}"]
    with pytest.raises(UserError, match="create_model initialises a model from"):
        create_model(*options)
