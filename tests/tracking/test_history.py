"""What of a run's time was of use."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from longspan.tracking import History, cause_of_end, goodput

METRICS = [
    {"step": 10, "tokens": 1000, "tokens_per_s": 100.0},
    {"step": 10, "validation_loss": 1.0},
    {"step": 20, "tokens": 2000, "tokens_per_s": 50.0},
]


def test_goodput_counts_what_was_kept() -> None:
    history = [
        {"time": 100.0, "event": "start", "step": 0},
        {"time": 120.0, "event": "save", "step": 10, "blocked_s": 0.5},
        {"time": 150.0, "event": "start", "step": 10, "lost_steps": 4, "cause": "a hang"},
        {"time": 170.0, "event": "save", "step": 20, "blocked_s": 1.5},
    ]
    found = goodput(history, METRICS, 200.0)
    assert found.productive_s == pytest.approx(10 + 20)
    assert found.share == pytest.approx(0.3)
    assert (found.restarts, found.lost_steps, found.blocked_s) == (1, 4, 2.0)
    assert found.best_interval_s == pytest.approx(math.sqrt(2 * 1.0 * 100.0))
    assert "goodput 30%: 30 s of 100 s" in str(found)
    assert "1 restarts (1 × a hang), 4 steps lost" in str(found)


def test_the_cause_of_an_end_is_what_was_written_last() -> None:
    start = {"time": 1.0, "event": "start", "step": 0}
    end = {"time": 2.0, "event": "end", "step": 9, "was_asked_to_stop": False}
    failure = {"time": 2.0, "event": "failure", "step": 3, "cause": "ValueError: no"}
    assert cause_of_end([]) is None
    assert cause_of_end([start]) == "ended without a word, as by SIGKILL"
    assert cause_of_end([start, failure]) == "ValueError: no"
    assert cause_of_end([start, end]) is None
    assert cause_of_end([start, {**end, "was_asked_to_stop": True}]) == "asked to stop"


def test_a_stop_that_was_asked_for_is_no_failure() -> None:
    history = [
        {"time": 0.0, "event": "start", "step": 0},
        {"time": 5.0, "event": "save", "step": 10, "blocked_s": 1.0},
        {"time": 9.0, "event": "start", "step": 10, "cause": "asked to stop"},
    ]
    assert goodput(history, METRICS, 10.0).best_interval_s is None


def test_a_history_survives_a_line_cut_short(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.write("start", 0)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"time": 3.0, "eve\n')
    history.write("save", 5, blocked_s=0.1)
    assert [line["event"] for line in history.lines()] == ["start", "save"]
    assert History(None).lines() == []
