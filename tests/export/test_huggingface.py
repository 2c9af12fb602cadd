"""Export to transformers and import from it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from longspan.checkpoint import load
from longspan.cli import main
from longspan.errors import UserError
from longspan.export import huggingface
from longspan.hf_config import KEYS, read_folder_config
from longspan.parallel.world import World
from longspan.runfile import dump_run, load_run
from longspan.trained import load_trained
from longspan.training import train
from longspan.wording import toml_value
from tests.harness import Ranks
from tests.parallel.test_apply import run_of
from tests.steps import open_state

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
    message = "for its dilated attention, import longspan.hf before transformers loads it"
    assert message in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["longspan"]["attention"]["segment_lengths"] == [16, 64]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--step", "9"]) == 2


SHAPE = ["model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48"]
SHAPE += ["model.tie_embeddings=false"]


def save_llama(folder: Path, **fields: Any) -> Any:
    """A random Llama of SHAPE that transformers saves in `folder`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **fields,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json; a field of ... is removed."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def losses(llama: Any, folder: Path, *options: str) -> tuple[float, float]:
    """The mean loss of transformers, and that of a run that starts from `folder`."""
    run = run_of(1, *DENSE, *SHAPE, f"train.init_from={folder}", *options)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(256, (2, 2, 64), generator=generator).unbind()
    with torch.no_grad(), open_state(run) as (state, _):
        state.engine.load_weights(huggingface.weight_reader(folder, run))
        ours = state.engine.module(tokens, targets) / targets.numel()
        theirs = cross_entropy(llama(tokens).logits.flatten(0, 1), targets.flatten())
    return float(theirs), float(ours)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("theta", "eps"), [(500_000.0, 1e-6), (10_000.0, 0.1)])
def test_the_loss_of_an_imported_llama_is_that_of_transformers(
    tmp_path: Path, version: int, theta: float, eps: float
) -> None:
    rope = {"rope_theta": theta, "rope_type": "default"}
    llama = save_llama(tmp_path, rope_parameters=rope, rms_norm_eps=eps)
    if version == 4:
        edit_config(tmp_path, rope_theta=theta, rope_parameters=..., torch_dtype="float32")
        edit_config(tmp_path, dtype=..., rope_scaling=None)
    theirs, ours = losses(llama, tmp_path)
    assert ours == pytest.approx(theirs, abs=1e-5)
    # Both settings matter at this precision, and the run file decides when it sets them.
    for key in ("rope_theta=20000", "rms_norm_eps=0.02"):
        assert abs(losses(llama, tmp_path, f"model.{key}")[1] - theirs) > 1e-3


def test_a_resumed_run_does_not_need_the_folder_of_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, run_dir = tmp_path / "llama", tmp_path / "run"
    save_llama(llama, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rms_norm_eps=0.1)
    edit_config(llama, max_position_embeddings=32)
    options = [*DENSE, *SHAPE, f"train.init_from={llama}", "model.rope_theta=2e6"]
    run = run_of(1, *options)
    assert (run.model.rope_theta, run.model.rms_norm_eps) == (2e6, 0.1)
    train(run, run_dir)
    said = "; context 64 instead of at most 32; RoPE theta 2,000,000 instead of 500,000\n"
    assert f"initialised from {llama}{said}" in capsys.readouterr().err.replace("  ", " ")
    shutil.rmtree(llama)
    saved = load_run(run_dir / "run.toml", ["train.steps=2"])
    assert saved.model == run.model
    assert train(saved, run_dir, resume=True).step == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "opt"}, 'model_type = "opt" is not supported, only "llama", "mistral"'),
        ({"model_type": ["llama"]}, 'model_type = ["llama"] is not supported, only "llama"'),
        (
            {"model_type": "qwen2", "attention_bias": True},
            'attention_bias = true is not supported with model_type = "qwen2", only false',
        ),
        (
            {"model_type": "mistral", "mlp_bias": 1},
            'mlp_bias = 1 is not supported with model_type = "mistral", only false',
        ),
        ({"mlp_bias": 1}, "mlp_bias: Input should be a valid boolean, got 1"),
        ({"hidden_act": "gelu_new"}, 'hidden_act = "gelu_new" is not supported, only "silu" or'),
        ({"hidden_act": ["silu"]}, 'hidden_act = ["silu"] is not supported, only "silu" or'),
        ({"head_dim": 7}, "must be positive and even for RoPE, got 7"),
        ({"hidden_size": 10**400}, "hidden_size: Input should be less than or equal to"),
        (
            {"sliding_window": 4096},
            'sliding_window = 4096 is not supported with model_type = "llama", only null',
        ),
        (
            {"model_type": "mistral", "sliding_window": 32}
            | {"longspan": {"attention": {"kind": "window", "window": 16}}},
            "sliding_window = 32 and longspan disagree: keep one",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 32}
            | {"max_window_layers": 1, "longspan": {"attention": {"kind": "window", "window": 32}}},
            "sliding_window = 32 and longspan disagree: keep one",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            '"sliding_attention"] is not supported, only "full_attention"',
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (
            {"model_type": "ministral", "layer_types": ["chunked_attention", "full_attention"]},
            'is not supported, only "full_attention" or "sliding_attention"',
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": "no"},
            'use_sliding_window: expected true or false, got "no"',
        ),
        ({"layer_types": ["sliding_attention"] * 2}, 'not supported, only "full_attention"'),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported, only 1"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported, only 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1"),
        ({"logits_scaling": 8}, "logits_scaling = 8 is not supported, only 1"),
        (
            {"quantization_config": {"bits": 4}},
            'quantization_config = {"bits": 4} is not supported',
        ),
        (
            {"use_rope": False},
            "use_rope = false is an unknown field: remove it from config.json if",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
            'rope_scaling with rope_type = "longrope" is not supported, only "default", "linear"',
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters and rope_scaling disagree: keep one",
        ),
        (
            {"rope_parameters": {"type": "linear"}},
            'rope_parameters.factor is missing: rope_type = "linear" needs it',
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "beta_fast": 3}},
            "rope_parameters.beta_fast = 3 is not supported: use another model",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 0.5}},
            "rope.factor: Input should be greater than or equal to 1, got 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention = ",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5 is not supported",
        ),
        (
            {"longspan": {"attention": {"kind": "dense"}, "x": 1}},
            'longspan must be {"attention": {"kind": …}} with keys of [attention] in a run file',
        ),
        ({"longspan": {"attention": {"kind": 3}}}, "longspan.attention.kind: Input should be"),
        (
            {"longspan": {"attention": {"kind": "dense", "stride": 2}}},
            'longspan.attention.stride has no effect with attention.kind = "dense": remove it',
        ),
        ({"rope_theta": 5.0}, "rope_theta has several values: 5.0, 10000.0; keep one"),
        ({"rope_parameters": 7}, "rope_parameters: expected a table, got 7"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps: Input should be a valid number, got "small"'),
        ({"hidden_size": ...}, "hidden_size: Field required"),
        ({"a\x1b[31m": 1}, r'"a\u001b[31m" = 1 is an unknown field'),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_this_decoder_does_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    save_llama(tmp_path)
    edit_config(tmp_path, **fields)
    options = [*SHAPE[:-1], "model.kv_heads=2", "train.global_batch=2"]
    with pytest.raises(UserError, match=re.escape(message)):
        load_run(None, [*options, "data.context=64", f"train.init_from={tmp_path}"])


def test_every_field_that_transformers_writes_is_known(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"):
        default = getattr(transformers, f"{name}Config")()
        default.architectures = [f"{name}ForCausalLM"]
        default.save_pretrained(tmp_path)
        edit_config(tmp_path, **default.to_dict())
        edit_config(tmp_path, rope_scaling=None, torch_dtype="bfloat16", use_cache=True)
        written = read_folder_config(tmp_path)
        # What is missing has the value that transformers gives it.
        fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        required = {field: getattr(default, field) for field in (*fields, "num_attention_heads")}
        given = json.dumps({**required, "model_type": default.model_type})
        (tmp_path / "config.json").write_text(given)
        assert read_folder_config(tmp_path).model_keys() == written.model_keys()


@pytest.mark.parametrize("key", ["model.sub_layer_norm", "model.learnable_sinks"])
def test_parameters_that_no_family_has_are_not_exported(tmp_path: Path, key: str) -> None:
    (tmp_path / "run.toml").write_text(dump_run(load_run(None, [f"{key}=true"])))
    with pytest.raises(UserError, match=f'{key} = true cannot be exported: .* the family "llama"'):
        huggingface.export(tmp_path, tmp_path / "out")


def test_all_shapes_that_disagree_are_refused_at_once(tmp_path: Path) -> None:
    save_llama(tmp_path)
    given = [f"train.init_from={tmp_path}", "model.layers=3", "model.sub_layer_norm=true"]
    given += ["model.learnable_sinks=true"]
    given += ["model.ffn=128", "model.tie_embeddings=true", "model.family=qwen3"]
    with pytest.raises(UserError) as raised:
        run_of(1, *DENSE, *given)
    text = str(raised.value)
    assert "3 is not the 2 of train.init_from: set model.layers=2" in text
    assert "128 is not the 48 of train.init_from: set model.ffn=48" in text
    assert "true is not the false of train.init_from: set model.tie_embeddings=false" in text
    assert "its model has no such norms" in text
    assert "its model has no such sinks" in text
    assert '"qwen3" is not the "llama" of train.init_from: set model.family="llama"' in text
    # With everything set in the run file the folder is read when the run starts.
    table = run_of(1, *DENSE).model.model_dump()
    complete = [
        f"model.{key}={toml_value(value)}" for key, value in table.items() if key in KEYS[:-4]
    ]
    complete += ["model.rope_theta=1e4", "model.max_positions=64", "model.rms_norm_eps=1e-6"]
    complete += ["model.rope.type=default"]
    run = run_of(1, *DENSE, *complete, *given, "model.vocab=512")
    with pytest.raises(UserError, match=r"model\.vocab = 512 is not the 256 of train\.init_from"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it does not exist"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[1]", "expected a JSON object, got a list"),
        (b'{"model_type": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'"\xff"', "is not valid JSON"),
        (b" " * (1 << 20) + b"{}", "it has more than 1,048,576 bytes"),
    ],
)
def test_a_broken_config_is_refused_in_words(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        run_of(1, *DENSE, f"train.init_from={tmp_path}")
    if content is None:
        os.mkfifo(tmp_path / "config.json")
        with pytest.raises(UserError, match="it is not a regular file"):
            run_of(1, *DENSE, f"train.init_from={tmp_path}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing"),
        ({"score.weight": torch.ones(2, 32)}, r"score\.weight\" is not a tensor of this model"),
        ({"model.norm.weight": torch.ones(31)}, r"expected shape \(32,\), got \(31,\)"),
        (
            {"model.norm.weight": torch.ones(32, dtype=torch.int8)},
            "expected dtype F64, F32, F16, BF16, got I8",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_tensors_that_are_not_the_model_are_refused(
    tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    save_llama(tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), **change}
    kept = {name: x for name, x in tensors.items() if x is not None}
    save_file(kept, tmp_path / "model.safetensors")
    run = run_of(1, *DENSE, *SHAPE, f"train.init_from={tmp_path}")
    with pytest.raises(UserError, match=message):
        huggingface.weight_reader(tmp_path, run)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    llama = save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight in .* has NaN or infinite values"):
        losses(llama, tmp_path)


def test_tensors_that_repeat_others_are_accepted(tmp_path: Path) -> None:
    llama = save_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    theirs, ours = losses(llama, tmp_path, "model.tie_embeddings=true")
    assert ours == pytest.approx(theirs, abs=1e-5)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight\" is not a tensor of this model"):
        losses(llama, tmp_path, "model.tie_embeddings=true")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"cannot initialise from .*model\.safetensors"),
        ({"weight_map": {"x": "../secret.safetensors"}}, "only safetensors files of this folder"),
        ({"weight_map": {"x": "/etc/x.safetensors"}}, "only safetensors files of this folder"),
        ({"weight_map": {"x": ["a.safetensors"]}}, "only safetensors files of this folder"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "only safetensors files of this folder"),
        ({"weight_map": 3}, "it has no table weight_map"),
    ],
)
def test_weights_that_are_not_there_are_refused(tmp_path: Path, index: Any, message: str) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if index:
        (tmp_path / huggingface.INDEX).write_text(json.dumps(index))
    run = run_of(1, *DENSE, *SHAPE, f"train.init_from={tmp_path}")
    with pytest.raises(UserError, match=message):
        huggingface.weight_reader(tmp_path, run)


def test_an_index_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    run = run_of(1, *DENSE, *SHAPE, f"train.init_from={tmp_path}")
    tensors = load_file(tmp_path / "model.safetensors")
    files = dict.fromkeys(tensors, "model.safetensors")
    norm = "model.norm.weight"
    save_file({norm: tensors[norm] + 1}, tmp_path / "b.safetensors")
    for index, message in (
        ({**files, "x": "model.safetensors"}, 'lists "x", but "model.safetensors" does not hold'),
        ({**files, "x": "b.safetensors"}, "says another does"),
        ({name: file for name, file in files.items() if name != norm} | {"x": "b.safetensors"},
         "another file holds too"),
    ):  # fmt: skip
        (tmp_path / huggingface.INDEX).write_text(json.dumps({"weight_map": index}))
        with pytest.raises(UserError, match=message):
            huggingface.weight_reader(tmp_path, run)
    (tmp_path / huggingface.INDEX).write_text(json.dumps({"weight_map": files}))
    huggingface.weight_reader(tmp_path, run)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", huggingface.INDEX])
def test_links_stay_within_the_folder_or_the_cache(tmp_path: Path, name: str) -> None:
    """The cache of Hugging Face: snapshots hold links to blobs of the same model."""
    snapshot = tmp_path / "models--org--x" / "snapshots" / "1234"
    blobs = snapshot.parents[1] / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_llama(snapshot)
    files = dict.fromkeys(load_file(snapshot / "model.safetensors"), "model.safetensors")
    (snapshot / huggingface.INDEX).write_text(json.dumps({"weight_map": files}))
    file = snapshot / name
    file.rename(blobs / "5678")
    file.symlink_to("../../blobs/5678")
    (tmp_path / "alias").symlink_to(snapshot)
    run = run_of(1, *DENSE, *SHAPE, f"train.init_from={tmp_path / 'alias'}")
    huggingface.weight_reader(tmp_path / "alias", run)
    (blobs / "5678").rename(tmp_path / "elsewhere")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is a link to a file outside"):
        huggingface.weight_reader(snapshot, run)
