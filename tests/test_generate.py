"""`longspan generate`: Hugging Face folders, and a model that two processes split."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.data.tokenizer import load_tokenizer
from longspan.device import DTYPES
from longspan.errors import UserError
from longspan.generate import ONE, open_generator
from longspan.models import build_decoder
from longspan.models.decoding import round_weights
from longspan.models.generation import Completion
from longspan.parallel.world import World
from longspan.runfile import load_run
from tests.export.families import save_family
from tests.export.test_round_trip import save_tokenizer
from tests.harness import Ranks

PROMPTS = ["w19 w69", "w32 w82 w197"]  # continued by words that the tokenizer knows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "hf"
    save_family("llama", path)
    save_tokenizer(path)
    return path


def generated(folder: Path, count: int, world: World = ONE, **options: Any) -> list[Completion]:
    with open_generator(folder, world=world) as generator:
        return generator.complete_batch(PROMPTS, generator.sampling(count, **options))


def changed(folder: Path, target: Path, **settings: object) -> Path:
    """A copy of the folder with other settings in its generation_config.json."""
    shutil.copytree(folder, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return target


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": [2]},
        {"repetition_penalty": 1.7},
    ],
    ids=str,
)
def test_a_huggingface_folder_generates_what_transformers_does(
    folder: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    if "eos_token_id" in settings:  # one that comes up in the middle
        (text, *_) = generated(folder, 12, temperature=0)
        settings = {"eos_token_id": [2, tokenizer.encode(text.text)[6]]}
    path = changed(folder, tmp_path / "hf", **settings)
    model = AutoModelForCausalLM.from_pretrained(path)
    ends = settings.get("eos_token_id", [2])
    for found in generated(path, 11, temperature=0):
        prompt = tokenizer.encode(found.prompt)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=11, do_sample=False)
        new = expected[0, len(prompt) :].tolist()
        is_stopped = new[-1] in ends
        assert tokenizer.encode(found.text) == new[: len(new) - is_stopped]
        assert (found.tokens, found.finish_reason) == (
            len(new) - is_stopped,
            "stop" if is_stopped else "length",
        )


def test_generation_settings_of_a_folder_are_the_defaults(folder: Path, tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "stop_strings": "w3"}
    with open_generator(changed(folder, tmp_path / "hf", **settings)) as generator:
        found = generator.sampling(5, top_k=7, stop=["w4"])
        assert (found.temperature, found.top_k, found.top_p) == (0.6, 7, 0.95)
        assert found.stop == ("w4", "w3")
    with open_generator(changed(folder, tmp_path / "other", temperature=0.6)) as generator:
        assert generator.sampling(5).temperature == 0.8  # without do_sample it has no effect


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams = 4 is not supported: remove it, or set it to 1"),
        ({"suppress_tokens": [1]}, r"suppress_tokens = \[1\] is not supported"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be an id or a list of them"),
        ({"temperature": "hot"}, "temperature must be a number of at least 0, got 'hot'"),
        ({"stop_strings": [""]}, "stop_strings must be a text or a list of them"),
    ],
)
def test_generation_settings_that_are_not_honoured_are_refused_by_name(
    folder: Path, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(folder, tmp_path / "hf", **settings)
    with pytest.raises(UserError, match=message), open_generator(path):
        pass


def generate_on_rank(rank: int, world: int, folder: str) -> list[Completion]:
    return generated(Path(folder), 20, World(rank, world, rank), seed=3)


def test_two_processes_that_split_a_model_generate_what_one_does(
    folder: Path, ranks: Ranks
) -> None:
    expected = generate_on_rank(0, 1, str(folder))
    assert ranks.run(generate_on_rank, 2, str(folder)) == [expected, expected]


@pytest.mark.parametrize("options", [[], ["model.tie_embeddings=false"]])
@torch.no_grad()
def test_rounded_weights_give_the_logits_of_autocast(options: list[str]) -> None:
    run = load_run(None, ["model.hidden=32", "data.context=64", *options])
    model = build_decoder(run, torch.device("cpu"))
    tokens = torch.randint(256, (1, 20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(tokens)
        round_weights(model, DTYPES["bf16"])
        assert torch.equal(model(tokens), expected)
    assert model.blocks[0].attention.query.weight.dtype == torch.bfloat16
    assert model.embedding.weight.dtype == torch.float32
