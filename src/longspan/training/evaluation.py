"""Evaluation on the validation split, and a text sample at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
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
from longspan.models.generation import complete
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
        self._targets = max(1, count_targets(self.samples))
        self._local = mesh.local_samples(pad(self.samples, mesh.data_ranks))
        self._engine, self._source, self._micro_batch = engine, source, train.micro_batch
        self._device, self._mesh, self._context = device, mesh, context

    @property
    def why_empty(self) -> str:
        return "" if self.samples else "the validation split holds less than one sample"

    @cached_property
    def baseline(self) -> Baseline | None:
        """The loss of a model without long context; None if there are no samples."""
        return self._source.baseline(self.samples) if self.samples else None

    def loss(self, requests: StopRequests) -> float | None:
        """Nats per token; None if there are no samples or a stop was requested."""
        if not self.samples:
            return None
        model = self._engine.model
        assert isinstance(model, Decoder)
        total = loss_sum(
            self._engine.inference_model,
            self._local,
            self._micro_batch,
            self._device,
            self._context,
            select_tokens=partial(local_tokens, model),
            should_stop=lambda: any(all_reduce_any(self._mesh, requests.stop)),
        )
        if total is None:
            return None
        # A pipeline's forward pass returns the loss on all its ranks.
        return float(all_reduce_loss(self._mesh, total, pipeline=False)) / self._targets

    def report(
        self, loss: float | None, step: int, reporter: Reporter, metrics: MetricsFile
    ) -> None:
        if loss is None or self.baseline is None:
            return
        name, nats = self.baseline.name, self.baseline.nats
        line = {"step": step, "validation_loss": loss, "baseline": name, "baseline_loss": nats}
        metrics.write(line)
        reporter.print(f"step {step}  validation loss {loss:.4f}  {name} {nats:.4f}")


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
            total += model(select_tokens(batch.tokens), select_tokens(batch.targets))
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
        device=device,
        count=SAMPLE_TOKENS,
        context=source.context,
        seed=seed,
    ):
        text += piece.text
        if should_stop():
            break
    return text
