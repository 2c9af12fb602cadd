"""The loop: resume, gradient accumulation, precision, evaluation, the run folder."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import load
from longspan.config import Run
from longspan.data.build import build
from longspan.engines.native import NativeEngine
from longspan.errors import Diverged, UserError
from longspan.runfile import load_run
from longspan.trained import load_trained
from longspan.training import Result, train

SMALL = [
    "model.hidden=32",
    "model.layers=2",
    "model.heads=2",
    "attention.segment_lengths=[16,64]",
    "attention.dilation_rates=[1,4]",
    "data.context=64",
    "train.warmup_steps=1",
    "train.eval_samples=3",
    "track.log_every=1",
    "track.prompt=",
    "checkpoint.keep=10",
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "and",
        "then",
        "sleeps",
    ]
    (root / "in").mkdir()
    for n in range(30):
        text = " ".join(words[(n * i * i + i) % len(words)] for i in range(120))
        (root / "in" / f"{n}.txt").write_text(text)
    build([root / "in"], root / "out", validation=0.2)
    return root / "out"


def small_run(shards: Path, *overrides: str) -> Run:
    return load_run(None, [*SMALL, f"data.source={shards}", *overrides])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if "loss" in line]


def checkpoint_files(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_forty_steps_equal_twenty_and_twenty_byte_for_byte(shards: Path, tmp_path: Path) -> None:
    run = small_run(shards, "train.steps=40", "train.global_batch=2", "checkpoint.every=20")
    train(run, tmp_path / "whole")
    # The second folder is the first as it was at step 20, and resumes from there.
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000040")
    torch.manual_seed(12345)  # earlier random numbers must not matter
    train(run, tmp_path / "halves", resume=True)
    whole, halves = (checkpoint_files(tmp_path / name, 40) for name in ("whole", "halves"))
    assert whole == halves
    assert set(whole) == {
        "manifest.json",
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
        "rng-00000.safetensors",
    }
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    first = checkpoint_files(tmp_path / "whole", 20)["model-00000.safetensors"]
    assert first != whole["model-00000.safetensors"]


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_gradient_accumulation_does_not_change_the_losses(
    shards: Path, tmp_path: Path, micro: int
) -> None:
    # Windows hold different numbers of targets, which a mean of means would get wrong.
    options = ["train.steps=6", "train.global_batch=8", "train.lr=1e-2"]
    train(small_run(shards, *options, "train.micro_batch=8"), tmp_path / "one-batch")
    train(small_run(shards, *options, f"train.micro_batch={micro}"), tmp_path / "accumulated")
    one_batch, accumulated = losses(tmp_path / "one-batch"), losses(tmp_path / "accumulated")
    assert len(one_batch) == 6
    assert one_batch[-1] < one_batch[0]
    assert accumulated == pytest.approx(one_batch, rel=1e-6)


def test_a_resumed_run_may_change_its_batch_and_continues_in_the_data(
    shards: Path, tmp_path: Path
) -> None:
    train(small_run(shards, "train.steps=4", "train.global_batch=2"), tmp_path / "run")
    train(small_run(shards, "train.steps=6", "train.global_batch=4"), tmp_path / "run", resume=True)
    manifest = json.loads(checkpoint_files(tmp_path / "run", 6)["manifest.json"])
    assert manifest["state"]["samples"] == 4 * 2 + 2 * 4
    assert [line["tokens"] for line in metrics(tmp_path / "run") if "tokens" in line] == [
        128, 256, 384, 512, 768, 1024,
    ]  # fmt: skip


def test_goodput_of_a_finished_run_that_is_resumed_with_more_steps_a_day_later(
    shards: Path, tmp_path: Path
) -> None:
    train(small_run(shards, "train.steps=2"), tmp_path / "run")
    history = tmp_path / "run" / "history.jsonl"
    events = [json.loads(line) for line in history.read_text().splitlines()]
    a_day_ago = [{**event, "time": event["time"] - 86_400} for event in events]
    history.write_text("".join(json.dumps(event) + "\n" for event in a_day_ago))
    train(small_run(shards, "train.steps=4"), tmp_path / "run", resume=True)
    found = [line for line in metrics(tmp_path / "run") if "goodput" in line][-1]
    assert found["step"] == 4
    assert found["restarts"] == 1
    assert found["productive_s"] <= found["wall_s"] < 3600


def test_it_learns_and_reports(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-in-a-variable")
    run = small_run(
        shards, "train.steps=60", "train.lr=1e-2", "train.eval_every=20", "track.prompt=the "
    )
    result = train(run, tmp_path / "run")
    assert isinstance(result, Result)
    assert result.validation_loss is not None
    assert result.validation_loss < 0.7 * math.log(256)
    evaluations = [line for line in metrics(tmp_path / "run") if "validation_loss" in line]
    assert [line["step"] for line in evaluations] == [20, 40, 60]
    assert evaluations[-1]["validation_loss"] == result.validation_loss
    assert evaluations[-1]["baseline"] == result.baseline
    assert evaluations[-1]["baseline_loss"] == result.baseline_loss
    assert result.sample is not None
    assert result.sample.startswith("the ")
    assert "generating a sample of 100 tokens" in capsys.readouterr().err
    assert load_run(tmp_path / "run" / "run.toml").train.precision == "fp32"
    environment = json.loads((tmp_path / "run" / "env.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert "hidden-in-a-variable" not in (tmp_path / "run" / "env.json").read_text()


def test_the_trained_model_is_what_was_saved(shards: Path, tmp_path: Path) -> None:
    train(small_run(shards, "train.steps=3"), tmp_path / "run")
    _, model, step = load_trained(tmp_path / "run")
    weights = load(tmp_path / "run" / "checkpoints" / "step-00000003", "model")
    assert step == 3
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("wanted", "expected"), [("high", "high"), (None, "medium")])
def test_the_precision_of_products_is_set_for_the_run_alone(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, expected: str
) -> None:
    found = []
    backward = NativeEngine.backward

    def record(*args: Any) -> Any:
        found.append(torch.get_float32_matmul_precision())
        return backward(*args)

    def fail(*_: Any) -> Any:
        raise RuntimeError("stop here")

    options = [f"train.matmul_precision={wanted}"] if wanted else []
    run = small_run(shards, "train.steps=1", *options)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # a notebook's own
    try:
        monkeypatch.setattr(NativeEngine, "backward", record)
        train(run, tmp_path / "run")
        assert set(found) == {expected}
        assert torch.get_float32_matmul_precision() == "medium"
        monkeypatch.setattr(NativeEngine, "backward", fail)
        with pytest.raises(RuntimeError, match="stop here"):
            train(run, tmp_path / "failed")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_bf16_trains_with_fp32_weights(shards: Path, tmp_path: Path) -> None:
    # Long enough for the loss to fall from 6.2 to 2.1: near the start any model would agree.
    options = ["train.steps=20", "train.lr=1e-2", "data.context=32", "model.layers=1"]
    options.append("model.sub_layer_norm=true")
    train(small_run(shards, *options), tmp_path / "fp32")
    train(small_run(shards, *options, "train.precision=bf16"), tmp_path / "bf16")
    exact, rounded = losses(tmp_path / "fp32"), losses(tmp_path / "bf16")
    assert exact[-1] < 0.5 * exact[0]
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert rounded != exact
    weights = load(tmp_path / "bf16" / "checkpoints" / "step-00000020", "model")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gpu_training_equals_cpu_within_its_precision(
    shards: Path, tmp_path: Path, precision: str
) -> None:
    options = ["train.steps=8", "train.global_batch=2", "model.hidden=64"]
    train(small_run(shards, *options, "train.device=cpu"), tmp_path / "cpu")
    gpu = [f"train.precision={precision}", "train.device=cuda"]
    train(small_run(shards, *options, *gpu), tmp_path / "gpu")
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)
    manifest = json.loads(checkpoint_files(tmp_path / "gpu", 8)["manifest.json"])
    assert bool(manifest["state"]["scaler"]) == (precision == "fp16")


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU")
def test_compiled_blocks_give_the_same_losses(shards: Path, tmp_path: Path) -> None:
    options = ["train.steps=2", "model.layers=1"]
    options.append("track.prompt=the ")  # the compiled model generates a sample too
    train(small_run(shards, *options), tmp_path / "eager")
    compiled = train(small_run(shards, *options, "train.compile=true"), tmp_path / "compiled")
    assert compiled.sample is not None
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)


def test_clipping_bounds_the_step_and_reports_the_norm_before_it(
    shards: Path, tmp_path: Path
) -> None:
    train(small_run(shards, "train.steps=1", "train.grad_clip=0"), tmp_path / "free")
    train(small_run(shards, "train.steps=1", "train.grad_clip=0.01"), tmp_path / "clipped")
    free, clipped = (metrics(tmp_path / name)[0]["grad_norm"] for name in ("free", "clipped"))
    assert free == clipped > 0.01
    moments = [
        load(tmp_path / name / "checkpoints" / "step-00000001", "optimizer")
        for name in ("free", "clipped")
    ]
    name = "blocks.0.mlp.up.weight.exp_avg"
    torch.testing.assert_close(moments[1][name], moments[0][name] * 0.01 / free, rtol=1e-4, atol=0)


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_nan_loss_ends_the_run_and_is_never_saved(
    shards: Path, tmp_path: Path, log_every: int
) -> None:
    # With log_every 1000 the first checkpoint is due long before the first line of metrics.
    options = ["train.steps=50", "train.lr=1e30", "train.warmup_steps=0", "train.grad_clip=0"]
    options += [f"track.log_every={log_every}", "checkpoint.every=7"]
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        train(small_run(shards, *options), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_weights_that_overflow_in_the_last_step_are_not_saved(shards: Path, tmp_path: Path) -> None:
    options = ["train.steps=1", "train.lr=1e38", "train.warmup_steps=0", "train.grad_clip=0"]
    with pytest.raises(Diverged, match="weights are not finite"):
        train(small_run(shards, *options), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_resume_refuses_other_data_and_another_model(shards: Path, tmp_path: Path) -> None:
    train(small_run(shards, "train.steps=2"), tmp_path / "run")
    (tmp_path / "in.txt").write_text("other words " * 40)
    build([tmp_path / "in.txt"], tmp_path / "other", validation=0)
    with pytest.raises(UserError, match=r"data\.accept_changed=true$") as refused:
        train(small_run(tmp_path / "other", "train.steps=4"), tmp_path / "run", resume=True)
    was, now = str(refused.value).splitlines()[1:3]
    assert "data was tokens: train" in was
    assert "data is  tokens: train 481" in now
    for change, message in [
        ("data.context=32", r"data.context was 64\n +data.context is  32"),
        ("train.seed=5", r"train.seed was 0\n +train.seed is  5"),
        ("model.hidden=64", r"model.hidden was 32\n +model.hidden is  64"),
        ("model.heads=4", r"model.heads was 2\n +model.heads is  4"),  # of equal shapes
        ("model.rope_theta=123.0", r"model.rope_theta was None\n +model.rope_theta is  123"),
        ("attention.dilation_rates=[1,2]", "attention.dilation_rates"),
    ]:
        with pytest.raises(UserError, match=message):
            train(small_run(shards, change), tmp_path / "run", resume=True)


def test_a_sample_that_cannot_be_read_ends_the_run_with_its_message(
    shards: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(shards, tmp_path / "copy")
    index = copy / "index.json"
    index.write_text(index.read_text().replace('"vocab":256', '"vocab":127'))
    with (copy / "train-00000.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x7f")
    run = small_run(copy, "train.steps=200", "data.verify=false")
    with pytest.raises(
        UserError, match="the data contains token 127, but its vocabulary size is 127"
    ):
        train(run, tmp_path / "run")
    assert len(losses(tmp_path / "run")) > 1  # other samples were read before
    assert not [t for t in threading.enumerate() if t.name.startswith("longspan-data")]


def test_a_prompt_that_cannot_be_encoded_is_refused_before_training(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("the cat " * 200)
    build(
        [tmp_path / "in.txt"], tmp_path / "shards", tokenizer=tmp_path / "words.json", validation=0
    )
    for prompt in ("def", " "):
        with pytest.raises(UserError, match=r"cannot encode|gives no token"):
            train(small_run(tmp_path / "shards", f"track.prompt={prompt}"), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    result = train(
        small_run(tmp_path / "shards", "track.prompt=the", "train.steps=1"), tmp_path / "run"
    )
    assert result.sample is not None
    assert (tmp_path / "run" / "tokenizer.json").exists()


def test_recall_trains_on_its_answers_only(tmp_path: Path) -> None:
    overrides = ["data.source=recall", "data.recall_pairs=4", "model.vocab=32", "train.steps=2"]
    result = train(load_run(None, [*SMALL, *overrides]), tmp_path / "run")
    assert result.baseline == "chance"
    assert result.baseline_loss == pytest.approx(math.log(16))
    assert result.sample is None


def test_changed_data_is_used_if_it_is_accepted(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(small_run(shards, "train.steps=2"), tmp_path / "run")
    (tmp_path / "in.txt").write_text("other words " * 40)
    build([tmp_path / "in.txt"], tmp_path / "other", validation=0)
    accepted = small_run(tmp_path / "other", "train.steps=4", "data.accept_changed=true")
    assert train(accepted, tmp_path / "run", resume=True).step == 4
    assert "longspan: continuing with other data\n  data was tokens" in capfd.readouterr().err
    assert "accept_changed = false" in (tmp_path / "run" / "run.toml").read_text()
    with pytest.raises(UserError, match=r"train\.seed was 0"):
        train(accepted.model_copy(update={"train": accepted.train.model_copy(update={"seed": 7})}),
              tmp_path / "run", resume=True)  # fmt: skip
