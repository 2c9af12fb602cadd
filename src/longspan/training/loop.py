"""The training loop, top to bottom: set up, restore, write the run folder, step, finish."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch

from longspan.checkpoint import CHECKPOINTS, read_key
from longspan.config import Run
from longspan.device import autocast, check_fp8, choose_device, matmul_precision, resolve
from longspan.engines import open_engine
from longspan.errors import Diverged, OutOfMemory, PeerLost, Stopped
from longspan.export.side_files import copy_side_files
from longspan.faults import fault_point
from longspan.hardware import device_of
from longspan.locking import owned
from longspan.nn.products import chosen_products
from longspan.parallel.collectives import all_reduce_any, all_reduce_max
from longspan.parallel.mesh import ParallelMesh, open_mesh
from longspan.parallel.norms_by_layer import NormsByLayer
from longspan.parallel.world import World, world_of_environment
from longspan.progress import tolerant_stderr, waiting
from longspan.rules import takes_graphs
from longspan.runfile import check_run_folder
from longspan.torch_internals import end_compile_workers
from longspan.tracking import (
    HISTORY,
    History,
    MetricsFile,
    Reporter,
    check_installed,
    exit_reason,
    goodput,
    open_sinks,
    read_metrics,
)
from longspan.tracking.profiling import Profiler
from longspan.training.folder import open_run_folder
from longspan.training.guard import Guard
from longspan.training.out_of_memory import explain, halve_micro_batch, is_out_of_memory, with_hint
from longspan.training.predicted import Predicted, predict_for
from longspan.training.rank_stats import RankStats
from longspan.training.recovery import Recovery
from longspan.training.saving import Saver
from longspan.training.signals import StopRequests
from longspan.training.state import TrainState, newest_intact
from longspan.training.step import forward_context_of, train_step
from longspan.training.task import OpenTask, task_of_run
from longspan.training.watchdog import Watchdog, start_limit, time_limits

CAUSE_WIDTH = 160


@dataclass(frozen=True)
class Result:
    """What a finished run reached. Losses are in nats per token, or as a user's own loss has it."""

    run_dir: str
    step: int
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    baseline: str | None
    baseline_loss: float | None
    tokens_per_s: float | None
    sample: str | None


@tolerant_stderr()
def train(
    run: Run,
    run_dir: str | Path,
    *,
    resume: bool = False,
    world: World | None = None,
    open_task: OpenTask | None = None,
) -> Result:
    """Train `run` in `run_dir`, from its newest checkpoint if `resume` is true and there is one.

    In a `world` of several processes, by default the one that torchrun has set up, every one of
    them calls this, and all return the same. `load_run` must have checked the run for that many.
    `open_task` opens what is trained; by default it is what the run file says.

    Raises UserError, before anything is written, if the run cannot start; Stopped, after a
    checkpoint is saved, on a request to stop; Diverged if the loss is NaN; OutOfMemory if a step
    does not fit; SaveFailed if the last checkpoint cannot be written.
    """
    run_dir, world = Path(run_dir), world or world_of_environment()
    open_task = open_task or task_of_run
    if not world.is_main:
        with matmul_precision(run.train):
            return _train_until_it_fits(run, run_dir, world, open_task, resume=resume)
    check_installed(run.track.sinks)
    check_run_folder(run_dir, resume=resume)
    with owned(run_dir), matmul_precision(run.train):
        check_run_folder(run_dir, resume=resume)  # it may have been another's until now
        return _train_until_it_fits(run, run_dir, world, open_task, resume=resume)


def _train_until_it_fits(
    run: Run, run_dir: Path, world: World, open_task: OpenTask, *, resume: bool
) -> Result:
    """Train, again and again with half the micro-batch if it runs out of memory and may do so."""
    device = choose_device(run, world.local_rank)
    if run.train.gpu:  # refused by every rank, before anything is written
        device_of(run.train.gpu)
    check_fp8(run.train, device)
    given = resolve(run, device)
    recovery = Recovery(world)
    while True:
        fitting = with_hint(given, run_dir) if resume else given
        try:
            with (
                waiting("preparing model and data", quiet=not world.is_main) as preparing,
                start_limit(run.train.start_timeout_s) as started,
                chosen_products(given.train, device),
                open_mesh(run.layout, world, device, max(time_limits(run.train))) as mesh,
            ):

                def end_start() -> None:
                    preparing.stop()
                    started()

                return _train(
                    fitting,
                    given,
                    run_dir,
                    device,
                    mesh,
                    recovery,
                    open_task,
                    resume=resume,
                    show=preparing.update,
                    on_ready=end_start,
                )
        except OutOfMemory as error:
            if not halve_micro_batch(fitting.train, run_dir):
                raise
            # Other ranks may wait for this one in a collective, so the whole world restarts or
            # none does; and only the native engine frees its model.
            if world.size > 1 or run.engine.name != "native":
                text = f"{error}\nwhen resumed, the run uses half the micro-batch"
                raise OutOfMemory(text) from None
            print(f"longspan: {error}\nretrying with half the micro-batch", file=sys.stderr)
        except PeerLost:
            pass  # which frees the model and what else refers to process groups
        resume = True
        recovery.rejoin()
        torch.cuda.empty_cache()


def _train(
    run: Run,
    given: Run,
    run_dir: Path,
    device: torch.device,
    mesh: ParallelMesh,
    recovery: Recovery,
    open_task: OpenTask,
    *,
    resume: bool,
    show: Callable[[str], None],
    on_ready: Callable[[], None],
) -> Result:
    """`given` is the run file as the user wrote it; `run` may have a smaller micro-batch.

    `show` tells the user what takes long; `on_ready` is called before the first step.
    """
    is_main = mesh.world.is_main
    settings, checkpoints = run.train, run_dir / CHECKPOINTS
    task = open_task(run, mesh, show)
    torch.manual_seed(settings.seed)
    stats = RankStats(mesh, device)
    context = stats.forward_context(forward_context_of(settings))
    engine = open_engine(run, mesh, device, context, task.spec, task.make_optimizer)
    evaluation = task.evaluation(engine, mesh, device, partial(autocast, settings))
    guard = Guard(settings.grad_norm_spike, device)
    state = TrainState(
        engine,
        mesh,
        guard,
        task.resume_key,
        accepts_other_data=run.data.accept_changed,
        key=read_key(run.checkpoint.key_file),
        set_learning_rate=task.set_learning_rate,
        has_own_optimizer=bool(run.model.factory),
        frozen_weights=task.frozen_weights(),
    )
    fault_point("start")
    recovered = recovery.fill(state, checkpoints, run.checkpoint.every, settings.steps)
    saved = newest_intact(checkpoints, mesh, state.key) if resume and not recovered else None
    if saved:
        state.restore(saved)
    elif not recovered and (weights := task.initial_weights()):
        engine.load_weights(weights)

    if is_main:
        if not saved and not recovered:
            copy_side_files(given, run_dir)
        open_run_folder(given, run_dir, device, task.source, mesh.world.size)
    meter = task.meter(device, state.step, mesh.world.size)
    norms = NormsByLayer(engine.shapes, mesh, device) if run.track.per_layer_norms else None
    repeats_report = recovered is not None and recovered.repeats_report
    reported = state.step - repeats_report
    if recovered:
        meter.load(recovered.meter)
    predicted = predict_for(run, mesh.world.size, device) if is_main else None
    on_ready()
    with (
        _record_failure(History(run_dir / HISTORY), state, run, device),  # of any rank
        History(run_dir / HISTORY if is_main else None) as history,
        StopRequests(run_dir if is_main else None) as requests,
        Watchdog(run_dir, mesh.world, settings, state.step) as watchdog,
        open_sinks(
            run.track.sinks if is_main else (),
            run_dir,
            project=run.track.project,
            name=run.track.run_name,
            config=given.model_dump(mode="json", exclude_none=True),
            step=reported,
        ) as sinks,
        MetricsFile(
            run_dir / "metrics.jsonl" if is_main else None, step=reported, sinks=sinks
        ) as metrics,
        Reporter(steps=settings.steps, done=state.step, silent=not is_main) as reporter,
        Profiler(
            run_dir,
            run.track,
            device,
            rank=mesh.world.rank,
            world=mesh.world.size,
            show=reporter.print,
        ) as profiler,
        task.open_data(mesh, device) as data,
        Saver(checkpoints, run.checkpoint, mesh, reporter.print) as saver,
        recovery.watch(state, meter),
    ):
        if recovered:
            reporter.print(str(recovered))
            history.write("recovery", state.step, **recovered.event())
            saver.retry_at = state.step if recovered.has_lost_save else None
        else:
            reporter.print(
                f"resuming at step {state.step} in {run_dir}" if saved else f"new run {run_dir}"
            )
            summary = task.summary(engine, mesh, is_new=saved is None)
            planned = {} if predicted is None else {"predicted": str(predicted)}
            reporter.print_table({**summary, **_device_rows(run, mesh.world.size), **planned})
            if evaluation.why_empty:
                reporter.print(f"no evaluation: {evaluation.why_empty}")
            history.write(
                "start",
                state.step,
                lost_steps=max(0, watchdog.steps_before - state.step),
                cause=exit_reason(history.events()),
                ranks=mesh.world.size,
                **({"predicted": asdict(predicted)} if isinstance(predicted, Predicted) else {}),
            )
        ended = state.step >= settings.steps and not repeats_report
        stops = False
        while not ended:
            if not repeats_report:
                logs = _is_due(state.step + 1, run.track.log_every)
                loss, grad_norm = train_step(state, data, settings, device, norms if logs else None)
                fault_point("step")
                meter.add(loss, grad_norm)
            repeats_report = False
            stops, saves, *report = all_reduce_any(mesh, *requests.poll(), *saver.report())
            saver.proceed(*report)
            ended = stops or state.step == settings.steps
            saves = saves or ended or saver.is_due(state.step)
            reporter.step(state.step)
            if saves or _is_due(state.step, run.track.log_every):
                line = meter.line(state, stats, data.waited_s, norms)
                metrics.write(line)
                reporter.metrics(line, meter.seconds_left)
                (skipped,) = all_reduce_max(mesh, int(guard.skipped_in_a_row))
                if skipped >= settings.max_skipped_steps:
                    saver.finish()
                    text = state.roll_back(
                        checkpoints, skipped, settings.global_batch, settings.max_rollbacks
                    )
                    metrics.write({"step": state.step, "rolled_back": text})
                    history.write("rollback", state.step, lost_steps=watchdog.steps - state.step)
                    watchdog.steps = state.step
                    reporter.print(text)
                    ended = False
                    continue
                if ended and line["loss"] is None:
                    saver.finish()
                    raise Diverged(f"the loss is NaN at step {state.step}: lower train.lr")
            with meter.paused():
                if saves:
                    blocked = saver.blocked_s
                    saver.begin(state)
                    blocked = saver.blocked_s - blocked
                    meter.saved(blocked)
                    history.write("save", state.step, blocked_s=blocked)
                if not ended and _is_due(state.step, settings.eval_every):
                    evaluation.report(evaluation.loss(requests), state.step, reporter, metrics)
                profiler.step(state.step)
            state.reported = state.step

        saver.finish_all(state)
        history.write("end", state.step, stop_requested=stops or requests.stop)
        if is_main:
            _report_goodput(run_dir, history, state.step, reporter, metrics)
            if isinstance(predicted, Predicted):
                reporter.print(predicted.beside(meter.median_rate, meter.peak_bytes))
        validation_loss = evaluation.loss(requests)
        is_stopped, by_file = all_reduce_any(mesh, requests.stop, requests.by_file)
        if is_stopped:
            raise Stopped(
                f"stopped at step {state.step} of {settings.steps}, checkpoint saved; resume with\n"
                f"  longspan train --resume {shlex.quote(str(run_dir))}",
                by_signal=not by_file,
            )
        evaluation.report(validation_loss, state.step, reporter, metrics)
        if by_position := evaluation.by_position(requests):
            metrics.write({"step": state.step, "loss_by_position": by_position})
        sample = task.sample(
            engine, mesh, device, reporter, lambda: any(all_reduce_any(mesh, requests.stop))
        )
        end_compile_workers()
    baseline = evaluation.baseline
    return Result(
        run_dir=str(run_dir),
        step=state.step,
        tokens=None if run.model.factory else state.samples * run.data.context,
        loss=meter.last_loss,
        validation_loss=validation_loss,
        baseline=baseline.name if baseline else None,
        baseline_loss=baseline.nats if baseline else None,
        tokens_per_s=None if run.model.factory else meter.median_rate,
        sample=sample,
    )


def _device_rows(run: Run, world: int) -> dict[str, str]:
    train = run.train
    engine = {} if run.engine.name == "native" else {"engine": run.engine.name}
    compiled = ", compiled" if train.compile else ""
    fp8 = ", linear layers in fp8" if train.fp8 else ""
    has_graphs = train.device == "cuda" and takes_graphs(run, world)
    graphs = ", CUDA graphs" if has_graphs else ""
    return {**engine, "device": f"{train.device}, {train.precision}{fp8}{compiled}{graphs}"}


@contextmanager
def _record_failure(
    history: History, state: TrainState, run: Run, device: torch.device
) -> Iterator[None]:
    """Write why a run fails into its history; explain an out-of-memory error."""
    try:
        yield
    except (Stopped, PeerLost):
        raise
    except Exception as error:
        cause = shorten(f"{type(error).__name__}: {error}", CAUSE_WIDTH)
        history.write("failure", state.step, cause=cause)
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(error, state, run, device)) from None


def _report_goodput(
    run_dir: Path, history: History, step: int, reporter: Reporter, metrics: MetricsFile
) -> None:
    found = goodput(history.events(), read_metrics(run_dir / "metrics.jsonl"), time.time())
    reporter.print(str(found))
    metrics.write({"step": step, "goodput": found.ratio, **asdict(found)})


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
