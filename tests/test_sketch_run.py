"""Trained runs into runs of fewer numbers, from the command line."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.checkpoint import Part, load, open_checkpoint, save
from longspan.cli import main
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.sketch_run import convert, open_trained
from longspan.sketching import LowRankLinear, SKLinear, sketch
from longspan.sketching.search import Search, Trial, _front
from longspan.trained import load_trained
from longspan.training import train
from tests.harness import Ranks
from tests.parallel.test_apply import run_of, train_rank

OPTIONS = ["train.steps=12", "train.eval_samples=8", "model.hidden=64", "train.lr=0.02"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("dense") / "run"
    train(run_of(1, *OPTIONS), run_dir)
    return run_dir


def result_of(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
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
def test_a_converted_run_is_a_run(
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    linear: str,
) -> None:
    out = tmp_path / "out"
    found = result_of(capsys, "sketch", str(dense), str(out), *options)
    run, model, step = load_trained(out)
    assert (run.model.linear, step) == (linear, 0)
    # The folder holds what the conversion of the trained model in memory gives.
    _, expected, _ = load_trained(dense)
    keep = 0.3 if "--keep" in options else 0.5
    layers = "blocks.*.mlp.*" if "--layers" in options else "blocks.*"
    if "--calibrate" not in options:
        method = "sketch" if "sketch" in options else "svd"
        sketch(expected, keep, method, layers)  # type: ignore[arg-type]
        tokens = torch.randint(64, (2, 48))
        with torch.no_grad():
            torch.testing.assert_close(model.next_logits(tokens), expected.next_logits(tokens))
    # Its figures are those of the runs.
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
    # It is trained on, its data goes on, and its first step sees the loss that was measured.
    longer = load_run(out / "run.toml", ["train.steps=3", "train.eval_every=1", "train.lr=1e-9"])
    trained = train(longer, out, resume=True)
    assert trained.validation_loss is not None
    assert math.isclose(trained.validation_loss, losses["after"], rel_tol=1e-5)
    manifest = json.loads((out / "checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["state"]["samples"] == (12 + 3) * longer.train.global_batch


def go_on(rank: int, world: int, out: str, layout: list[str]) -> float:
    run = load_run(Path(out, "run.toml"), ["train.steps=2", *layout], world=world)
    result = train(run, Path(out), resume=True, world=World(rank, world, rank))
    assert result.validation_loss is not None
    return result.validation_loss


def test_it_goes_on_under_any_layout(ranks: Ranks, dense: Path, tmp_path: Path) -> None:
    for name in ("alone", "split"):
        convert(open_trained(dense), tmp_path / name, method="least_squares")
    alone = go_on(0, 1, str(tmp_path / "alone"), [])
    for loss in ranks.run(go_on, 2, str(tmp_path / "split"), ["layout.tensor=2"]):
        assert math.isclose(loss, alone, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "0"], "--keep is a share above 0"),
        (["--terms", "2"], "svd has one"),
        (["--terms", "0", "--method", "sketch"], "--terms is a number from 1 on, got 0"),
        (["--calibrate", "-1"], "--calibrate is a number from 0 on"),
        (["--method", "sketch", "--calibrate", "2"], "sketch fits nothing"),
        (["--layers", "mlp"], "'mlp' matches no linear layer"),
    ],
)
def test_what_makes_no_sense_is_told(
    dense: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["sketch", str(dense), *options]) == 2
    assert message in capsys.readouterr().err


def test_folders_that_cannot_be_used_are_told(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sketch", str(dense), str(dense)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["sketch", str(dense), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"train it on: longspan train --resume {tmp_path / 'out'} train.steps=200" in said
    assert main(["sketch", str(tmp_path / "out")]) == 2
    assert 'has model.linear = "low_rank" already' in capsys.readouterr().err


def test_a_search_is_at_least_as_good_as_one_share_for_all(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--search", "--swaps", "4", "--layers", "blocks.*.mlp.*"]
    found = result_of(capsys, "sketch", str(dense), str(out), *options)
    search, before = found["search"], found["totals"]["before"]["stored"]
    best = search["best"]
    same = min(t["loss"] for t in search["same_share"] if t["stored"] <= 0.5 * before)
    assert best["stored"] <= 0.5 * before
    assert best["loss"] <= same
    # What was written is what was measured, layer by layer.
    assert math.isclose(found["validation_loss"]["after"], best["loss"], rel_tol=1e-5)
    _, model, _ = load_trained(out)
    for name, rank in best["ranks"].items():
        layer = model.get_submodule(name)
        assert (layer.rank if isinstance(layer, LowRankLinear) else 0) == rank
    # A second search measures nothing again, and goes on where one was cut short.
    file = dense / "sketch-svd" / "trials.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:20])
    capsys.readouterr()
    assert main(["sketch", str(dense), *options, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["search"]["best"] == best
    assert said.err.count("trial ") == 2
    picture = (dense / "sketch-svd" / "pareto.svg").read_text()
    assert picture.count("<circle") > len(lines)
    assert main(["sketch", str(dense), "--search", "--layers", "*.up"]) == 2
    assert "layers was blocks.*.mlp.* and is *.up" in capsys.readouterr().err


def test_trials_measure_what_the_conversion_gives(dense: Path, tmp_path: Path) -> None:
    trained = open_trained(dense)
    search = Search(trained, tmp_path / "s", method="least_squares", layers="*.attention.out")
    found = search.run(0.4, 0)
    once = convert(
        open_trained(dense),
        None,
        method="least_squares",
        layers="*.attention.out",
        ranks=found.ranks,
    )
    assert math.isclose(once.loss_after, found.best.loss, rel_tol=1e-6)
    assert math.isclose(trained.loss(), found.dense.loss, rel_tol=1e-6)  # all is put back


def test_a_run_of_split_norms_and_left_out_samples_is_converted(
    ranks: Ranks, tmp_path: Path
) -> None:
    """What does not go with such layers is changed, and what was left out stays so."""
    options = ["layout.tensor=2", "layout.megatron_sequence_parallel=true", "train.steps=2"]
    ranks.run(train_rank, 2, options, str(tmp_path / "run"), False)
    folder = tmp_path / "run/checkpoints"
    state = open_checkpoint(folder / "step-00000002").state
    weights = load(folder / "step-00000002", "model")
    parts = {f"model/{name}": Part.whole(x) for name, x in weights.items()}
    save(folder, 3, parts, {**state, "skips": [[16, 24]]})
    convert(open_trained(tmp_path / "run"), tmp_path / "out")
    run = load_run(tmp_path / "out/run.toml", world=2)
    assert (run.layout.tensor, run.layout.megatron_sequence_parallel) == (2, False)
    written = json.loads((tmp_path / "out/checkpoints/step-00000000/manifest.json").read_text())
    assert written["state"]["skips"] == [[16, 24]]


def test_a_search_that_cannot_go_on_says_so(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run"
    shutil.copytree(dense, own)
    options = ["--method", "least_squares", "--search", "--swaps", "0", "--layers", "*.0.mlp.up"]
    assert main(["sketch", str(own), *options]) == 0
    moved = tmp_path / "moved"
    own.rename(moved)
    capsys.readouterr()
    assert main(["sketch", str(moved), *options]) == 0
    assert "trial " not in capsys.readouterr().err  # the same run, elsewhere
    folder = moved / "sketch-least_squares"
    for name, text in (("trials.jsonl", '{"step": 3}\n'), ("search.json", "[1]")):
        (folder / name).write_text(text)
        assert main(["sketch", str(moved), *options]) == 2
        assert f"{folder / name} is damaged: remove it" in capsys.readouterr().err
        (folder / name).unlink()
    assert main(["sketch", str(moved), str(dense), *options]) == 2  # before anything is measured
    said = capsys.readouterr().err
    assert "is not empty" in said
    assert "trial " not in said
    assert main(["sketch", str(moved), "--keep", "0.0001"]) == 2
    assert "no layer would get smaller" in capsys.readouterr().err


def test_the_front_is_what_nothing_beats() -> None:
    points = [(3, 2.0), (1, 5.0), (2, 5.0), (3, 1.0), (4, 1.5), (5, 0.5)]
    trials = [Trial("swapped", (stored,), stored, loss) for stored, loss in points]
    assert [(t.stored, t.loss) for t in _front(trials)] == [(1, 5.0), (3, 1.0), (5, 0.5)]


def test_layers_of_other_ranks_in_each_block_are_told_apart(dense: Path, tmp_path: Path) -> None:
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
