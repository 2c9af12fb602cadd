"""Evaluation on the validation split, and a text sample at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from longspan.config import Train
from longspan.constants import IGNORE_INDEX
from longspan.data import Baseline, Sample, Source, collate, count_targets
from longspan.engines import Engine, InferenceModel
from longspan.faults import fault_point
from longspan.models import Decoder
from longspan.models.generation import Sampling, complete
from longspan.nn import eval_mode
from longspan.parallel.collectives import all_reduce_any, all_reduce_loss
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.parallel.sequence import local_tokens
from longspan.tracking import MetricsFile, Reporter
from longspan.training.signals import StopRequests

SAMPLE_TOKENS = 100
"""Fixed, so that a run gives the same sample on any machine, and few, so that it takes seconds."""


class DecoderEvaluation:
    """The validation loss of an engine's model. Data-parallel ranks share the samples."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        train: Train,
        device: torch.device,
        mesh: ParallelMesh,
        context: ForwardContext,
    ) -> None:
        self.samples = source.validation_samples(train.eval_samples)
        self._targets = count_targets(self.samples)
        self._local = mesh.local_samples(pad(self.samples, mesh.data_ranks))
        self._engine, self._source, self._micro_batch = engine, source, train.micro_batch
        self._device, self._mesh, self._context = device, mesh, context

    @property
    def why_empty(self) -> str:
        if not self.samples:
            return "the validation split holds less than one sample"
        return "" if self._targets else "no token of the validation samples has a loss"

    @cached_property
    def baseline(self) -> Baseline | None:
        """The loss of a model without long context; None if there are no targets."""
        return self._source.baseline(self.samples) if self._targets else None

    def loss(self, requests: StopRequests) -> float | None:
        """Nats per token; None if there are no targets or a stop was requested."""
        if not self._targets:
            return None
        return self._mean(self._local, self._targets, requests)

    def by_position(self, requests: StopRequests) -> dict[str, float]:
        """The loss by position in the context, "first-last" as keys; empty as `loss` is None.

        The ranges double in length, as later tokens differ less. Each takes one forward pass of
        one micro-batch per rank, in which the targets of the others are ignored: any layout can.
        """
        chosen = self.samples[: self._mesh.data_ranks * self._micro_batch]
        found = {}
        for first, stop in position_ranges(len(chosen[0].tokens)) if chosen else ():
            kept = [_only_targets_in(sample, first, stop) for sample in chosen]
            if not (targets := count_targets(kept)):
                continue
            local = self._mesh.local_samples(pad(kept, self._mesh.data_ranks))
            if (loss := self._mean(local, targets, requests)) is None:
                return {}
            found[f"{first}-{stop - 1}"] = loss
        return found

    def _mean(self, local: Sequence[Sample], targets: int, requests: StopRequests) -> float | None:
        """The loss per target of samples, of which each rank has its own; None after a stop."""
        model = self._engine.model
        assert isinstance(model, Decoder)
        with eval_mode(model):
            total = loss_sum(
                self._engine.inference_model,
                local,
                self._micro_batch,
                self._device,
                self._context,
                select_tokens=partial(local_tokens, model),
                should_stop=lambda: any(all_reduce_any(self._mesh, requests.stop)),
            )
        if total is None:
            return None
        # A pipeline's forward pass returns the loss on all its ranks.
        return float(all_reduce_loss(self._mesh, total, pipeline=False)) / targets

    def report(
        self, loss: float | None, step: int, reporter: Reporter, metrics: MetricsFile
    ) -> None:
        if loss is None or self.baseline is None:
            return
        name, nats = self.baseline.name, self.baseline.nats
        line = {"step": step, "validation_loss": loss, "baseline": name, "baseline_loss": nats}
        metrics.write(line)
        reporter.print(f"step {step}  validation loss {loss:.4f}  {name} {nats:.4f}")


def position_ranges(context: int) -> list[tuple[int, int]]:
    """Ranges of positions, each twice as long as those before it together: [0, 1/128), …, [1/2, 1).

    A short context has fewer: none is empty.
    """
    edges = sorted({0, *(context >> power for power in range(8))})
    return list(pairwise(edges))


def _only_targets_in(sample: Sample, first: int, stop: int) -> Sample:
    positions = np.arange(len(sample.tokens))
    if sample.documents is not None:  # those in the document
        is_first = np.diff(sample.documents, prepend=sample.documents[0] - 1) != 0
        positions = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    is_kept = (positions >= first) & (positions < stop)
    return replace(sample, targets=np.where(is_kept, sample.targets, IGNORE_INDEX))


def pad(samples: list[Sample], multiple: int) -> list[Sample]:
    """`samples` and samples without targets, up to a multiple.

    So every rank runs the same number of forward passes, in which FSDP all-gathers parameters.
    """
    count = -len(samples) % multiple
    if not count:
        return samples
    empty = replace(samples[0], targets=np.full_like(samples[0].targets, IGNORE_INDEX))
    return [*samples, *[empty] * count]


@torch.no_grad()
def loss_sum(
    model: nn.Module | InferenceModel,
    samples: Sequence[Sample],
    micro_batch: int,
    device: torch.device,
    context: ForwardContext,
    *,
    select_tokens: Callable[[Tensor], Tensor] = lambda x: x,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """The summed cross-entropy of `samples`, a float64 scalar; None once `should_stop` says so.

    `context`: makes the context of a forward pass, its autocast precision; `select_tokens`: this
    rank's tokens of a batch.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    with context():
        for start in range(0, len(samples), micro_batch):
            fault_point("evaluation")
            if should_stop():
                return None
            batch = collate(samples[start : start + micro_batch]).to(device)
            tokens, targets = select_tokens(batch.tokens), select_tokens(batch.targets)
            total += model(tokens, targets, batch.documents)
    return total


def sample_text(
    model: nn.Module | InferenceModel,
    source: Source,
    prompt: str,
    seed: int,
    device: torch.device,
    reporter: Reporter,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> str | None:
    """A continuation of `prompt`, cut short once `should_stop` says so; announced, since it may
    take seconds. None if the prompt is empty or the data is not text.
    """  # fmt: skip
    if source.tokenizer is None or not prompt:
        return None
    reporter.print(f"generating a sample of {SAMPLE_TOKENS} tokens")
    text = ""
    for piece in complete(
        cast(InferenceModel, model),
        source.tokenizer,
        prompt,
        Sampling(SAMPLE_TOKENS, seed=seed),
        device=device,
        context=source.context,
    ):
        text += piece.text
        if should_stop():
            break
    return text
