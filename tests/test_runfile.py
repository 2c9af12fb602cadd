"""Run files: TOML, YAML, overrides, and all problems reported at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.attention import Dense, Dilated, Window, pattern_of, patterns_of
from longspan.attention.kernels.schedule import schedule_branches
from longspan.attention.pattern import reach
from longspan.config import AXES, Layout, Run
from longspan.derived import derived_values
from longspan.errors import UserError
from longspan.runfile import dump_run, load_run, parse_run


def problems(
    *overrides: str, tables: dict[str, object] | None = None, world: int = 1
) -> dict[str, str]:
    """Return path and message of each problem of the built-in run with these overrides."""
    with pytest.raises(UserError) as error:
        parse_run(tables) if tables else load_run(None, overrides, world=world)
    lines = str(error.value).splitlines()[1:]
    return {line.split()[0]: line.strip().split(maxsplit=1)[1] for line in lines}


def test_toml_yaml_and_overrides_give_the_same_run(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "run.toml", tmp_path / "run.yaml"
    toml.write_text('[model]\npreset = "125m"\n[train]\nlr = 3e-4\nsteps = 7\n')
    yaml.write_text("model: {preset: 125m}\ntrain:\n  lr: 3e-4\n  steps: 7\n")
    from_toml = load_run(toml)
    assert from_toml == load_run(yaml)
    (tmp_path / "empty.toml").write_text("")
    overrides = ["model.preset=125m", "train.lr=3e-4", "train.steps=7"]
    assert from_toml == load_run(tmp_path / "empty.toml", overrides)
    assert from_toml.model.hidden == 768
    assert from_toml.attention.segment_lengths == (2048, 8192)


def test_a_dumped_run_reads_back_the_same(tmp_path: Path) -> None:
    run = load_run(None, ["train.compile=false", 'data.source=a b"c', "train.base_batch=4"])
    (tmp_path / "run.toml").write_text(dump_run(run))
    assert load_run(tmp_path / "run.toml") == run


def test_presets_fill_what_is_not_given() -> None:
    run = load_run(None, ["model.preset=350m", "model.hidden=512", "model.heads=8"])
    assert (run.model.layers, run.model.kv_heads, run.model.ffn) == (24, 8, 1408)
    assert run.attention.dilation_rates == (1, 4)
    dense = load_run(None, ["attention.kind=dense"])
    assert dense.attention.segment_lengths == ()


def test_all_problems_are_reported_at_once_with_path_and_fix() -> None:
    found = problems(
        "train.lr=-1",
        "model.headz=3",
        "trian.steps=3",
        "attention.kind=dilted",
        "train.steps=1.5",
        "train.compile=maybe",
        "model.warmup_steps=3",
        "data.context=many",
        "checkpoint.keep=0",
    )
    assert found == {
        "trian": "unknown section; did you mean [train]?",
        "model.headz": "unknown key; did you mean model.heads?",
        "model.warmup_steps": "unknown key; did you mean train.warmup_steps?",
        "attention.kind": 'expected "dense", "dilated", "block_sparse", "dilated_block_sparse" or '
        '"window", got "dilted"; did you mean "dilated"?',
        "data.context": 'expected an integer, got "many"; without the override it is 4096',
        "train.steps": "expected an integer, got 1.5; without the override it is 400",
        "train.lr": "expected a number greater than 0, got -1; without the override it is 0.0025",
        "train.compile": 'expected "auto", true or false, got "maybe"; the default is "auto"',
        "checkpoint.keep": "expected at least 1, got 0; without the override it is 2",
    }


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["model.heads=3"], "model.heads", "3 does not divide model.hidden = 128: use 2"),
        (["model.hidden=12", "model.heads=4"], "model.heads", "= 3 must be even"),
        (["model.kv_heads=3"], "model.kv_heads", "does not divide model.heads = 4: use 2"),
        (
            ["model.family=gemma", "model.activation=gelu"],
            "model.activation",
            'transformers computes "gelu_tanh": use "gelu_tanh"',
        ),
        (["model.layers=1e9"], "model.layers", "expected at most 16384, got 1000000000.0"),
        (["model.vocab=1e9"], "model.vocab", "expected at most 16777216, got 1000000000.0"),
        (["train.micro_batch=4", "train.global_batch=6"], "train.global_batch", "use 8"),
        (["train.lr_scaling=linear"], "train.base_batch", "is required by train.lr_scaling"),
        (["train.schedule=wsd"], "train.decay_steps", "is required by train.schedule"),
        (
            ["train.schedule=wsd", "train.decay_steps=500"],
            "train.decay_steps",
            "more than train.steps = 400",
        ),
        (["layout.tensor=2"], "layout", "a multiple of 2 processes, but there is 1: change"),
        (["layout.tensor=2", "layout.shard=1"], "layout", "tensor 2 needs 2 processes, but"),
        (["layout.tensor=-1"], "layout", "only one axis can be -1"),
        (["layout.tensor=0"], "layout", "tensor must be at least 1, or -1"),
        (["attention.kind=dense", "attention.dilation_rates=[1]"], "attention", "remove it"),
        (
            ["attention.segment_lengths=[6]", "attention.dilation_rates=[4]"],
            "attention.segment_lengths",
            "segment length 6 must be a multiple of its dilation rate 4: use 8",
        ),
        (["data.source=recall", "data.context=32"], "data.context", "need at least 66"),
        (
            ["data.source=recall", "data.recall_pairs=200"],
            "data.recall_pairs",
            "more than the 128 keys",
        ),
        (["train.precision=fp16", "train.device=cpu"], "train.precision", "needs a GPU"),
        (["model.sketch.keep=0.4"], "model.sketch", "remove it, or set model.linear"),
        (["model.linear=sketched", "model.sketch.kep=1"], "model.sketch.kep", "mean keep?"),
        (["model.linear=sketched", "model.sketch.rank=0"], "model.sketch.rank", "at least 1"),
        (["model.linear=sketched", "model.sketch=4"], "model.sketch", "a table [model.sketch]"),
        (
            ["model.linear=low_rank", "model.sketch.terms=2"],
            "model.sketch.terms",
            "is not supported with",
        ),
        (
            ["model.linear=sketched", "model.sketch.layers=mlp"],
            "model.sketch.layers",
            "'mlp' matches no linear layer: use names such as blocks.0.attention.query",
        ),
        (
            ["model.linear=sketched", "train.init_from=llama"],
            "train.init_from",
            "convert the trained run with longspan sketch",
        ),
        (["engine.name=deepsped"], "engine.name", 'did you mean "deepspeed"?'),
        (["engine.name=deepspeed", "layout.offload=true"], "layout.offload", "needs engine.name"),
        (["engine.name=deepspeed", "train.optimizer=adamw8bit"], "train.optimizer", "native"),
        (["engine.name=deepspeed", "train.compile=true"], "train.compile", "ZeRO-3 hooks"),
        (
            ["engine.name=deepspeed", "train.activation_checkpointing=selective"],
            "train.activation_checkpointing",
            'use "full"',
        ),
        (
            ["engine.name=deepspeed", "layout.zero=2", "engine.offload_param=cpu"],
            "engine.offload_param",
            '"cpu" needs layout.zero >= 3, but the ZeRO stage is 2',
        ),
        (
            ["engine.name=deepspeed", "engine.offload_optimizer=nvme"],
            "engine.nvme_path",
            "is required",
        ),
        (
            ["attention.kind=block_sparse", "data.context=281474976710656"],
            "data.context",
            "has more than 1,048,576 blocks of attention.block_size = 128: raise that",
        ),
    ],
)
def test_rules_say_what_to_change(overrides: list[str], path: str, message: str) -> None:
    found = problems(*overrides)
    assert any(key.startswith(path) and message in text for key, text in found.items()), found


def test_rules_are_checked_even_if_another_section_is_invalid() -> None:
    found = problems("model.heads=3", "train.lr=abc")
    assert set(found) == {"model.heads", "train.lr"}


def test_a_section_that_is_not_a_table_is_reported() -> None:
    assert "expected a table [model], got 3" in problems(tables={"model": 3})["model"]


DOUBLED = "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
"""A list of 2⁴⁰ numbers, by aliases."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.toml", "[train\n", "is not valid TOML"),
        ("run.yaml", "a: [", "is not valid YAML"),
        ("run.yaml", "- 1", "must contain one table per section"),
        ("run.json", "{}", "must end in .toml, .yaml or .yml"),
        ("run.toml", "\xff", "not UTF-8"),
        ("run.toml", "a = " + "[" * 9999, "is not valid TOML"),
        ("run.toml", "a = 1" + "0" * 5000, "is not valid TOML"),
        ("run.yaml", "a: " + "[" * 999, "is not valid YAML"),
        ("run.yaml", "a: 2024-13-45", "is not valid YAML"),
        ("run.yaml", "train: &a {x: *a}", "is not valid YAML"),
        ("run.yaml", "1: 2", "unknown section; the sections are model, attention"),
        ("run.toml", "steps = 2", r"unknown section; did you mean train\.steps\?"),
        ("run.toml", "[train]\nsteps = 2\nsteps = 3", "is not valid TOML: Cannot overwrite"),
        ("run.yaml", "train:\n  steps: 2\n  steps: 3", "the key steps occurs twice"),
        ("run.yaml", "data: {mix: [{source: a, source: b}]}", "the key source occurs twice"),
        ("run.yaml", DOUBLED, "it has more than 100,000 values"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / name)


def test_quoted_yaml_stays_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('data: {source: "2024"}')
    assert load_run(tmp_path / "run.yaml").data.source == "2024"


def test_numbers_in_lists_of_yaml_are_those_of_toml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  mix:\n  - {source: a, weight: 2.5e-1}\n")
    mix = load_run(tmp_path / "run.yaml").data.mix
    assert mix is not None
    assert mix[0].weight == 0.25


def test_yaml_cannot_build_objects(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: !!python/object/apply:os.system ['true']")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_run(tmp_path / "run.yaml")


@pytest.mark.parametrize("override", ["steps=3", "train.steps", ".steps=3", "train.=3"])
def test_malformed_overrides_are_rejected(override: str) -> None:
    with pytest.raises(UserError, match=r"must look like section\.key=value"):
        load_run(None, [override])


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        # The value that applies instead: of the preset, or what follows from other keys.
        (["model.preset=125m", "model.layers=x"], "model.layers", "; the default is 12"),
        (["model.preset=350m", "model.ffn=x"], "model.ffn", "; the default is 2816"),
        (["model.heads=2", "model.kv_heads=x"], "model.kv_heads", "; the default is 2"),
        (["train.steps=7", "train.warmup_steps=x"], "train.warmup_steps", "override it is 20"),
        (
            ["model.tie_embeddings=1"],
            "model.tie_embeddings",
            "or false, got 1; the default is true",
        ),
        # What was meant.
        (['train.steps="100"'], "train.steps", 'integer, got "100"; did you mean 100?'),
        (["train.compile=True"], "train.compile", 'false, got "True"; did you mean true?'),
        (["train.halve_on_oom=True"], "train.halve_on_oom", 'got "True"; did you mean true?'),
        (["train.precision=BF16"], "train.precision", 'got "BF16"; did you mean "bf16"?'),
        (['layout.zero="3"'], "layout.zero", 'expected 0, 1, 2 or 3, got "3"; did you mean 3?'),
        (["train.steps="], "train.steps", 'expected an integer, got ""; without'),
        (["train.lr=nan"], "train.lr", "expected a finite number, got nan; without"),
        (["data.source="], "data.source", "expected a string of at least 1 character"),
        (["attention.segment_lengths=8"], "attention.segment_lengths", "expected a list, got 8"),
        # One mistake is one problem.
        (["model.preset=125M"], "model.preset", 'got "125M"; did you mean "125m"?'),
        (["model.preset=3"], "model.preset", 'got 3; without the override it is "tiny"'),
        (["model.heads=0"], "model.heads", "expected at least 1, got 0; the default is 4"),
        (["model.hidden=many"], "model.hidden", 'got "many"; the default is 128'),
        (["layout.shard=2", "track.log_every=0"], "track.log_every", "expected at least 1"),
        (['track.sinks=["wandb","wandb"]'], "track.sinks", "has wandb more than once"),
    ],
)
def test_a_wrong_value_is_one_problem_with_what_applies_or_was_meant(
    overrides: list[str], path: str, message: str
) -> None:
    found = problems(*overrides, world=2 if "layout.shard=2" in overrides else 1)
    assert list(found) == [path]
    assert message in found[path]


def test_a_file_keeps_its_value_without_the_override(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nlayers = "x"\n[train]\nsteps = 2000\n')
    with pytest.raises(UserError) as error:
        load_run(file, ["train.steps=0"])
    assert "got 0; without the override it is 2000" in str(error.value)
    assert 'got "x"; the default is 2' in str(error.value)


def test_a_whole_float_is_an_integer(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 1e3\n[layout]\nzero = 2.0\n")
    (tmp_path / "run.yaml").write_text("train: {steps: 1e3}\nlayout: {zero: 2.0}\n")
    run = load_run(tmp_path / "run.toml")
    assert run == load_run(tmp_path / "run.yaml")
    assert (run.train.steps, run.layout.zero) == (1000, 2)
    assert isinstance(run.train.steps, int)
    override = load_run(None, ["attention.segment_lengths=[1e3]", "attention.dilation_rates=[1.0]"])
    assert override.attention.segment_lengths == (1000,)
    assert "expected at most" in problems("train.steps=1e300")["train.steps"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 5\r\n")
    assert load_run(tmp_path / "run.toml").train.steps == 5


def test_a_folder_is_not_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder, not a run file"):
        load_run(tmp_path)
    (tmp_path / "run.toml").touch()
    with pytest.raises(UserError, match="--resume"):
        load_run(tmp_path)


def test_the_default_warmup_is_never_longer_than_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 7\n")
    assert load_run(tmp_path / "run.toml").train.warmup_steps == 7
    for builtin in ("cpu", "cuda"):
        assert load_run(None, ["train.steps=10"], builtin=builtin).train.warmup_steps == 10
    assert load_run(None, builtin="cuda").train.warmup_steps == 50


def test_the_run_is_frozen() -> None:
    run = load_run(None)
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 3  # type: ignore[misc]


def test_an_axis_of_minus_one_takes_the_remaining_devices() -> None:
    layout = Layout(replicate=2, tensor=2)
    assert layout.resolve(8) == {
        "replicate": 2,
        "shard": 2,
        "sequence": 1,
        "tensor": 2,
        "pipeline": 1,
    }
    with pytest.raises(ValueError, match="needs a multiple of 4 processes, but there are 6"):
        layout.resolve(6)


def test_derived_values_are_shown() -> None:
    run = load_run(None, ["train.micro_batch=2", "train.global_batch=8", "data.context=1024"])
    derived = derived_values(run, run.layout.resolve(1))
    assert derived["batch"] == "8 = micro-batch 2 × gradient accumulation 4 × data-parallel 1"
    assert derived["tokens"] == "8,192 per step × 400 steps = 3,276,800"
    one = load_run(None, ["train.steps=1"])
    assert "× 1 step =" in derived_values(one, one.layout.resolve(1))["tokens"]
    assert derived_values(one, one.layout.resolve(1))["learning rate"].endswith(" 1 warmup step")


def test_schema_describes_every_key() -> None:
    schema = Run.model_json_schema()
    train = schema["$defs"]["Train"]["properties"]
    assert train["grad_clip"]["description"].startswith("Maximum global gradient norm")
    assert json.dumps(schema)


def test_config_imports_no_torch() -> None:
    code = "import sys, longspan.cli, longspan.runfile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_replicas_alone_are_not_offloaded() -> None:
    overrides = ["layout.replicate=2", "layout.shard=1", "layout.offload=true"]
    with pytest.raises(UserError, match=r"as the only axis.* set layout\.shard = 2"):
        load_run(None, [*overrides, "train.global_batch=2"], world=2)


def test_zbv_needs_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["layout.pipeline=2", "layout.schedule=zbv", "train.global_batch=2"]
    load_run(None, [*overrides, "model.layers=4"], world=2)
    monkeypatch.setattr("longspan.rules.layout.version", lambda _: "2.11.0+cu130")
    with pytest.raises(UserError, match=r"needs torch 2\.13"):
        load_run(None, [*overrides, "model.layers=4"], world=2)


@pytest.mark.parametrize(
    ("layout", "world", "mode", "advice"),
    [("layout.shard=1", 2, "selective", '"full"'), ("layout.sequence=2", 4, "full", '"none"')],
)
def test_zbv_rejects_saved_activations(layout: str, world: int, mode: str, advice: str) -> None:
    overrides = ["layout.pipeline=2", "layout.schedule=zbv", "train.global_batch=2", layout]
    overrides += ["model.layers=4", "layout.zero=2", f"train.activation_checkpointing={mode}"]
    with pytest.raises(UserError, match=f"activations twice: use {advice}"):
        load_run(None, overrides, world=world)


def test_an_override_can_set_a_key_of_a_table_but_not_of_a_value() -> None:
    run = load_run(None, ["model.linear=sketched", 'model.sketch.ranks."*.mlp.*"=4'])
    assert run.model.sketch.ranks == {"*.mlp.*": 4}
    with pytest.raises(UserError, match=r"needs a table train\.steps, but train\.steps is 7"):
        load_run(None, ["train.steps=7", "train.steps.foo=9"])
    for broken in ("train..steps=1", "train.=1", ".steps=1", 'model."a=1'):
        with pytest.raises(UserError, match="must look like section"):
            load_run(None, [broken])


@pytest.mark.parametrize("preset", ["tiny", "125m", "13b"])
@pytest.mark.parametrize("context", [64, 4096, 20000, 32768, 40000, 131072, 1048576, 10**12])
def test_default_branches_reach_the_context_and_nest(preset: str, context: int) -> None:
    run = load_run(None, [f"model.preset={preset}", f"data.context={context}"])
    pattern = pattern_of(run.attention)
    assert isinstance(pattern, Dilated)
    assert reach([pattern] * run.model.layers, context, run.model.heads) == context
    assert schedule_branches(pattern.branches, has_blocks=False).is_nested
    longest = pattern.segment_lengths[-2:]
    assert len(longest) < 2 or longest[0] < context  # no branch more than it takes


def test_a_warmup_longer_than_the_run_is_warned_of() -> None:
    run = load_run(None, ["train.warmup_steps=500"])
    text = derived_values(run, run.layout.resolve(1))["learning rate"]
    assert text.endswith("warmup, so the peak is never reached")


def test_a_pattern_that_does_not_reach_the_context_is_warned_of() -> None:
    segments = ["attention.segment_lengths=[2048,8192]", "attention.dilation_rates=[1,4]"]
    run = load_run(None, ["model.preset=125m", "data.context=32768", *segments])
    text = derived_values(run, run.layout.resolve(1))["reach"]
    assert "12 layers the last token depends on tokens at most 8,192 back, of 32,768; w" in text
    window = ["attention.kind=block_sparse", "attention.local_window=1024"]
    text = derived_values(load_run(None, window), run.layout.resolve(1))["reach"]
    assert "2 layers the last token depends on tokens at most 1,920 back, of 4,096; w" in text
    both = ["attention.kind=dilated_block_sparse", "attention.block_size=8"]
    both += ["attention.segment_lengths=[256,4096]", "attention.dilation_rates=[1,32]"]
    values = derived_values(load_run(None, both), run.layout.resolve(1))
    assert values["attention"].startswith("dilated_block_sparse 256/1 4096/32 block_size 8, c")
    assert "of 4,096; warning" in values["reach"]
    assert "raise attention.local_window" in values["reach"]
    assert "warning" not in derived_values(load_run(None), run.layout.resolve(1))["reach"]


ONE_RANK = dict.fromkeys(AXES, 1)
LAYERS = 'attention.layers=[{kind="window",repeat=3},{kind="dense"}]'


def test_layers_take_their_patterns_in_turn(tmp_path: Path) -> None:
    """Each with the keys of [attention] that its kind uses; a saved run reads back the same."""
    options = ["model.layers=6", "attention.window=9", "attention.sinks=2", LAYERS]
    run = load_run(None, [*options, "model.learnable_sinks=true"])
    window, dense = Window(9, 2), Dense()
    expected = (window, window, window, dense, window, window)
    assert patterns_of(run.attention, run.model.layers) == expected
    (tmp_path / "run.toml").write_text(dump_run(run))
    assert load_run(tmp_path / "run.toml") == run
    texts = derived_values(run, run.layout.resolve(1))
    words = "in turn 3 × window window 9 sinks 2, 1 × dense, learnable sinks, context"
    assert texts["attention"].startswith(words)
    assert texts["reach"].startswith("over 6 layers the last token depends on tokens at most 4,096")
    with pytest.raises(ValueError, match="a pattern per layer"):
        pattern_of(run.attention)


def test_dilated_layers_without_branches_get_those_of_the_context() -> None:
    run = load_run(None, ['attention.layers=[{},{kind="window",window=9}]'])
    assert patterns_of(run.attention, 2)[0] == pattern_of(load_run(None).attention)
    short = load_run(None, [LAYERS, "model.layers=4", "attention.window=9"])
    assert short.attention.segment_lengths == ()


def test_the_reach_over_layers_is_that_of_their_patterns() -> None:
    window = '{kind="window",window=9}'
    options = ["model.layers=3", f"attention.layers=[{window},{window[:-1]},sinks=1}},{window}]"]
    assert "at most 4,096 back" in derived_values(run := load_run(None, options), ONE_RANK)["reach"]
    plain = load_run(None, ["model.layers=3", f"attention.layers=[{window}]"])
    text = derived_values(plain, ONE_RANK)["reach"]
    assert "at most 25 back" in text
    assert "raise attention.window" in text
    assert run.attention.kinds == ("window",)


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (["attention.layers=3"], "attention.layers", "expected a list, got 3"),
        (
            ['attention.layers=[{kind="windw"}]'],
            "attention.layers.0.kind",
            'expected "dense", "dilated", "block_sparse", "dilated_block_sparse" or "window", got '
            '"windw"; did you mean "window"?',
        ),
        (
            ["attention.layers=[{},{windw=4}]"],
            "attention.layers.1.windw",
            "unknown key; did you mean window?",
        ),
        (
            [LAYERS, "model.layers=4"],
            "attention.layers.0.window",
            "expected at least 1 token, got 0: set it",
        ),
        (
            [LAYERS, "attention.window=9"],
            "attention.layers",
            "describes 4 layers, but model.layers is 2: remove tables or lower their repeat",
        ),
        (
            ['attention.layers=[{kind="dense",window=9}]'],
            "attention.layers.0.window",
            'has no effect with attention.layers.0.kind = "dense": remove it',
        ),
        (
            ['attention.layers=[{kind="dense"}]', "attention.window=9"],
            "attention.window",
            "has no effect, as no table of attention.layers has a kind that uses it: remove it",
        ),
    ],
)
def test_wrong_layers_are_refused_by_name(overrides: list[str], path: str, message: str) -> None:
    assert problems(*overrides) == {path: message}
