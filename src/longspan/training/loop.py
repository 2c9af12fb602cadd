"""The training loop, top to bottom: settle, open, restore, write the folder, step, finish."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn

from longspan.checkpoint import CHECKPOINTS
from longspan.config import Run, derived_values
from longspan.data import Baseline, Sample, Source, batch_of, count_targets, open_source
from longspan.device import autocast, choose_device, resolve
from longspan.engines import Reader, open_engine
from longspan.engines.optimizer import set_learning_rate
from longspan.errors import Diverged, OutOfMemory, Stopped
from longspan.export.huggingface import reader_of
from longspan.faults import is_poisoned, reach
from longspan.models import count_parameters
from longspan.models.generation import Predictor, complete, encode_prompt
from longspan.parallel.activation_checkpointing import offloaded
from longspan.parallel.pipeline import Pipelined
from longspan.parallel.placement import Placement, placement
from longspan.parallel.world import World
from longspan.tracking import (
    HISTORY,
    History,
    MetricsFile,
    Reporter,
    cause_of_end,
    goodput,
    lines_of,
)
from longspan.training.folder import check_run_folder, open_run_folder
from longspan.training.guard import Guard
from longspan.training.memory import explain, is_out_of_memory, leave_hint, with_hint
from longspan.training.meter import Meter
from longspan.training.saving import Saver
from longspan.training.schedule import learning_rate
from longspan.training.state import State, newest_good, resume_key
from longspan.training.stopping import Requests
from longspan.training.watchdog import Watchdog

SAMPLE_TOKENS = 300
CAUSE_WIDTH = 160


@dataclass(frozen=True)
class Result:
    """What a finished run reached. Losses are nats per token."""

    run_dir: str
    step: int
    tokens: int
    loss: float | None
    validation_loss: float | None
    baseline: str | None
    baseline_loss: float | None
    tokens_per_s: float | None
    sample: str | None


def train(run: Run, run_dir: Path, *, resume: bool = False, world: World | None = None) -> Result:
    """Train `run` in `run_dir`, from its newest checkpoint if `resume` and there is one.

    With a `world` of several processes every one of them calls this, and all return the same.

    Raises UserError, before anything is written, where the run cannot start; Stopped, after a
    checkpoint is saved, on a request to stop; Diverged where the loss is no longer a number;
    OutOfMemory where a step does not fit.
    """
    world = world or World()
    if world.is_main:
        check_run_folder(run_dir, resume=resume)
    device = choose_device(run, world.local_rank)
    given = resolve(run, device)
    while True:
        fitting = with_hint(given, run_dir) if resume else given
        try:
            with placement(run.layout, world, device, run.train.hang_timeout_s) as placed:
                return _train(fitting, given, run_dir, device, placed, resume=resume)
        except OutOfMemory as error:
            if not leave_hint(fitting, run_dir):
                raise
            # Others may wait for this rank in a collective: the whole world starts again, or none.
            # And only PyTorch itself lets go of a model.
            if world.size > 1 or run.engine.name != "native":
                text = f"{error}\nwhen it is resumed, it goes on with half the micro-batch"
                raise OutOfMemory(text) from None
            print(f"longspan: {error}\ntrying again with half the micro-batch", file=sys.stderr)
        resume = True
        torch.cuda.empty_cache()


def _train(
    run: Run, given: Run, run_dir: Path, device: torch.device, placed: Placement, *, resume: bool
) -> Result:
    is_main = placed.world.is_main
    source = open_source(run.data, run.model)
    if source.tokenizer and run.track.prompt:
        encode_prompt(source.tokenizer, run.track.prompt)  # now, not after hours of training
    validation = source.validation_samples(run.train.eval_samples)
    baseline = source.baseline(validation) if validation else None

    torch.manual_seed(run.train.seed)
    engine = open_engine(run, placed, device, partial(forward_context, run))
    guard = Guard(run.train.grad_norm_spike, device)
    state = State(engine, placed, guard)
    trained_with = resume_key(run, source)
    reach("start")
    saved = newest_good(run_dir / CHECKPOINTS, placed) if resume else None
    if saved:
        state.restore(saved, run, trained_with)
    elif run.train.init_from:
        engine.load_weights(reader_of(Path(run.train.init_from), run))

    if is_main:
        open_run_folder(given, run_dir, device, source)
    meter = Meter(run, device, state.step, placed.world.size)
    metrics_file = run_dir / "metrics.jsonl" if is_main else None
    history = History(run_dir / HISTORY if is_main else None)
    with (
        failures_noted(History(run_dir / HISTORY), state, run, device),  # of any rank
        Requests(run_dir if is_main else None) as requests,
        Watchdog(run_dir, placed.world, run.train.hang_timeout_s, state.step) as watchdog,
        MetricsFile(metrics_file, step=state.step) as metrics,
        Reporter(steps=run.train.steps, done=state.step, silent=not is_main) as reporter,
    ):
        reporter.say(
            f"resuming at step {state.step} in {run_dir}" if saved else f"new run {run_dir}"
        )
        reporter.facts(describe(run, engine.module, source, placed.world.size))
        if not validation:
            reporter.say("no evaluation: the validation split holds less than one sample")
        lost = max(0, watchdog.steps_before - state.step)
        cause = cause_of_end(history.lines())
        ranks = placed.world.size
        history.write("start", state.step, lost_steps=lost, cause=cause, ranks=ranks)
        saver = Saver(run_dir / CHECKPOINTS, run.checkpoint, placed, reporter.say)
        ended = state.step >= run.train.steps
        while not ended:
            loss, grad_norm = train_step(state, placed, run, source, device)
            reach("step")
            meter.add(loss)
            stops, saves, *report = placed.any(*requests.look(), *saver.report())
            saver.proceed(*report)
            ended = stops or state.step == run.train.steps
            saves = saves or ended or saver.is_due(state.step)
            reporter.step(state.step)
            if saves or due(state.step, run.track.log_every):
                line = meter.line(state, grad_norm)
                metrics.write(line)
                reporter.metrics(line, meter.seconds_left)
                (streak,) = placed.most(int(guard.streak))
                if streak >= run.train.max_skipped_steps:
                    saver.finish()
                    text = state.roll_back(run_dir / CHECKPOINTS, run, trained_with, streak)
                    metrics.write({"step": state.step, "rolled_back": text})
                    history.write("rollback", state.step, lost_steps=watchdog.steps - state.step)
                    watchdog.steps = state.step
                    reporter.say(text)
                    ended = False
                    continue
                if ended and line["loss"] is None:
                    saver.finish()
                    raise Diverged(f"the loss is no number at step {state.step}: lower train.lr")
            with meter.paused():
                if saves:
                    blocked = saver.blocked_s
                    saver.begin(state, trained_with)
                    history.write("save", state.step, blocked_s=saver.blocked_s - blocked)
                if not ended and due(state.step, run.train.eval_every):
                    found = evaluate(engine.reader, validation, run, device, requests, placed)
                    report_validation(reporter, metrics, state.step, found, baseline)

        saver.finish_all()
        history.write("end", state.step, was_asked_to_stop=requests.stop)
        if is_main:
            lines = lines_of(run_dir / "metrics.jsonl")
            of_use = goodput(history.lines(), lines, time.time())
            reporter.say(str(of_use))
            metrics.write({"step": state.step, "goodput": of_use.share, **asdict(of_use)})
        validation_loss = evaluate(engine.reader, validation, run, device, requests, placed)
        if any(placed.any(requests.stop)):
            raise Stopped(
                f"stopped at step {state.step} of {run.train.steps}, checkpoint saved; go on with\n"
                f"  longspan train --resume {run_dir}"
            )
        report_validation(reporter, metrics, state.step, validation_loss, baseline)
        splits_tokens = placed.ranks["sequence"] > 1 or (
            run.layout.megatron_sequence_parallel and placed.ranks["tensor"] > 1
        )
        if splits_tokens and run.track.prompt:
            reporter.say("no sample: one token does not split over ranks; see longspan generate")
        sample = None if splits_tokens else sample_text(engine.reader, source, run, device)
    return Result(
        run_dir=str(run_dir),
        step=state.step,
        tokens=state.samples * run.data.context,
        loss=meter.last_loss,
        validation_loss=validation_loss,
        baseline=baseline.name if baseline else None,
        baseline_loss=baseline.nats if baseline else None,
        tokens_per_s=meter.median_rate,
        sample=sample,
    )


@contextmanager
def failures_noted(
    history: History, state: State, run: Run, device: torch.device
) -> Iterator[None]:
    """Why a run ends is in its history; a lack of memory is explained."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        cause = shorten(f"{type(error).__name__}: {error}", CAUSE_WIDTH)
        with suppress(OSError):
            history.write("failure", state.step, cause=cause)
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(error, state, run, device)) from None


def train_step(
    state: State, placed: Placement, run: Run, source: Source, device: torch.device
) -> tuple[Tensor, Tensor]:
    """One optimizer step; returns its loss per token and its gradient norm before clipping.

    The loss is the sum over all tokens of the step divided by their number, so how the step is
    cut into micro-batches, and those spread over ranks, does not enter.
    """
    train = run.train
    reach("data")
    indices = state.next_samples(train.global_batch)
    tokens_with_loss = max(1, sum(source.targets_in(train.seed, index) for index in indices))
    set_learning_rate(state.engine.optimizer, learning_rate(train, state.step))
    samples = [source.sample(train.seed, index) for index in placed.own(indices)]
    reach("backward")
    # The ranks' gradients are averaged and should be summed.
    share = math.nan if is_poisoned(state.step + 1) else placed.averaged_ranks / tokens_with_loss
    total = state.engine.backward(samples, torch.tensor(share, device=device))
    total /= placed.averaged_ranks
    placed.sum(total)
    reach("gradient norm")
    grad_norm = state.engine.step(partial(state.guard.judge, total))
    state.step += 1
    state.samples = indices[-1] + 1
    return total, grad_norm


@contextmanager
def forward_context(run: Run) -> Iterator[None]:
    """The precision of a forward pass in training, and where its activations wait."""
    with autocast(run), offloaded(run.train):
        yield


@torch.no_grad()
def evaluate(
    model: Reader,
    samples: list[Sample],
    run: Run,
    device: torch.device,
    requests: Requests,
    placed: Placement,
) -> float | None:
    """Nats per token over `samples`; None where there are none or a stop was asked for.

    Every rank goes through all of them.
    """
    total = 0.0
    for start in range(0, len(samples), run.train.micro_batch):
        reach("evaluation")
        if any(placed.any(requests.stop)):
            return None
        batch = batch_of(samples[start : start + run.train.micro_batch], device)
        with autocast(run):
            loss = model(placed.own_tokens(batch.tokens), placed.own_tokens(batch.targets))
        total += placed.sum_over_sequence(loss).item()
    return total / max(1, count_targets(samples)) if samples else None


def describe(run: Run, module: nn.Module, source: Source, world: int) -> dict[str, str]:
    """What is printed once at the start."""
    pipeline = {"pipeline": module.describe()} if isinstance(module, Pipelined) else {}
    return {
        "model": f"{run.model.preset}, {count_parameters(run.model):,} parameters",
        "data": source.describe(),
        **derived_values(run, world),
        **pipeline,
        **({} if run.engine.name == "native" else {"engine": run.engine.name}),
        "device": f"{run.train.device}, {run.train.precision}"
        + (", compiled" if run.train.compile else ""),
    }


def report_validation(
    reporter: Reporter,
    metrics: MetricsFile,
    step: int,
    loss: float | None,
    baseline: Baseline | None,
) -> None:
    if loss is None or baseline is None:
        return
    metrics.write({"step": step, "validation_loss": loss, baseline.name: baseline.nats})
    reporter.say(f"step {step}  validation loss {loss:.4f}  {baseline.name} {baseline.nats:.4f}")


def sample_text(model: Predictor, source: Source, run: Run, device: torch.device) -> str | None:
    """A continuation of `track.prompt`, where the data is text and the prompt is not empty."""
    if source.tokenizer is None or not run.track.prompt:
        return None
    with autocast(run):
        return complete(
            model,
            source.tokenizer,
            run.track.prompt,
            device=device,
            count=SAMPLE_TOKENS,
            context=run.data.context,
            seed=run.train.seed,
        )


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
