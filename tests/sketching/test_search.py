"""The rank search on a toy model: budget, Pareto front, resuming, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longspan.errors import UserError
from longspan.sketching import sketch
from longspan.sketching.search import RankSearch, SearchResult, Trial, _pareto_front

LAYERS = ["0", "2", "4"]


class Toy:
    """A regression model, and how often its loss was computed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4)
        )
        self.inputs = torch.randn(64, 16)
        with torch.no_grad():
            self.targets = self.model(self.inputs) + 0.01 * torch.randn(64, 4)
        self.evaluations = 0

    @torch.no_grad()
    def loss(self) -> float:
        self.evaluations += 1
        return float((self.model(self.inputs) - self.targets).square().mean())

    def search(self, folder: Path, keep: float = 0.5, swaps: int = 8, **other: Any) -> SearchResult:
        options: dict[str, Any] = {"settings": {"seed": 0}, "method": "svd", **other}
        return RankSearch(self.model, LAYERS, self.loss, folder, **options).run(keep, swaps)


@pytest.mark.parametrize("method", ["svd", "least_squares"])
def test_the_best_fits_the_budget_and_beats_uniform_ranks(tmp_path: Path, method: str) -> None:
    toy = Toy()
    weights = {name: x.clone() for name, x in toy.model.state_dict().items()}
    found = toy.search(tmp_path, method=method, calibration=[toy.inputs])
    budget = 0.5 * found.dense.stored
    assert found.best.stored <= budget
    assert found.best.loss <= min(t.loss for t in found.uniform if t.stored <= budget)
    assert all(torch.equal(x, weights[name]) for name, x in toy.model.state_dict().items())
    # The trial measured what the conversion gives.
    report = sketch(
        toy.model,
        1.0,
        method,
        LAYERS,
        rank=found.ranks,
        calibration=[toy.inputs],  # type: ignore[arg-type]
    )
    assert report.after.stored == found.best.stored
    assert math.isclose(toy.loss(), found.best.loss, rel_tol=1e-5)


def test_a_second_search_reuses_all_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Toy()
    found = first.search(tmp_path)
    lines = (tmp_path / "trials.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == first.evaluations == capsys.readouterr().err.count("trial ")
    assert (tmp_path / "pareto.svg").read_text().count("<circle") > len(lines)
    again = Toy()
    assert again.search(tmp_path) == found
    assert again.evaluations == 0
    assert again.search(tmp_path, keep=0.3).best.stored <= 0.3 * found.dense.stored
    # A search that was killed while it wrote a line resumes.
    (tmp_path / "trials.jsonl").write_text("".join(lines[:-2]) + lines[-2][:20])
    resumed = Toy()
    assert resumed.search(tmp_path) == found
    assert resumed.evaluations == 2


def test_a_non_finite_loss_is_never_the_best(tmp_path: Path) -> None:
    toy, finite = Toy(), Toy().loss()
    losses = iter([finite, *[math.nan] * 5])
    toy.loss = lambda: next(losses, 1.0)  # type: ignore[method-assign]
    found = toy.search(tmp_path)
    assert found.best.loss == 1.0
    assert '"loss": null' in (tmp_path / "trials.jsonl").read_text()
    assert toy.search(tmp_path) == found


def test_a_folder_of_another_search_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    toy = Toy()
    toy.search(tmp_path, swaps=0)
    with pytest.raises(UserError, match="other settings\n  seed was 0, now 1\nremove the folder"):
        toy.search(tmp_path, settings={"seed": 1})
    for name, text in (("trials.jsonl", '{"step": 3}\n'), ("search.json", "[1]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} is damaged: remove it"):
            toy.search(tmp_path)
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match=r"no ranks fit in 0\.1% of 2,432 parameters: raise --keep"):
        toy.search(tmp_path, keep=0.001)


def test_the_result_is_a_table_and_a_dictionary(tmp_path: Path) -> None:
    found = Toy().search(tmp_path)
    head, *rows, last = str(found).splitlines()
    assert head.split() == ["parameters", "validation", "loss", "increase", "kind"]
    assert sum("<- chosen" in row for row in rows) == 1
    assert last == f"trials and plot: {tmp_path}"
    as_json = json.loads(json.dumps(found.as_dict()))
    assert as_json["best"]["ranks"] == found.ranks


def test_no_trial_beats_the_pareto_front() -> None:
    points = [(3, 2.0), (1, 5.0), (2, 5.0), (3, 1.0), (4, 1.5), (5, 0.5)]
    trials = [Trial("swapped", (stored,), stored, loss) for stored, loss in points]
    front = [(t.stored, t.loss) for t in _pareto_front(trials)]
    assert front == [(1, 5.0), (3, 1.0), (5, 0.5)]
