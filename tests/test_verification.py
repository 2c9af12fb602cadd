"""`longspan verify` accepts a correct layout, and names the first mismatch of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.cli.shared import builtin_name
from longspan.runfile import load_run
from longspan.verification import _compare_metric, _compare_weights
from tests.slow import slow

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "data.source=recall",
    "data.context=64",
    "data.recall_pairs=4",
]


def test_a_correct_layout_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    wsd = ["layout.offload=true", "train.schedule=wsd", "train.steps=90", "train.decay_steps=50"]
    wsd += ["train.chunk_tokens=32"]  # whole sequences in one process
    assert main(["verify", *SMALL, *wsd, "layout.shard=2", "--steps", "2", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["agrees"]
    assert output.err.splitlines() == [
        "training 2 steps in one process",
        "training 2 steps on 2 processes, in chunks",
        "comparing losses, gradient norms and weights",
    ]
    assert report["layout"] == "shard 2, ZeRO stage 3, chunks of 32 tokens, offloaded to CPU"
    assert [found["name"] for found in report["comparisons"]] == ["loss", "grad_norm", "weights"]
    assert all(found["largest"] <= found["tolerance"] for found in report["comparisons"])


@slow("parity")
def test_compressed_gradients_agree_within_wider_tolerances(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["layout.shard=2", "layout.gradient_compression=bf16", "--steps", "2", "--json"]
    assert main(["verify", *SMALL, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "gradients reduced in 16 bits" in report["reason"]
    assert any(found["largest"] > 1e-5 for found in report["comparisons"])  # not those of float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least 2 processes with one, got 1: set an axis, for example layout.shard=2"),
        (["--nproc", "0"], "at least 2 processes with one, got 0"),
        (["layout.shard=4", "--nproc", "3"], "shard 4 needs 4 processes, but there are 3"),
        (
            ["layout.shard=2", "layout.tensor=2", "train.precision=fp16", "train.device=cpu"],
            '"fp16" needs a GPU',
        ),
        (["layout.shard=2", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["layout.shard=3", "train.global_batch=4"], "× 3 data-parallel ranks: use 6"),
        (["layout.sequence=3"], "layout.sequence  3 does not divide data.context"),
    ],
)
def test_invalid_input_is_rejected(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as anyone asks, this machine has one GPU."""
    for module in ("longspan.cli.shared", "longspan.verification"):
        monkeypatch.setattr(f"{module}.may_have_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_a_run_file_for_more_gpus_than_there_are_is_refused_before_it_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nglobal_batch = 2\n")
    assert main(["verify", str(file), "layout.shard=2"]) == 2
    output = capsys.readouterr().err
    assert "a GPU for each of 2 processes, but this machine has 1: set train.device=cpu" in output
    assert "training" not in output


@pytest.mark.usefixtures("one_gpu")
def test_the_built_in_run_is_on_the_cpu_where_there_are_too_few_gpus() -> None:
    assert [builtin_name(processes) for processes in (1, 2)] == ["cuda", "cpu"]
    assert load_run(None, builtin="cpu").train.device == "cpu"


def test_the_first_step_that_differs_is_named() -> None:
    expected = [{"step": n, "loss": 2.0} for n in (1, 2, 3)]
    found = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.1}, {"step": 3, "loss": 3.0}]
    comparison = _compare_metric("loss", found, expected, 1e-5)
    assert comparison.first_mismatch == "step 2: 2.1, expected 2"
    assert comparison.largest == pytest.approx(0.5)
    nan = [{"step": n, "loss": float("nan")} for n in (1, 2, 3)]
    assert _compare_metric("loss", nan, expected, 1e-5).first_mismatch is not None


def test_the_first_parameter_that_differs_is_named(tmp_path: Path) -> None:
    runs = {}
    for name, lr in (("reference", "0.001"), ("other", "0.002")):
        runs[name] = tmp_path / name
        options = [
            *SMALL,
            "train.steps=2",
            "train.warmup_steps=0",
            "checkpoint.every=1",
            "track.prompt=",
        ]
        assert (
            main(
                ["train", *options, "track.prompt=", f"train.lr={lr}", "--run-dir", str(runs[name])]
            )
            == 0
        )
    comparison = _compare_weights(runs["other"], runs["reference"], 2, 1e-4)
    assert comparison.first_mismatch is not None
    assert comparison.first_mismatch.startswith("step 1, ")
    assert _compare_weights(runs["reference"], runs["reference"], 2, 1e-4).first_mismatch is None
