"""A folder of Hugging Face decides the model, and RoPE is extended to longer contexts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.attention import Dense, Window, patterns_of
from longspan.cli import main
from longspan.config import Model
from longspan.costs import count_parameters
from longspan.errors import UserError
from longspan.export.side_files import SIDE_FOLDER, copy_side_files
from longspan.hf_config import read_folder_config
from longspan.presets import MODELS
from longspan.runfile import dump_run, load_run

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


def folder_of(tmp_path: Path, **fields: Any) -> str:
    config = {**QWEN3, **fields}
    tmp_path.mkdir(exist_ok=True)
    kept = {name: value for name, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return str(tmp_path)


@pytest.mark.parametrize("key", ["model.from", "train.init_from"])
def test_config_json_decides_the_model(tmp_path: Path, key: str) -> None:
    run = load_run(None, [f"{key}={folder_of(tmp_path / 'hf')}", "data.context=512"])
    model = run.model
    assert (model.family, model.layers, model.hidden, model.head_dim) == ("qwen3", 3, 64, 32)
    assert (model.kv_heads, model.ffn, model.vocab, model.tie_embeddings) == (2, 96, 512, True)
    assert (model.rope_theta, model.rms_norm_eps, model.max_positions) == (1e6, 1e-5, 1024)
    assert run.attention.kind == "dense"
    saved = tmp_path / "run.toml"
    saved.write_text(dump_run(run))
    (tmp_path / "hf" / "config.json").unlink()  # a saved run does not need it
    assert load_run(saved) == run


def test_the_run_file_may_set_another_pattern_and_rope(tmp_path: Path) -> None:
    given = ["attention.kind=dilated", "model.rope_theta=5e5", "data.context=2048"]
    run = load_run(None, [f"model.from={folder_of(tmp_path)}", *given])
    assert (run.attention.kind, run.model.rope_theta) == ("dilated", 5e5)
    assert run.attention.segment_lengths
    with pytest.raises(UserError, match=r"4 is not the 3 of model\.from: set model\.layers=3"):
        load_run(None, [f"model.from={folder_of(tmp_path)}", "model.layers=4"])
    with pytest.raises(UserError, match=r"12 is not the 3 of model\.from: set model\.layers=3"):
        load_run(None, [f"model.from={folder_of(tmp_path)}", "model.preset=125m"])


def test_a_refused_folder_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", f"model.from={folder_of(tmp_path, model_type='mamba')}"]) == 2
    assert 'model_type = "mamba" is not supported, only "llama"' in capsys.readouterr().err


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size", "head_dim", "vocab_size")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_theta": ..., "rope_parameters": {**LINEAR, "rope_theta": 5e5},
             "rope_scaling": LINEAR},
            "rope_theta has several values: 500000.0, 10000.0; keep one",
        ),
        ({"rope_scaling": YARN, "max_position_embeddings": 10**400}, "max_position_embeddings: "),
        ({"rope_scaling": {**LINEAR, "factor": 1e308}}, "rope.factor: Input should be less than"),
        ({"rope_theta": 10**400}, "rope_theta: Input should be a valid number"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers: Input should be less than or equal"),
        *[({name: 2**40}, f"{name}: Input should be less than or equal to") for name in SIZES],
    ],
)  # fmt: skip
def test_a_config_with_values_that_no_model_has_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    """transformers computes two tables of RoPE by the second, which has the theta of the config."""
    with pytest.raises(UserError, match=re.escape(message)):
        load_run(None, [f"model.from={folder_of(tmp_path, **fields)}", "data.context=8192"])


def test_a_folder_that_is_no_path_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "model.from=a\0\x1b[2Jb"]) == 2
    error = capsys.readouterr().err
    assert "1 problem" in error
    assert "its name has a NUL character" in error
    assert "\0" not in error
    assert "\x1b" not in error


def test_theta_is_raised_for_a_longer_context(tmp_path: Path) -> None:
    """The slowest pair rotates over the new context as it did over the old one."""
    folder = folder_of(tmp_path)
    run = load_run(None, [f"model.from={folder}", "data.context=8192"])
    theta = run.model.rope_theta
    assert theta is not None
    assert 8192 * theta ** (-30 / 32) == pytest.approx(1024 * 1e6 ** (-30 / 32))
    assert (run.model.rope.type, run.model.max_positions) == ("default", 8192)
    unchanged = load_run(
        None, [f"model.from={folder}", "data.context=8192", "model.extend_context=none"]
    )
    assert (unchanged.model.rope_theta, unchanged.model.max_positions) == (1e6, 1024)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
        {"type": "linear", "factor": 8.0},
    ],
)
def test_a_scaling_that_reaches_the_context_is_not_extended(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    """As in the folders of Qwen, whose max_position_embeddings are those before YaRN."""
    folder = folder_of(tmp_path, rope_scaling=scaling)
    run = load_run(None, [f"model.from={folder}", "data.context=8192"])
    assert (run.model.rope_theta, run.model.rope.factor) == (1e6, 8.0)
    longer = load_run(None, [f"model.from={folder}", "data.context=16384"])
    assert longer.model.rope_theta == pytest.approx(1e6 * 2 ** (32 / 30))


def test_a_linked_folder_in_a_run_folder_is_left_alone(tmp_path: Path) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    run_dir.mkdir()
    (victim / "config.json").write_text("mine")
    (run_dir / SIDE_FOLDER).symlink_to(victim)
    with pytest.raises(UserError, match="is a link: remove it"):
        copy_side_files(load_run(None, []), run_dir)
    assert (victim / "config.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("scaling", "factor", "original"),
    [
        (None, 8.0, 1024),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 16.0, 512),
    ],
)
def test_yarn_for_a_longer_context(
    tmp_path: Path, scaling: dict[str, Any] | None, factor: float, original: int
) -> None:
    folder = folder_of(tmp_path, rope_scaling=scaling)
    yarn = "model.extend_context=yarn"
    run = load_run(None, [f"model.from={folder}", "data.context=8192", yarn])
    rope = run.model.rope
    assert (rope.type, rope.factor, rope.original_context) == ("yarn", factor, original)
    assert (run.model.rope_theta, run.model.max_positions) == (1e6, 8192)
    folder_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(UserError, match=r'"yarn" is not supported with the rope_type "linear"'):
        load_run(None, [f"model.from={folder}", "data.context=8192", yarn])


def test_a_sliding_window_that_hides_nothing_is_dense(tmp_path: Path) -> None:
    fields = {"model_type": "mistral", "sliding_window": 256}
    folder = folder_of(tmp_path, **fields)
    run = load_run(None, [f"model.from={folder}", "data.context=256"])
    assert (run.model.family, run.attention.kind) == ("mistral", "dense")
    run = load_run(None, [f"model.from={folder}", "data.context=512"])
    assert (run.attention.kind, run.attention.window) == ("window", 256)
    # A missing field has the default of transformers, null means no window.
    folder_of(tmp_path, model_type="mistral")
    run = load_run(None, [f"model.from={folder}", "data.context=8192"])
    assert (run.attention.kind, run.attention.window) == ("window", 4096)
    folder_of(tmp_path, model_type="mistral", sliding_window=None)
    assert load_run(None, [f"model.from={folder}", "data.context=8192"]).attention.kind == "dense"


def test_layers_with_and_without_a_sliding_window_become_patterns(tmp_path: Path) -> None:
    window = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 32}
    folder = folder_of(tmp_path, **window, num_hidden_layers=5, max_window_layers=3)
    options = [f"model.from={folder}", "data.context=64"]
    run = load_run(None, options)
    expected = [Dense()] * 3 + [Window(32)] * 2
    assert patterns_of(run.attention, 5) == tuple(expected)
    types = [*["sliding_attention"] * 2, "full_attention"] * 2
    folder_of(tmp_path, **window, num_hidden_layers=6, layer_types=types)
    run = load_run(None, options)
    assert patterns_of(run.attention, 6) == (Window(32), Window(32), Dense()) * 2
    assert [layer.repeat for layer in run.attention.layers] == [2, 1]
    # The user's own attention, which is said; a context that the window does not hide.
    other = load_run(None, [*options, "attention.kind=dense"])
    config = read_folder_config(tmp_path)
    assert config.changes(run) == []
    assert config.changes(other) == ["dense attention instead of window and dense"]
    assert load_run(None, [options[0], "data.context=32"]).attention.kinds == ("dense",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["model.family=qwen2", "model.mlp_bias=true"],
            'not supported with model.family = "qwen2"',
        ),
        (["model.rope.factor=2"], 'has no effect with model.rope.type = "default": remove it'),
        (["model.rope.type=yarn"], 'is required by model.rope.type = "yarn": set the context'),
        (
            ["model.rope.type=llama3", "model.rope.low_freq_factor=4"],
            "4 must be greater than model.rope.low_freq_factor = 4: change one",
        ),
        (["model.head_dim=9"], "must be positive and even for RoPE, got 9: use 10"),
        (["model.head_dim=0"], "must be positive and even for RoPE, got 0: use 2"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_run(None, given)
    assert message in str(raised.value)


PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_parameters_of_the_published_models(preset: str) -> None:
    import torch

    from longspan.export.config_json import hf_config, hf_name
    from longspan.models import new_decoder, parameter_shapes

    transformers = pytest.importorskip("transformers")
    run = load_run(None, [f"model.preset={preset}", "attention.kind=dense", "data.context=8192"])
    assert count_parameters(run.model) == PUBLISHED[preset]
    on_gpu = load_run(None, [f"model.preset={preset}"], builtin="cuda")  # has a vocabulary
    assert count_parameters(on_gpu.model) == PUBLISHED[preset]
    ours = {hf_name(n): shape for n, shape in parameter_shapes(new_decoder(run)).items()}
    config = transformers.AutoConfig.for_model(**hf_config(run, {}))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert ours == {name: tuple(p.shape) for name, p in theirs.named_parameters()}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert {name for name, keys in MODELS.items() if "family" in keys} == set(PUBLISHED)
    assert Model().family == "llama"


EXPORTED = {
    "window": ["attention.kind=window", "attention.window=10"],
    "sinks": ["attention.kind=window", "attention.window=10", "attention.sinks=4"],
    "dilated": ["attention.kind=dilated"],
    "some": ['attention.layers=[{kind="window",window=8},{kind="dense"}]'],
    "two": ['attention.layers=[{kind="window",window=8},{kind="window",window=20}]'],
}


@pytest.mark.parametrize("family", ["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("pattern", EXPORTED)
def test_a_pattern_is_read_as_it_was_exported(pattern: str, family: str, tmp_path: Path) -> None:
    from longspan.export.config_json import hf_config

    activation = "model.activation=" + ("gelu_tanh" if family == "gemma" else "silu")
    run = load_run(None, [f"model.family={family}", activation, *EXPORTED[pattern]])
    (tmp_path / "config.json").write_text(json.dumps(hf_config(run, {})))
    config = read_folder_config(tmp_path)
    found = config.pattern(run.data.context).settings(run.model.layers)
    assert found == run.attention.settings(run.model.layers)
    assert config.changes(run) == []
