"""What a report reads, from sound, truncated and hostile files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longspan.config import Attention
from longspan.errors import UserError
from longspan.reporting.charts import binned, draw
from longspan.reporting.data import Metrics, RunData, read_input, read_run
from longspan.reporting.pictures import (
    Span,
    duration,
    layout_picture,
    reaches,
    spans,
    timeline,
)
from longspan.reporting.sections import differences, ranks
from longspan.runfile import load_run
from longspan.tracking import goodput, read_metrics
from tests.reporting.runs import history, metrics, write_lines, write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "first"))
    lines = read_metrics(tmp_path / "first" / "metrics.jsonl")
    assert run.name == "first"
    assert run.problems == []
    assert run.state.name == "finished"
    assert run.step == 100
    assert run.metrics.values("loss").tolist() == [x["loss"] for x in lines if "loss" in x]
    assert run.metrics.axis("tokens", "validation_loss").tolist() == [
        x["step"] * 1024 for x in lines if "validation_loss" in x
    ]
    spent = run.metrics.axis("time", "loss")
    assert spent[-1] == pytest.approx(sum(1024 / x["tokens_per_s"] for x in lines if "loss" in x))
    assert run.goodput == goodput(run.events, lines, 1100.0)


def test_wall_time_is_the_axis_where_lines_have_one() -> None:
    found = Metrics([{"step": 1, "loss": 3, "time": 50.0}, {"step": 2, "loss": 2, "time": 80.5}])
    assert found.axis("time", "loss").tolist() == [0, 30.5]
    evaluated = Metrics([{"step": 1, "validation_loss": 3}, {"step": 2, "loss": 2, "time": 1e9}])
    assert evaluated.axis("time", "validation_loss").tolist() == [0]
    assert evaluated.axis("time", "loss").tolist() == [0]


def test_hostile_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    deep = '{"step": 1, "a": ' + "[" * 100_000 + "}"
    bad = ["", "null", "[1]", '{"step": true}', '{"step": -1}', '{"step": 1e3}', deep, "\udcff"]
    huge = f'{{"step": 1, "loss": 1e999, "huge": {10**400}}}'
    good = [huge, '{"step": 2, "loss": 4, "x": {}}']
    text = "\n".join([*bad, *good, '{"step": 3, "loss": 2'])
    (folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    (folder / "history.jsonl").write_text('{"time": "now", "event": 3}\n{"time": 1e400}\nx')
    (folder / "run.toml").write_text("[train\n")
    (folder / "env.json").write_text("[" * 100_000)
    run = read_run(folder)
    assert run.metrics.lines == 2
    assert run.metrics.values("loss").tolist()[1:] == [4]
    assert np.isnan(run.metrics.values("loss")[0])
    assert run.metrics.names == ["loss"]
    assert run.state.name == "not started"
    assert run.run is None
    text = "\n".join(run.problems)
    assert "9 lines without a step left out" in text
    assert "run.toml is not valid TOML" in text
    assert "env.json" in text


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    assert "not a regular file" in "".join(read_run(folder).problems)


@pytest.mark.parametrize(
    ("last", "age_s", "state"),
    [
        (("end", {"stop_requested": True}), 1, "stopped"),
        (("failure", {"cause": "OSError: disk"}), 1, "failed"),
        (("save", {"blocked_s": 0.1}), 1, "running"),
        (("save", {"blocked_s": 0.1}), 60, "failed"),
    ],
)
def test_the_state_of_a_run(
    tmp_path: Path, last: tuple[str, dict[str, object]], age_s: int, state: str
) -> None:
    start = (1000.0, "start", 0, {"lost_steps": 0, "cause": None, "ranks": 2})
    events = history(start, (1010.0, last[0], 5, last[1]))
    run = read_run(write_run(tmp_path / "run", events=events))
    run.heartbeat = run.now - age_s
    assert run.state.name == state
    assert run.ranks == 2


def test_bins_keep_every_extreme() -> None:
    values = np.random.default_rng(0).normal(size=200_003)
    values[123_457], values[77], values[201:402] = 1e6, -1e6, np.nan
    values[7] = np.nan
    mean, low, high = binned(values)
    assert len(mean) <= 1000
    assert np.nanmax(high) == 1e6
    assert np.nanmin(low) == -1e6
    size = 201  # ⌈200,003 / 1,000⌉
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    assert np.isnan(mean[1])  # a bin of only NaN
    for got, want in ((mean, np.nanmean), (low, np.nanmin), (high, np.nanmax)):
        expected = [want(part) if np.isfinite(part).any() else np.nan for part in parts]
        np.testing.assert_allclose(got, expected)


def test_long_curves_are_binned_and_short_ones_are_not(tmp_path: Path) -> None:
    long = read_run(write_run(tmp_path / "long", metrics(5_000)))
    short = read_run(write_run(tmp_path / "short"))
    charts = {chart["id"]: chart for chart in draw([long, short]).charts}
    loss, _, _, other, *_ = charts["loss"]["series"]
    assert loss["per_point"] == 5
    assert max(loss["high"]) == pytest.approx(long.metrics.values("loss").max(), rel=1e-5)
    assert other["low"] is None
    assert "mfu" not in charts  # null on every line
    assert not any("skipped" in chart["title"].lower() for chart in charts.values())  # always 0


def test_a_metric_without_a_place_gets_a_chart_of_its_own() -> None:
    line = {"step": 1, "grad_norms": {"embedding": 1.0, "blocks.0": 2.0}, "my_number": 300}
    charts = draw([RunData(Path("run"), Metrics([line, {**line, "step": 2}]))]).charts
    found = {chart["title"]: [s["label"] for s in chart["series"]] for chart in charts}
    assert found == {
        "Gradient norm of each layer": ["embedding", "blocks.0"],
        "My number": ["my number"],
    }


def test_charts_that_are_left_out_are_counted() -> None:
    lines = [{"step": step, **{f"mine_{n}": 1.0 for n in range(43)}} for step in (1, 2)]
    charts = draw([RunData(Path("run"), Metrics(lines))]).charts
    others = [chart for chart in charts if chart["id"].startswith("other-")]
    assert len(others) == 40
    assert others[-1]["note"] == "3 more charts are left out"


def test_only_a_loss_of_tokens_is_in_nats_per_token() -> None:
    lines = [{"step": 1, "loss": 2.0, "tokens": 5}, {"step": 1, "loss": 2.0, "samples": 5}]
    runs = [RunData(Path("run"), Metrics([line])) for line in lines]
    assert draw(runs[:1]).charts[0]["unit"] == "nats per token"
    assert draw(runs[1:]).charts[0]["unit"] == draw(runs).charts[0]["unit"] == ""


def test_the_spread_over_ranks_is_the_band_and_the_slow_rank_is_named(tmp_path: Path) -> None:
    lines = [
        {
            "step": step,
            "loss": 1.0,
            "step_time_s": 2.0,
            "step_time_s_min": 1.0,
            "step_time_s_max": 3.0 + step,
            **({"slowest_rank": 5, "slowest_in": "data"} if step > 2 else {}),
        }
        for step in (1, 2, 3, 4)
    ]
    start = {"time": 1.0, "event": "start", "step": 0, "ranks": 8}
    run = RunData(Path("run"), Metrics(lines), [{**start, "lost_steps": 0, "blocked_s": 0}])
    charts = {chart["id"]: chart for chart in draw([run]).charts}
    (series,) = charts["times"]["series"]
    assert (series["low"], series["y"], series["high"]) == ([1] * 4, [2] * 4, [4, 5, 6, 7])
    assert charts["slowest"]["series"][0]["y"] == [5, 5]
    assert not [name for name in charts if name.startswith("other")]
    text = re.sub("<[^>]+>", " ", ranks(run) or "").split()
    assert " ".join(text) == (
        "Ranks that made steps much longer by themselves, on 4 lines: rank slow in lines "
        "rank 5 data 2 "
        "In the charts a line is the mean over ranks, a band their minimum and maximum."
    )


def test_the_spans_of_a_run_that_failed_and_was_resumed() -> None:
    events = history(
        (0.0, "start", 0, {"lost_steps": 0}),
        (40.0, "save", 40, {"lost_steps": 0}),
        (60.0, "failure", 60, {"lost_steps": 0}),
        (70.0, "start", 40, {"lost_steps": 20}),
        (90.0, "end", 60, {"lost_steps": 0}),
        (100.0, "start", 60, {"lost_steps": 0}),
    )
    assert spans(events, 130.0) == [
        Span("running", 0, 60),
        Span("down", 60, 70),
        Span("lost", 40, 60),
        Span("running", 70, 90),
        Span("off", 90, 100),
        Span("running", 100, 130),
    ]
    killed = [event for event in events if event["event"] != "failure"]
    assert spans(killed, 130.0)[:2] == [Span("running", 0, 60), Span("down", 60, 70)]
    assert [duration(s) for s in (4.23, 200, 18_720, 273_600)] == [
        "4.2 s",
        "3 min 20 s",
        "5 h 12 min",
        "3 d 4 h",
    ]


def test_pictures_of_huge_runs_are_small() -> None:
    ranks = 1 << 24
    run = load_run(None, [f"train.global_batch={ranks}"], world=ranks)
    layout = layout_picture(run, ranks)
    assert layout.count("<b>rank ") == 64
    assert f"{ranks - 64:,} more ranks" in layout
    starts = [(2.0 * i, "start", 5, {"lost_steps": 3.0}) for i in range(30_000)]
    saves = [(2.0 * i + 1, "save", 9, {"lost_steps": 0.0}) for i in range(30_000)]
    line = timeline(history(*sorted([*starts, *saves])), 1e5)
    assert line is not None
    assert len(line) < 500_000
    attention = Attention(kind="dense")
    assert reaches(attention, 1 << 40, 8, 2) == [1 << 40] * 2


def test_only_what_differs_is_in_the_difference() -> None:
    first = {"train": {"lr": 0.1, "steps": 5}, "attention": {"kind": "dense"}}
    second = {"train": {"lr": 0.2, "steps": 5}, "data": {"context": 8}}
    assert differences([first, second]) == {
        "train.lr": ["0.1", "0.2"],
        "attention.kind": ['"dense"', "–"],
        "data.context": ["–", "8"],
    }


def test_what_is_no_input_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    for name, text in {
        "other.json": r'expected the JSON of longspan plan --json.*got an object with.*"a"',
        "empty": "is not a run folder: it has none of metrics.jsonl",
        "missing": "does not exist",
    }.items():
        with pytest.raises(UserError, match=text):
            read_input(tmp_path / name)


def test_reading_a_run_imports_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from longspan.reporting.data import read_run\n"
        f"assert read_run(Path({str(folder)!r})).step == 100; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_of_other_commands_are_recognised(tmp_path: Path) -> None:
    rows = [{"kind": "a", "tokens": n, "both_ms": 2.0 * n} for n in (1, 2)]
    for kind, content in {
        "plan": {"gpus": 1, "stages": [], "parameters": 3, "derived": {}},
        "drill": {"outcomes": [], "passed": True, "same_bytes": True},
        "bench": {"machine": "CPU", "setting": {}, "rows": rows},
    }.items():
        (tmp_path / "x.json").write_text(json.dumps(content))
        found = read_input(tmp_path / "x.json")
        assert getattr(found, "kind", "") == kind


def test_a_file_of_lines_is_read_up_to_its_bound(tmp_path: Path) -> None:
    from longspan.files import json_lines

    write_lines(tmp_path / "x.jsonl", [{"step": i} for i in range(10)])
    size = len('{"step": 0}\n')
    assert list(json_lines(tmp_path / "x.jsonl", 3 * size + 2))[:3] == [
        {"step": 0},
        {"step": 1},
        {"step": 2},
    ]
    assert len(list(json_lines(tmp_path / "x.jsonl", 3 * size + 2))) == 4  # the last is cut: None
