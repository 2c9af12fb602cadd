"""Evaluation on the validation split, and a text sample at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from longspan.config import Train
from longspan.data import Sample, Source, collate, count_targets
from longspan.engines import Engine, InferenceModel
from longspan.faults import fault_point
from longspan.models.generation import complete
from longspan.parallel.collectives import all_reduce_any, all_reduce_sequence
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext
from longspan.parallel.sequence import local_tokens
from longspan.tracking import MetricsFile, Reporter
from longspan.training.signals import StopRequests

SAMPLE_TOKENS = 300


class Evaluation:
    """The validation loss of an engine's model. Every rank evaluates all samples."""

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
        self.baseline = source.baseline(self.samples) if self.samples else None
        self._engine, self._micro_batch, self._device = engine, train.micro_batch, device
        self._mesh, self._context = mesh, context

    def loss(self, requests: StopRequests) -> float | None:
        """Nats per token; None if there are no samples or a stop was requested."""
        return validation_loss(
            self._engine.inference_model,
            self.samples,
            self._micro_batch,
            self._device,
            self._context,
            select_tokens=partial(local_tokens, self._engine.model),
            reduce=partial(all_reduce_sequence, self._mesh),
            should_stop=lambda: any(all_reduce_any(self._mesh, requests.stop)),
        )

    def report(
        self, loss: float | None, step: int, reporter: Reporter, metrics: MetricsFile
    ) -> None:
        if loss is None or self.baseline is None:
            return
        name, nats = self.baseline.name, self.baseline.nats
        metrics.write({"step": step, "validation_loss": loss, name: nats})
        reporter.print(f"step {step}  validation loss {loss:.4f}  {name} {nats:.4f}")


@torch.no_grad()
def validation_loss(
    model: InferenceModel,
    samples: list[Sample],
    micro_batch: int,
    device: torch.device,
    context: ForwardContext,
    *,
    select_tokens: Callable[[Tensor], Tensor] = lambda x: x,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Nats per token over `samples`; None if there are none, or once `should_stop` says so.

    `context`: makes the context of a forward pass, its autocast precision; `select_tokens`: this
    rank's tokens of a batch; `reduce`: sums the loss over sequence ranks.
    """
    total = 0.0
    with context():
        for start in range(0, len(samples), micro_batch):
            fault_point("evaluation")
            if should_stop():
                return None
            batch = collate(samples[start : start + micro_batch], device)
            loss = model(select_tokens(batch.tokens), select_tokens(batch.targets))
            total += reduce(loss).item()
    return total / max(1, count_targets(samples)) if samples else None


def sample_text(
    model: InferenceModel, source: Source, prompt: str, seed: int, device: torch.device
) -> str | None:
    """A continuation of `prompt`; None if it is empty or the data is not text."""
    if source.tokenizer is None or not prompt:
        return None
    return complete(
        model,
        source.tokenizer,
        prompt,
        device=device,
        count=SAMPLE_TOKENS,
        context=source.context,
        seed=seed,
    )
