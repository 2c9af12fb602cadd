"""`longspan bench loss|checkpoint|engines|conversion|memory|tracking|train`: runs, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.benchmarks import engines, loss, tracking
from longspan.benchmarks.plain_gpt import PlainGPT
from longspan.benchmarks.step_time import load, measure
from longspan.benchmarks.train import (
    GPU_CASES,
    LONGEST_GPU_CASES,
    Case,
    _chart,
    _power_limit,
)
from longspan.cli import main
from longspan.config import Run
from longspan.planning.memory import memory_per_rank
from longspan.runfile import load_run


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("longspan.cli.bench.builtin_name", lambda: "cpu")
    monkeypatch.chdir(tmp_path)


def bench(*arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json", "a.json"]) == 0
    found: dict[str, Any] = json.loads(Path("a.json").read_text())
    assert f"torch {torch.__version__}" in found["machine"]
    return found


def test_the_losses_are_compared_with_their_extra_memory() -> None:
    chunked, plain = bench("loss", "--lengths", "64", "--width", "8", "--vocab", "512")["rows"]
    assert (chunked["method"], plain["method"]) == ("chunked", "plain")
    assert plain["extra_bytes"] > 4 * 64 * 512  # the logits
    assert chunked["extra_bytes"] > 0


def test_generation_is_measured_with_a_full_cache_beside_transformers() -> None:
    pytest.importorskip("transformers")
    found = bench("generate", "--lengths", "512", "1024", "--tokens", "2", "--prefill", "512")
    rows = {(row["tokens"], row["attention"]): row for row in found["rows"]}
    kinds = ("dense", "dilated", "transformers")
    assert list(rows) == [*[(n, kind) for n in (512, 1024) for kind in kinds[:2]], (512, kinds[2])]
    row_bytes = 2 * 4 * 4 * 32 * 2  # float32 keys and values of 4 heads in 2 layers
    for tokens in (512, 1024):
        assert rows[tokens, "dense"]["cache_bytes"] == pytest.approx(tokens * row_bytes, rel=0.01)
        dilated = (256 if tokens == 512 else 512) + 256  # a branch has 256 rows
        assert rows[tokens, "dilated"]["cache_bytes"] == pytest.approx(
            dilated * row_bytes, rel=0.01
        )
        assert rows[tokens, "dense"]["tokens_per_s"] > 0
    assert rows[512, "dense"]["prefill_s"] > 0
    assert rows[1024, "dense"]["prefill_s"] is None


def test_a_row_is_printed_before_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def measure(*_: object) -> tuple[int, float]:
        printed.append(capsys.readouterr().out)
        return 3 << 20, 0.001 * len(printed)

    monkeypatch.setattr(loss, "_measure", measure)
    assert main(["bench", "loss", "--lengths", "1024", "2048"]) == 0
    printed.append(capsys.readouterr().out)
    assert printed[0].splitlines()[-1] == "   tokens  method    extra MiB          ms"
    assert printed[1:] == [
        "    1,024  chunked           3         1.0\n",
        "    1,024  plain             3         2.0\n",
        "    2,048  chunked           3         3.0\n",
        "    2,048  plain             3         4.0\n",
    ]


def test_json_goes_to_stdout_instead_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "64", "--width", "8", "--vocab", "512"]
    assert main(["bench", "loss", *small, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert [row["method"] for row in json.loads(output.out)["rows"]] == ["chunked", "plain"]
    assert output.err == ""
    assert not Path("-").exists()


def test_checkpoints_are_saved_both_ways_and_removed() -> None:
    rows = bench("checkpoint", "--gib", "0.001")["rows"]
    assert [row["save"] for row in rows] == ["synchronous", "asynchronous"]
    assert all(row["blocked_s"] > 0 and row["total_s"] > 0 for row in rows)
    assert [path.name for path in Path().iterdir()] == ["a.json"]


def test_an_engine_that_fails_is_reported_and_the_others_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(options: list[str]) -> dict[str, Any]:
        assert "train.lr=0.1" in options
        if "engine.name=deepspeed" in options:
            return {"error": "not installed"}
        return {"tokens_per_s": 10.0, "memory_bytes": 2**30, "loss": 1.0}

    monkeypatch.setattr(engines, "_train", train)
    rows = bench("engines", "train.lr=0.1")["rows"]
    assert [row.get("of_native") for row in rows] == [1.0, *[None] * 4, *[1.0] * 3]
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "--lengths", "0"], "must be at least 1"),
        (["loss", "--json", "none/a.json"], "cannot write none/a.json"),
        (["checkpoint", "--gib", "0"], "--gib must be at least"),
        (["conversion", "--keep", "2"], "0 < --keep <= 1, got 200 and 2.0"),
        (["memory", "--gpus", "0"], "--gpus must be at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs without CUDA")
@pytest.mark.parametrize("arguments", [["memory"], ["checkpoint", "--device", "cuda"]])
def test_without_cuda_it_says_so(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert "needs a CUDA device, and there is none" in capsys.readouterr().err


def test_the_cost_of_tracking_is_a_ratio_within_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "BLOCKS", 1)
    monkeypatch.setattr(tracking, "PACKAGES", {"tensorboard": "tensorboard"})
    small = ["model.hidden=32", "model.layers=1", "model.heads=2", "data.source=recall"]
    found = bench("tracking", *small, "data.context=128", "track.log_every=2")
    assert found["setting"]["sinks"] == ["tensorboard"]
    (row,) = found["rows"]
    assert row["line_share"] == pytest.approx(row["line_s"] / (2 * row["step_s"]))
    assert row["line_s"] > 0
    assert row["sinks_cpu_share"] >= 0
    assert not list(Path().glob("longspan-tracking-*"))


def test_training_is_measured_beside_a_plain_gpt() -> None:
    small = ["model.hidden=32", "model.heads=2", "model.layers=1"]
    found = bench("train", "--steps", "1", "--only", "dense", "--plot", "a.svg", *small)
    ours, plain = found["rows"]
    assert (ours["run"], plain["run"]) == ("built-in 512 dense", "plain GPT, built-in 512 dense")
    assert ours["overrides"][-3:] == small
    assert "overrides" not in plain
    for row in (ours, plain):
        assert row["device"] == "cpu"
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(2 * 512)
    assert "built-in plain GPT" in Path("a.svg").read_text()


def test_the_longest_contexts_take_one_step_each() -> None:
    small = ["model.hidden=32", "model.heads=2", "model.layers=1"]
    found = bench("train", "--longest", "--plot", "a.svg", *small)
    assert [(row["run"], row["warm_up"]) for row in found["rows"]] == [
        ("built-in 1K dense in chunks, first step", 0),
        ("built-in 1K dilated in chunks", 1),
    ]
    assert found["steps"] == 1
    titles = set(re.findall(r">(built-in [^<]*)<", Path("a.svg").read_text()))
    assert titles == {"built-in dense", "built-in dilated"}


@pytest.mark.parametrize("cases", [GPU_CASES, LONGEST_GPU_CASES], ids=["usual", "longest"])
def test_all_cases_of_a_gpu_are_in_one_figure(cases: list[Case]) -> None:
    rows, places = list[dict[str, Any]](), set[tuple[str, int]]()
    for speed, case in enumerate(cases, start=1):
        kinds = [case.kind, "plain GPT"] if case.is_beside_plain else [case.kind]
        for line in (f"{case.model} {kind}" for kind in kinds):
            rows.append({"line": line, "context": case.context, "tokens_per_s": 1000.0 * speed})
            places.add((line, case.context))
    picture = _chart(rows, "one GPU")
    assert picture.count("<circle") == len(places)
    assert all(f">{line}<" in picture for line, _ in places)


@pytest.mark.parametrize("case", [*GPU_CASES, *LONGEST_GPU_CASES], ids=lambda case: case.name)
def test_the_cases_of_a_gpu_fit_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan, on an H200; with the residual stream in bf16, as they are documented."""

    def loaded(options: list[str], _device: str) -> Run:
        return load_run(None, [*options, "train.device=cuda"], builtin="cuda", world=1)

    monkeypatch.setattr("longspan.benchmarks.train.load", loaded)
    run = case.run("cuda", ["train.residual_precision=bf16"])
    (memory,) = memory_per_rank(run, 1)
    assert sum(memory.peak.values()) < 134 * 2**30
    assert run.train.chunk_tokens == case.chunk


def test_steps_are_timed_after_a_warm_up_or_without() -> None:
    run = load(["model.hidden=32", "model.heads=2", "model.layers=1", "data.context=256"], "cpu")
    assert [len(measure(run, 2, warm_up).seconds) for warm_up in (0, 1)] == [2, 2]


@pytest.mark.parametrize(
    ("context", "name", "longest"),
    [(8192, "8K", 8192), (1_572_864, "1.5M", 2**21), (501_760, "490K", 2**19), (512, "512", 512)],
)
def test_a_case_reaches_its_whole_context(context: int, name: str, longest: int) -> None:
    case = Case("tiny", context, 1, "dilated")
    run = case.run("cpu", [])
    assert case.name == f"tiny {name} dilated"
    assert run.attention.segment_lengths[-1] == longest


def test_a_power_limit_that_slows_runs_is_named() -> None:
    limited = {"run": "a", "gpu_mhz": 1500.0, "gpu_most_mhz": 1980, "gpu_limited": 0.9}
    free = {"run": "b", "gpu_mhz": 1900.0, "gpu_most_mhz": 1980, "gpu_limited": 0.1}
    assert _power_limit([free, {"run": "c"}]) is None
    assert _power_limit([free, limited, {**limited, "run": "d", "gpu_mhz": 1600.0}]) == (
        "The GPU's power limit slowed 2 of 3 runs, at most to 1500 of 1980 MHz (a)"
    )


def test_a_plain_gpt_is_causal_and_its_loss_is_the_mean() -> None:
    run = load(["model.hidden=32", "model.heads=2", "model.layers=2"], "cpu")
    torch.manual_seed(0)
    gpt, tokens = PlainGPT(run.model, 8), torch.randint(run.model.vocab, (2, 9))
    whole = gpt(tokens[:, :-1], tokens[:, 1:])
    parts = [gpt(tokens[:, :n], tokens[:, 1 : n + 1]) * n for n in (7, 8)]
    last = tokens.clone()
    last[:, 7] += 1  # the last input moves the last loss alone
    moved = gpt(last[:, :-1] % run.model.vocab, tokens[:, 1:]) * 8
    torch.testing.assert_close(parts[1], whole * 8)
    assert moved != parts[1]
    torch.testing.assert_close(gpt(last[:, :7], tokens[:, 1:8]) * 7, parts[0])


def test_a_case_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--only", "9b"]) == 2
    assert "matches none of the cases: built-in 512 dense" in capsys.readouterr().err
