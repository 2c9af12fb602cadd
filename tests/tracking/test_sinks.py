"""Sinks: what the trackers' own readers find, and sinks that raise, block or are slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from longspan.errors import UserError
from longspan.runfile import load_run
from longspan.tracking import MetricsFile, check_installed, open_sinks, read_metrics, sinks
from longspan.tracking.sinks import IDS, OpenSink, SinkRun, Sinks
from longspan.tracking.trackers import OPENERS
from longspan.training import train
from tests.harness import Ranks
from tests.training.test_loop import SMALL

ALL = ("tensorboard", "wandb", "mlflow", "trackio")
RUN = SinkRun(Path("run"), "id", "project", "name", {}, 0)


class Recorder:
    """A sink in memory that does something first with every line."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.first, self.closed, self.last = first, False, 0.0

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        self.first()
        self.lines.append((step, dict(scalars)))
        self.last = at

    def close(self) -> None:
        self.closed = True


def opener(sink: Recorder) -> OpenSink:
    return lambda run: sink


def test_a_sink_gets_the_numbers_of_every_line() -> None:
    sink = Recorder()
    with Sinks(RUN, {"a": opener(sink)}) as opened:
        opened.write({"step": 1, "time": 9.5, "loss": 2.5, "mfu": None, "text": "x", "is": True})
        opened.write({"step": 2, "grad_norms": {"blocks.0": 1.0, "head": 2}})
    assert sink.lines == [
        (1, {"loss": 2.5}),
        (2, {"grad_norms/blocks.0": 1.0, "grad_norms/head": 2.0}),
    ]
    assert sink.closed
    assert abs(sink.last - time.time()) < 600  # a line without a time was written now


def test_a_sink_that_raises_loses_its_own_lines_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError("no space left")

    def refuse(run: SinkRun) -> Recorder:
        raise ConnectionError("no network")

    bad, good = Recorder(fail), Recorder()
    openers = {"bad": opener(bad), "unopened": refuse, "good": opener(good)}
    with (
        Sinks(RUN, openers) as opened,
        MetricsFile(tmp_path / "metrics.jsonl", step=0, sinks=opened) as file,
    ):
        for step in range(1, 6):
            file.write({"step": step, "loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in good.lines] == [1, 2, 3, 4, 5]
    assert bad.closed
    printed = capsys.readouterr().err.splitlines()
    assert sorted(printed) == [
        "longspan: 5 lines of metrics did not reach bad",
        "longspan: 5 lines of metrics did not reach unopened",
        "longspan: bad: OSError: no space left; training continues",
        "longspan: unopened: ConnectionError: no network; training continues",
    ]


def test_a_sink_that_blocks_holds_up_neither_training_nor_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_PENDING", 10)
    monkeypatch.setattr(sinks, "CLOSE_S", 2.0)
    free, taken = threading.Event(), threading.Event()

    def block() -> None:
        taken.set()
        free.wait()

    blocked, good = Recorder(block), Recorder()
    opened = Sinks(RUN, {"blocked": opener(blocked), "good": opener(good)})
    opened.write({"step": 1})
    assert taken.wait(60)
    for step in range(2, 102):  # returns though `blocked` takes none
        opened.write({"step": step})
        while not good.lines or good.lines[-1][0] < step:
            time.sleep(0.001)
    opened.__exit__()
    assert [step for step, _ in good.lines] == list(range(1, 102))
    assert not blocked.lines
    assert capsys.readouterr().err.splitlines() == [
        "longspan: blocked has not finished within 2 s and is left behind",
        "longspan: 100 lines of metrics did not reach blocked",
    ]
    free.set()


def test_a_slow_sink_gets_what_its_queue_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_PENDING", 4)
    gate = threading.Event()
    slow = Recorder(gate.wait)
    with Sinks(RUN, {"slow": opener(slow)}) as opened:
        for step in range(50):
            opened.write({"step": step})
        gate.set()
    # The queue's four, and one that the thread may have taken before it was full.
    taken = [step for step, _ in slow.lines]
    assert taken[:4] == [0, 1, 2, 3]
    assert len(taken) in (4, 5)
    lost = 50 - len(taken)
    assert capsys.readouterr().err == f"longspan: {lost} lines of metrics did not reach slow\n"


def test_a_run_has_one_id_and_a_copy_in_its_folder(tmp_path: Path) -> None:
    found = []

    def note(run: SinkRun) -> Recorder:
        found.append(run)
        run.store_id("mlflow", "m1")
        return Recorder()

    for step in (0, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(OPENERS, "wandb", note)
            open_sinks(("wandb",), tmp_path, project="p", name="", config={}, step=step).__exit__()
    first, second = found
    assert first.id == second.id == json.loads((tmp_path / IDS).read_text())["run"]
    assert first.stored_id("mlflow") == "m1"
    assert (first.name, first.step, second.step) == (tmp_path.name, 0, 7)


def test_unknown_and_missing_sinks_are_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = r'track\.sinks\.0 .*"mlflow" or "trackio", got "wanbd"; did you mean "wandb"'
    with pytest.raises(UserError, match=message):
        load_run(None, ['track.sinks=["wanbd"]'])
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb mlflow-skinny, or remove them"):
        check_installed(("wandb", "mlflow"))
    check_installed(())


def test_a_run_trains_on_whatever_its_sinks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Recorder:
        raise RuntimeError("server error 500")

    free = threading.Event()
    monkeypatch.setattr(sinks, "CLOSE_S", 0.3)
    monkeypatch.setattr(sinks, "MAX_PENDING", 2)
    broken = {
        "tensorboard": fail,
        "wandb": opener(Recorder(free.wait)),
        "mlflow": opener(Recorder(fail)),
        "trackio": opener(slow := Recorder(lambda: time.sleep(0.01))),
    }
    for name, kind in broken.items():
        monkeypatch.setitem(OPENERS, name, kind)
    options = [*SMALL, "train.steps=12", "data.source=recall", "data.recall_pairs=8"]
    train(load_run(None, options), tmp_path / "plain")
    capsys.readouterr()
    train(load_run(None, [*options, f"track.sinks={list(ALL)}"]), tmp_path / "broken")
    printed = capsys.readouterr().err
    plain, tracked = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "broken")
    )
    assert len(plain) == len(tracked) > 12
    for one, other in zip(plain, tracked, strict=True):
        assert (one["step"], one.get("loss")) == (other["step"], other.get("loss"))
    assert slow.lines
    assert "tensorboard: RuntimeError: server error 500; training continues" in printed
    assert "mlflow: RuntimeError: server error 500; training continues" in printed
    assert "wandb has not finished within 0.3 s and is left behind" in printed
    free.set()


LINES = [{"step": step, "loss": 1 / step, "norms": {"blocks.0": 2.0 * step}} for step in (1, 2, 3)]


def feed_all(rank: int, world: int, folder: str, trackio: str) -> None:
    """Two starts of a run: three lines, then, from step 2 on, two more."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    os.environ["TRACKIO_DIR"] = trackio
    for start, lines in ((0, LINES), (2, [{"step": 3, "loss": 9.0}, {"step": 4, "loss": 8.0}])):
        with open_sinks(
            ALL,
            Path(folder),
            project="p",
            name="n",
            config={"train": {"steps": 4, "name": "é"}},
            step=start,
        ) as opened:
            for line in lines:
                opened.write(line)


def output_of(*command: str, **environment: str) -> str:
    program = str(Path(sys.executable).parent / command[0])
    return subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    ).stdout


def test_each_tracker_reads_what_its_sink_has_written(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trackio_folder: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    ranks.run(feed_all, 1, str(folder), str(trackio_folder))
    ids = json.loads((folder / IDS).read_text())

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    # The second start has repeated step 3, so TensorBoard forgets the first one's.
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1), (2, 0.5), (3, 9), (4, 8)]
    assert [e.value for e in events.Scalars("norms/blocks.0")] == [2, 4]
    assert "é" in str(events.Tensors("run")[0].tensor_proto.string_val[0], "utf-8")

    files = sorted((folder / "wandb").glob(f"offline-run-*-{ids['run']}/run-{ids['run']}.wandb"))
    assert len(files) == 2
    printed = [output_of("wandb", "leet", "inspect", "--json", str(file)) for file in files]
    records = [json.loads(line) for text in printed for line in text.splitlines()]
    assert {r["run"]["run_id"] for r in records if r["type"] == "run"} == {ids["run"]}
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    expected = [(1, 1), (2, 0.5), (3, 1 / 3), (3, 9), (4, 8)]
    assert [(item["_step"], item["loss"]) for item in items] == expected
    assert items[1]["norms/blocks.0"] == 4

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_id, run.info.status, run.info.run_name) == (ids["mlflow"], "FINISHED", "n")
    assert run.data.params == {"train.steps": "4", "train.name": "é"}
    metrics = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert metrics == expected

    name = f"n-{ids['run']}"
    command = ["trackio", "get", "metric", "--project", "p", "--run", name, "--metric", "loss"]
    text = output_of(*command, "--json", TRACKIO_DIR=str(trackio_folder))
    values = json.loads(text)["values"]
    assert [(v["step"], v["value"]) for v in values] == expected
