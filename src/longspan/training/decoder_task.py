"""The decoder of a run file as a task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from longspan.attention import patterns_of
from longspan.attention.packed import Packed
from longspan.config import Run
from longspan.costs import count_parameters, count_trained
from longspan.data import Prefetcher
from longspan.data.tokenizer import TOKENIZER, Tokenizer
from longspan.derived import derived_values, model_name
from longspan.device import autocast
from longspan.engines import DecoderSpec, Engine
from longspan.engines.optimizer import set_learning_rate
from longspan.engines.protocol import ReadTensor
from longspan.export.huggingface import weight_reader
from longspan.export.lora import base_reader
from longspan.export.side_files import is_tokenizer_of
from longspan.hf_config import read_folder_config
from longspan.models import new_decoder
from longspan.models.generation import encode_prompt
from longspan.nn import eval_mode
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.pipeline import ForwardContext, PipelinedDecoder
from longspan.tracking import Reporter
from longspan.training.evaluation import DecoderEvaluation, sample_text
from longspan.training.meter import Meter, meter_of
from longspan.training.schedule import learning_rate
from longspan.training.state import resume_key
from longspan.training.task import Show
from longspan.training.verified_data import open_verified_source


class DecoderTask:
    make_optimizer = None

    def __init__(self, run: Run, mesh: ParallelMesh, show: Show = lambda text: None) -> None:
        self._run = run
        self.source = open_verified_source(run, mesh, show)
        if self.source.tokenizer and run.track.prompt:  # fail now, not after hours of training
            encode_prompt(self.source.tokenizer, run.track.prompt)
        self.spec = DecoderSpec(new_decoder(run))
        self.resume_key = resume_key(run, self.source)

    def set_learning_rate(self, optimizer: Optimizer, step: int) -> None:
        set_learning_rate(optimizer, learning_rate(self._run.train, step))

    def frozen_weights(self) -> ReadTensor | None:
        return base_reader(self._run) if self._run.model.lora.rank else None

    def initial_weights(self) -> ReadTensor | None:
        if self._run.model.lora.rank:
            return self.frozen_weights()
        folder = self._run.train.init_from
        return weight_reader(Path(folder), self._run) if folder else None

    def open_data(self, mesh: ParallelMesh, device: torch.device) -> Prefetcher:
        return Prefetcher(self.source, self._run.train.seed, mesh.local_samples, device)

    def evaluation(
        self, engine: Engine, mesh: ParallelMesh, device: torch.device, precision: ForwardContext
    ) -> DecoderEvaluation:
        return DecoderEvaluation(engine, self.source, self._run.train, device, mesh, precision)

    def meter(self, device: torch.device, step: int, world: int) -> Meter:
        patterns = patterns_of(self._run.attention, self._run.model.layers)
        samples = [
            tuple(Packed(pattern, starts) for pattern in patterns)
            for starts in self.source.first_starts()
        ]
        by_source = self.source.samples_by_source
        return meter_of(self._run, samples or [patterns], device, step, world, by_source)

    def summary(self, engine: Engine, mesh: ParallelMesh, *, is_new: bool) -> dict[str, str]:
        run, module = self._run, engine.module
        pipeline = {"pipeline": module.describe()} if isinstance(module, PipelinedDecoder) else {}
        has_weights = is_new and run.train.init_from
        count = count_parameters(run.model)
        return {
            "model": f"{model_name(run)}, {count:,} parameters{_trained(run)}",
            "data": self.source.describe(),
            **derived_values(run, mesh.ranks),
            **pipeline,
            **({"weights": _weights_text(run, self.source.tokenizer)} if has_weights else {}),
        }

    def sample(
        self,
        engine: Engine,
        mesh: ParallelMesh,
        device: torch.device,
        reporter: Reporter,
        should_stop: Callable[[], bool],
    ) -> str | None:
        run, prompt = self._run, self._run.track.prompt
        splits_tokens = mesh.ranks["sequence"] > 1 or (
            run.layout.megatron_sequence_parallel and mesh.ranks["tensor"] > 1
        )
        if splits_tokens and prompt:
            reporter.print("no sample: one token cannot be split over ranks; use longspan generate")
            return None
        sample = partial(sample_text, engine.inference_model, self.source, prompt)
        with eval_mode(engine.model), autocast(run.train):
            return sample(run.train.seed, device, reporter, should_stop=should_stop)


def _trained(run: Run) -> str:
    trained = count_trained(run.model, run.train.freeze)
    if trained == count_parameters(run.model):
        return ""
    return f", {trained:,} of them trained{' (LoRA)' * (run.model.lora.rank > 0)}"


def _weights_text(run: Run, tokenizer: Tokenizer | None) -> str:
    """Where a new run's weights come from, and what it computes otherwise than their config."""
    folder = Path(run.train.init_from)
    changes = read_folder_config(folder).changes(run)
    if tokenizer and (folder / TOKENIZER).exists() and not is_tokenizer_of(folder, tokenizer):
        changes.append(f"the tokenizer {tokenizer.name} of the data instead of the folder's")
    return "; ".join([f"initialised from {folder}", *changes])
