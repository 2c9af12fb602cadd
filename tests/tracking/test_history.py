"""The history of a run, why it ended, and its goodput."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from longspan.tracking import History, exit_reason, goodput
from longspan.tracking.history import UNKNOWN_REASON

METRICS = [
    {"step": 10, "tokens": 1000, "tokens_per_s": 100.0},
    {"step": 10, "validation_loss": 1.0},
    {"step": 20, "tokens": 2000, "tokens_per_s": 50.0},
]


def test_goodput_counts_steps_that_were_kept() -> None:
    history = [
        {"time": 100.0, "event": "start", "step": 0},
        {"time": 120.0, "event": "save", "step": 10, "blocked_s": 0.5},
        {"time": 150.0, "event": "start", "step": 10, "lost_steps": 4, "cause": "a hang"},
        {"time": 170.0, "event": "save", "step": 20, "blocked_s": 1.5},
    ]
    found = goodput(history, METRICS, 200.0)
    assert found.productive_s == pytest.approx(10 + 20)
    assert found.ratio == pytest.approx(0.3)
    assert (found.restarts, found.lost_steps, found.blocked_s) == (1, 4, 2.0)
    assert found.optimal_interval_s == pytest.approx(math.sqrt(2 * 1.0 * 100.0))
    assert "goodput 30%: 30 s of 100 s" in str(found)
    assert "1 restart (1 × a hang), 4 steps lost" in str(found)


def test_a_failure_that_was_recovered_from_has_not_ended_the_run() -> None:
    events = [
        {"time": 100.0, "event": "start", "step": 0},
        {"time": 140.0, "event": "failure", "step": 14, "cause": "ValueError: of rank 1"},
        {"time": 150.0, "event": "recovery", "step": 14, "lost_steps": 1, "seconds": 9.0},
    ]
    assert exit_reason(events) == UNKNOWN_REASON
    end = {"time": 200.0, "event": "end", "step": 20, "stop_requested": False}
    assert exit_reason([*events, end]) is None
    failure = {"time": 160.0, "event": "failure", "step": 15, "cause": "ValueError: of rank 0"}
    assert exit_reason([*events, failure]) == "ValueError: of rank 0"


def test_a_recovery_is_no_restart() -> None:
    """Its downtime and the steps it has lost count, but more checkpoints would not help."""
    history = [
        {"time": 100.0, "event": "start", "step": 0},
        {"time": 120.0, "event": "save", "step": 10, "blocked_s": 0.5},
        {"time": 150.0, "event": "recovery", "step": 14, "lost_steps": 1, "seconds": 9.0},
    ]
    found = goodput(history, METRICS, 160.0)
    assert found.ratio == pytest.approx(30 / 60)
    assert (found.restarts, found.recoveries, found.lost_steps) == (0, 1, 1)
    assert found.optimal_interval_s is None
    assert "; 0 restarts, 1 lost rank replaced, 1 step lost" in str(found)


@pytest.mark.parametrize("stop_requested", [False, True])
def test_goodput_does_not_count_the_time_between_an_end_and_the_next_start(
    stop_requested: bool,
) -> None:
    end = {"event": "end", "step": 10, "stop_requested": stop_requested}
    history = [
        {"time": 0.0, "event": "start", "step": 0},
        {"time": 20.0, **end},
        {"time": 86_000.0, "event": "start", "step": 10},
        {"time": 86_030.0, "event": "failure", "step": 12, "cause": "a hang"},
        {"time": 86_040.0, "event": "start", "step": 10, "cause": "a hang"},  # 10 s of downtime
    ]
    assert goodput(history, METRICS, 86_060.0).wall_s == pytest.approx(20 + 60)
    # Once it has ended, a run's goodput stays.
    history.append({"time": 86_060.0, **end})
    assert goodput(history, METRICS, 1e6).wall_s == pytest.approx(20 + 60)
    assert goodput([], [], 10.0).wall_s == 0.0


def test_exit_reason_is_the_first_failure_after_the_last_start() -> None:
    start = {"time": 1.0, "event": "start", "step": 0}
    end = {"time": 2.0, "event": "end", "step": 9, "stop_requested": False}
    failure = {"time": 2.0, "event": "failure", "step": 3, "cause": "ValueError: no"}
    assert exit_reason([]) is None
    assert exit_reason([start]) == "ended without an error message, as by SIGKILL"
    assert exit_reason([start, failure]) == "ValueError: no"
    assert exit_reason([start, failure, {**failure, "cause": "lost"}]) == "ValueError: no"
    assert exit_reason([start, end]) is None
    assert exit_reason([start, {**end, "stop_requested": True}]) == "stop requested"


def test_a_requested_stop_is_not_a_failure() -> None:
    history = [
        {"time": 0.0, "event": "start", "step": 0},
        {"time": 5.0, "event": "save", "step": 10, "blocked_s": 1.0},
        {"time": 9.0, "event": "start", "step": 10, "cause": "stop requested"},
    ]
    assert goodput(history, METRICS, 10.0).optimal_interval_s is None


def test_truncated_lines_are_ignored(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.write("start", 0)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"time": 3.0, "eve\n')
    history.write("save", 5, blocked_s=0.1)
    assert [event["event"] for event in history.events()] == ["start", "save"]
    assert History(None).events() == []
