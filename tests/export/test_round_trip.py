"""Runs that start from a Hugging Face folder: exported, generated from and compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longspan.cli import main
from longspan.data.build import build
from longspan.errors import UserError
from longspan.export.huggingface import export, weight_reader
from longspan.models.decoder import Decoder
from longspan.sketch_run import convert, open_trained
from longspan.trained import load_trained
from longspan.training import train
from tests.export.families import CONTEXT, FAMILIES, run_from, save_family

SAME = ("model_type", "num_key_value_heads", "attention_bias", "mlp_bias", "hidden_act")
SAME += (
    "sliding_window",
    "layer_types",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rope_parameters",
)
"""Fields of config.json that an export gives back."""


def tokens_of(count: int) -> Tensor:
    return torch.randint(200, (2, count), generator=torch.Generator().manual_seed(0))


def save_tokenizer(folder: Path, vocab: int = 200) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, vocab)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": "{{ messages }}"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def trained_run(tmp_path: Path, *overrides: str) -> Path:
    """Train from tmp_path/hf, on data of its tokenizer, with a step that changes nothing."""
    folder, texts = tmp_path / "hf", [tmp_path / f"{n}.txt" for n in range(4)]
    if not (tmp_path / "data").exists():
        for i, text in enumerate(texts):
            text.write_text(" ".join(f"w{(n * n + i) % 190}" for n in range(300)))
        build(texts, tmp_path / "data", tokenizer=folder / "tokenizer.json", validation=0.3)
    unchanged = ["train.steps=1", "train.lr=1e-30", f"data.source={tmp_path / 'data'}"]
    train(run_from(folder, *unchanged, *overrides), tmp_path / "run")
    return tmp_path / "run"


def assert_same_bytes(folder: Path, out: Path) -> None:
    given, found = (load_file(path / "model.safetensors") for path in (folder, out))
    assert given.keys() == found.keys()
    for name, weight in given.items():
        assert weight.dtype == found[name].dtype
        assert torch.equal(weight.view(torch.uint8), found[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_gives_the_folder_back(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, out = tmp_path / "hf", tmp_path / "out"
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    model = save_family(family, folder, **ids)
    save_tokenizer(folder)
    settings = {**ids, "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert export(trained_run(tmp_path), out).notes == []
    assert_same_bytes(folder, out)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(theirs) is type(model)
    tokens = tokens_of(CONTEXT)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    for name in SAME:
        assert getattr(theirs.config, name, None) == getattr(model.config, name, None), name
    assert theirs.config.eos_token_id == [2, 3]
    assert theirs.generation_config.temperature == 0.6


def test_weights_in_bf16_come_back_in_bf16(tmp_path: Path) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    save_family("qwen3", folder).bfloat16().save_pretrained(folder)
    save_tokenizer(folder)
    run_dir = trained_run(tmp_path)
    assert main(["export", str(run_dir), str(out), "--dtype", "bf16"]) == 0
    assert_same_bytes(folder, out)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("theta", "context 64 instead of at most 16; RoPE theta 48,761 instead of 10,000"),
        ("yarn", "RoPE scaled by yarn × 4 from 16 tokens instead of not scaled"),
    ],
)
def test_an_extended_context_is_said_and_exported(
    how: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    save_family("qwen3", tmp_path / "hf", max_position_embeddings=16)
    save_tokenizer(tmp_path / "hf")
    run_dir = trained_run(tmp_path, f"model.extend_context={how}")
    assert said in capsys.readouterr().err
    export(run_dir, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.max_position_embeddings == CONTEXT
    _, ours, _ = load_trained(run_dir)
    tokens = tokens_of(CONTEXT)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma"])
def test_generation_with_a_cache_is_that_of_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_family(family, tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    run_dir = trained_run(tmp_path)
    _, ours, _ = load_trained(run_dir)
    tokens = tokens_of(12)
    with torch.no_grad():
        expected = model(tokens).logits
        caches = ours.new_caches()
        for end in range(5, 13):
            chunk = tokens[:, :5] if end == 5 else tokens[:, end - 1 : end]
            found = ours.next_logits(chunk, caches)
            torch.testing.assert_close(found, expected[:, end - 1], rtol=0, atol=1e-5)
    capsys.readouterr()
    arguments = ["--prompt", "w5 w7", "--tokens", "6", "--temperature", "0"]
    assert main(["generate", str(run_dir), *arguments]) == 0
    prompt = torch.tensor([[5, 7]])
    theirs = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=2)
    words = [f"w{token}" for token in theirs[0].tolist() if token != 2]
    assert capsys.readouterr().out.split() == words


@pytest.mark.filterwarnings("ignore:SKLinear .* computes")
def test_a_compressed_run_keeps_biases_norms_and_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_family("qwen2", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    run_dir, out = trained_run(tmp_path), tmp_path / "half"
    convert(open_trained(run_dir, ""), out, keep=0.5)
    _, ours, _ = load_trained(out)
    _, before, _ = load_trained(run_dir)
    assert torch.equal(_bias(ours), _bias(before))
    export(out, tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = tokens_of(CONTEXT)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
    assert (tmp_path / "exported" / "tokenizer_config.json").read_bytes() == (
        tmp_path / "hf" / "tokenizer_config.json"
    ).read_bytes()


def _bias(model: Decoder) -> Tensor:
    bias = model.get_parameter("blocks.1.attention.key.bias")
    assert bias.abs().sum() > 0
    return bias


def test_another_tokenizer_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_family("qwen2", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf", vocab=220)
    (tmp_path / "other").mkdir()
    save_tokenizer(tmp_path / "other")
    (tmp_path / "words.txt").write_text("w5 " * 300)
    tokenizer = tmp_path / "other" / "tokenizer.json"
    build([tmp_path / "words.txt"], tmp_path / "data", tokenizer=tokenizer)
    run_dir = trained_run(tmp_path)
    assert "the tokenizer data of the data instead of the folder's" in capsys.readouterr().err
    exported = export(run_dir, tmp_path / "out")
    assert "its tokenizer is that of the data, not that of the folder" in str(exported)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    save_family("qwen3", folder)
    save_tokenizer(folder, vocab=257)
    with pytest.raises(UserError, match=r"tokenizer\.json has 257 tokens, more than .* 256"):
        weight_reader(folder, run_from(folder))
    (tmp_path / "in.txt").write_text("w5 " * 300)
    data = tmp_path / "data"
    build([tmp_path / "in.txt"], data, tokenizer=folder / "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    options = [f"train.init_from={folder}", f"data.source={data}", "data.context=64"]
    assert main(["train", *options, "--run-dir", str(tmp_path / "run")]) == 2
    assert "257" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.toml").exists()


SHARD = "model-00002-of-"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model_type": ({"model_type": "mamba"}, 'model_type = "mamba" is not supported'),
    "rope type": ({"rope_scaling": {"type": "su"}}, 'with rope_type = "su" is not supported'),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config = "),
    "shape": ({"intermediate_size": 64}, "mlp.up_proj.weight: expected shape (64, 32), got (48,"),
    "missing shard": ({}, SHARD),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_ends_with_exit_code_2_and_writes_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, message = REFUSED[case]
    folder, run_dir = tmp_path / "hf", tmp_path / "run"
    save_family("qwen2", folder, shard_size="10KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    if case == "missing shard":
        next(folder.glob(f"{SHARD}*")).unlink()
    options = [f"train.init_from={folder}", "data.context=64", "train.steps=1"]
    assert main(["train", *options, "--run-dir", str(run_dir)]) == 2
    assert message in capsys.readouterr().err
    assert not (run_dir / "run.toml").exists()
