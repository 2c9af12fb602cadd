"""The sinks: TensorBoard, Weights & Biases, MLflow and trackio.

Their packages are imported when a sink is opened, in its thread. Without an address or a key in the
environment each writes files on this machine only, and sends nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from longspan.tracking.sinks import OpenSink, SinkRun

MLFLOW_BATCH = 100
"""The most parameters that MLflow takes at once."""
MLFLOW_PARAM = 6000
"""The most characters of a parameter in MLflow."""


class TensorBoard:
    """Writes event files into the folder `tensorboard` of the run folder."""

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)
        if run.step:
            # TensorBoard forgets what an earlier start has written from this step on.
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=run.step + 1, session_log=start)
            self._writer.add_event(event)
        config = json.dumps(run.config, indent=1, ensure_ascii=False)
        text = "\n".join(f"    {line}" for line in config.splitlines())
        self._add(text_pb("run", text), run.step, time.time())

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        values = [self._summary.Value(tag=key, simple_value=x) for key, x in scalars.items()]
        self._add(self._summary(value=values), step, at)

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int, at: float) -> None:
        self._writer.add_event(self._event(wall_time=at, step=step, summary=summary))


class Wandb:
    """Logs to Weights & Biases; into the run folder only, without WANDB_API_KEY or WANDB_MODE."""

    def __init__(self, run: SinkRun) -> None:
        is_offline = not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"))
        if is_offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would use the network
        import wandb

        # wandb names a start's folder by its second; another start in that second would replace it.
        while list(run.folder.glob(f"wandb/*{time.strftime('%Y%m%d_%H%M%S')}-{run.id}")):
            time.sleep(0.1)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline" if is_offline else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to the server of MLFLOW_TRACKING_URI, or into the folder `mlruns` of the run folder."""

    def __init__(self, run: SinkRun) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (run.folder.resolve() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._metric, self._client = Metric, MlflowClient(address)
        stored = run.stored_id("mlflow")
        if stored:
            with suppress(MlflowException):  # it may be one of another server
                self._client.update_run(stored, status="RUNNING")
                self._id = stored
                return
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.store_id("mlflow", self._id)
        parameters = [Param(key, text[:MLFLOW_PARAM]) for key, text in _parameters(run.config)]
        for start in range(0, len(parameters), MLFLOW_BATCH):
            self._client.log_batch(self._id, params=parameters[start : start + MLFLOW_BATCH])

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        metrics = [self._metric(key, x, int(at * 1000), step) for key, x in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _parameters(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The values of a run file by their dotted names."""
    found = []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found += _parameters(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found


class Trackio:
    """Logs to trackio's folder on this machine, or to where its environment variables point."""

    def __init__(self, run: SinkRun) -> None:
        import trackio
        import trackio.run
        import trackio.utils

        # It prints to stdout, which carries the results of our commands.
        for module in (trackio, trackio.run, trackio.utils):
            module.print = _no_print
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",  # trackio resumes by name
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, scalars: Mapping[str, float], step: int, at: float) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _no_print(*_: object, **__: object) -> None:
    pass


OPENERS: dict[str, OpenSink] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
