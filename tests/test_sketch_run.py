"""Conversion of a trained run to low-rank and sketched layers, from the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import TensorShard, load, open_checkpoint, save
from longspan.cli import main
from longspan.parallel.world import World
from longspan.runfile import dump_run, load_run
from longspan.sketch_run import convert, open_trained
from longspan.sketching import LowRankLinear, SKLinear, sketch
from longspan.trained import load_trained
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import run_of

STEPS = 4
OPTIONS = [f"train.steps={STEPS}", "train.eval_samples=4", "train.lr=0.02"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("dense") / "run"
    train(run_of(1, *OPTIONS), run_dir)
    return run_dir


def json_of(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("options", "linear"),
    [
        ([], "low_rank"),
        (["--method", "least_squares", "--terms", "2", "--calibrate", "2"], "sketched"),
        (["--method", "sketch", "--layers", "blocks.*.mlp.*", "--keep", "0.3"], "sketched"),
    ],
    ids=["svd", "least squares", "sketch"],
)
def test_a_converted_run_can_be_trained(
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    linear: str,
) -> None:
    out = tmp_path / "out"
    found = json_of(capsys, "sketch", str(dense), str(out), *options)
    run, model, step = load_trained(out)
    assert (run.model.linear, step) == (linear, 0)
    # The checkpoint equals the conversion of the trained model in memory.
    _, expected, _ = load_trained(dense)
    keep = 0.3 if "--keep" in options else 0.5
    layers = "blocks.*.mlp.*" if "--layers" in options else "blocks.*"
    if "--calibrate" not in options:
        method = "sketch" if "sketch" in options else "svd"
        sketch(expected, keep, method, layers)  # type: ignore[arg-type]
        tokens = torch.randint(64, (2, 48))
        with torch.no_grad():
            torch.testing.assert_close(model.next_logits(tokens), expected.next_logits(tokens))
    # The report agrees with the runs.
    losses = found["validation_loss"]
    assert math.isclose(open_trained(dense).loss(), losses["before"], rel_tol=1e-6)
    totals = found["totals"]
    assert totals["after"]["stored"] <= keep * totals["before"]["stored"]
    stored = sum(
        x.numel()
        for name, x in load(out / "checkpoints/step-00000000", "model").items()
        if name.endswith((".s1", ".s2"))
    )
    assert stored == totals["after"]["stored"]
    # Training resumes with the next samples, from the validation loss that was reported.
    longer = load_run(out / "run.toml", ["train.steps=3", "train.eval_every=1", "train.lr=1e-9"])
    trained = train(longer, out, resume=True)
    assert trained.validation_loss is not None
    assert math.isclose(trained.validation_loss, losses["after"], rel_tol=1e-5)
    manifest = json.loads((out / "checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["state"]["samples"] == (STEPS + 3) * longer.train.global_batch


def resume(rank: int, world: int, out: str, layout: list[str]) -> float:
    run = load_run(Path(out, "run.toml"), ["train.steps=2", *layout], world=world)
    result = train(run, Path(out), resume=True, world=World(rank, world, rank))
    assert result.validation_loss is not None
    return result.validation_loss


def test_a_converted_run_resumes_under_tensor_parallelism(
    ranks: Ranks, dense: Path, tmp_path: Path
) -> None:
    convert(open_trained(dense), tmp_path / "one", method="least_squares")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    expected = resume(0, 1, str(tmp_path / "one"), [])
    for loss in ranks.run(resume, 2, str(tmp_path / "two"), ["layout.tensor=2"]):
        assert math.isclose(loss, expected, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0"], "--keep must be greater than 0"),
        (["--keep", "0.0001"], "no layer would become smaller"),
        (["--terms", "2"], "--terms > 1 is not supported with --method svd"),
        (["--terms", "0", "--method", "sketch"], "--terms must be at least 1, got 0"),
        (["--calibrate", "-1"], "--calibrate must be at least 0"),
        (["--method", "sketch", "--calibrate", "2"], "--calibrate has no effect with --method"),
        (["--layers", "mlp"], "'mlp' matches no linear layer: use a glob such as 'blocks.0."),
    ],
)
def test_invalid_arguments_are_refused(
    dense: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["sketch", str(dense), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_unusable_folder_is_refused_before_anything_is_measured(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sketch", str(dense), str(dense), "--search"]) == 2
    error = capsys.readouterr().err
    assert "is not empty" in error
    assert "trial " not in error
    assert main(["sketch", str(dense), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    command = f"longspan train --resume {tmp_path / 'out'} train.steps=200"
    assert f"fine-tune it: {command}" in printed
    assert main(["sketch", str(tmp_path / "out")]) == 2
    assert 'already has model.linear = "low_rank"' in capsys.readouterr().err


def test_a_search_writes_the_ranks_it_measured_and_is_tied_to_its_checkpoint(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, moved, out = tmp_path / "run", tmp_path / "moved", tmp_path / "out"
    shutil.copytree(dense, run_dir)
    options = ["--search", "--swaps", "2", "--layers", "blocks.*.mlp.up"]
    found = json_of(capsys, "sketch", str(run_dir), str(out), *options)
    best, before = found["search"]["best"], found["totals"]["before"]["stored"]
    assert best["stored"] <= 0.5 * before
    assert math.isclose(found["validation_loss"]["after"], best["loss"], rel_tol=1e-5)
    _, model, _ = load_trained(out)
    for name, rank in best["ranks"].items():
        layer = model.get_submodule(name)
        assert (layer.rank if isinstance(layer, LowRankLinear) else 0) == rank
    # The same run in another folder reuses its trials; other layers are another search.
    run_dir.rename(moved)
    assert main(["sketch", str(moved), *options]) == 0
    printed = capsys.readouterr()
    assert "trial " not in printed.err
    assert f"trials and plot: {moved / 'sketch-svd'}" in printed.out
    assert main(["sketch", str(moved), "--search", "--layers", "*.down"]) == 2
    assert "layers was blocks.*.mlp.up, now *.down" in capsys.readouterr().err


def test_conversion_changes_an_incompatible_layout_and_preserves_skipped_samples(
    dense: Path, tmp_path: Path
) -> None:
    """Megatron-style sequence parallelism is not supported with factored layers."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(dense, run_dir)
    layout = ["layout.tensor=2", "layout.megatron_sequence_parallel=true"]
    run = load_run(run_dir / "run.toml", layout, world=None)
    (run_dir / "run.toml").write_text(dump_run(run))
    last = run_dir / f"checkpoints/step-{STEPS:08d}"
    shards = {f"model/{name}": TensorShard.full(x) for name, x in load(last, "model").items()}
    state = open_checkpoint(last).state
    save(run_dir / "checkpoints", STEPS + 1, shards, {**state, "skips": [[16, 24]]})
    convert(open_trained(run_dir), out)
    run = load_run(out / "run.toml", world=2)
    assert (run.layout.tensor, run.layout.megatron_sequence_parallel) == (2, False)
    written = json.loads((out / "checkpoints/step-00000000/manifest.json").read_text())
    assert written["state"]["skips"] == [[16, 24]]


def test_blocks_with_different_ranks_have_their_own_entries(dense: Path, tmp_path: Path) -> None:
    ranks = {"blocks.0.mlp.up": 3, "blocks.1.mlp.up": 5, "blocks.*.mlp.gate": 4, "*": 0}
    convert(open_trained(dense), tmp_path / "out", method="least_squares", ranks=ranks)
    run, model, _ = load_trained(tmp_path / "out")
    found = {n: m.low_rank for n, m in model.named_modules() if isinstance(m, SKLinear)}
    assert found == {
        "blocks.0.mlp.up": 3,
        "blocks.1.mlp.up": 5,
        "blocks.0.mlp.gate": 4,
        "blocks.1.mlp.gate": 4,
    }
    assert run.model.sketch.ranks["blocks.*.mlp.gate"] == 4
