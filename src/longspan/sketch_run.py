"""`longspan sketch`: convert a trained run to sketched or low-rank layers.

The result is an ordinary run folder with a checkpoint of step 0: it can be fine-tuned, sampled from
and exported. Training continues with the samples after those of the old run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longspan.checkpoint import (
    CHECKPOINTS,
    TensorShard,
    latest,
    open_checkpoint,
    read_key,
    save,
)
from longspan.checkpoint.format import MANIFEST
from longspan.config import Run, Sketch
from longspan.costs import linear_sizes
from longspan.data import Sample, Source, collate, count_targets, open_source
from longspan.device import autocast
from longspan.errors import UserError
from longspan.export.side_files import SIDE_FOLDER, copy_known_files
from longspan.files import sha256_of
from longspan.models import Decoder
from longspan.runfile import check_run_folder, load_run, parse_run, saved_run_file
from longspan.sketching import LowRankLinear, Report, SKLinear, sketch
from longspan.sketching.conversion import Method
from longspan.sketching.search import RankSearch, SearchResult
from longspan.trained import load_trained
from longspan.training.evaluation import loss_sum
from longspan.training.folder import open_run_folder
from longspan.training.state import SavedState, read_saved_state, resume_key, rng_states


@dataclass(frozen=True)
class TrainedRun:
    """A run with dense layers at its newest checkpoint, and its validation samples."""

    run_dir: Path
    run: Run
    model: Decoder
    step: int
    source: Source
    validation: list[Sample]

    def loss(self) -> float:
        """The validation loss, in nats per token."""
        device = self.model.norm.weight.device
        train, precision = self.run.train, partial(autocast, self.run.train)
        total = loss_sum(self.model, self.validation, train.micro_batch, device, precision)
        assert total is not None
        return float(total) / max(1, count_targets(self.validation))

    def batches(self, samples: int) -> list[tuple[Any, ...]]:
        """The first `samples` of the training data, one per batch, as the model's arguments."""
        device, seed = self.model.norm.weight.device, self.run.train.seed
        batches = [collate([self.source.sample(seed, i)]).to(device) for i in range(samples)]
        return [(batch.tokens, batch.targets, batch.documents) for batch in batches]


def open_trained(run_dir: Path, key_file: str = "") -> TrainedRun:
    run, model, step = load_trained(run_dir, key_file)
    if run.model.lora.rank:
        raise UserError(f"{run_dir} is a LoRA run: convert one without [model.lora]")
    if run.model.linear != "dense":
        raise UserError(
            f'{run_dir} already has model.linear = "{run.model.linear}": convert a run with '
            'model.linear = "dense"'
        )
    source = open_source(run.data, run.model)
    if run.data.verify and (verification := source.verification()):
        with verification:
            verification.wait()
    validation = source.validation_samples(run.train.eval_samples)
    if not validation:
        raise UserError(f"{run_dir} has no validation samples: set train.eval_samples > 0")
    return TrainedRun(run_dir, run, model, step, source, validation)


@dataclass(frozen=True)
class Conversion:
    """The cost of the converted layers, and the validation loss before and after."""

    report: Report
    loss_before: float
    loss_after: float
    out: Path | None

    def as_dict(self) -> dict[str, Any]:
        losses = {"validation_loss": {"before": self.loss_before, "after": self.loss_after}}
        return {**self.report.as_dict(), **losses, "run_dir": str(self.out) if self.out else None}

    def __str__(self) -> str:
        lines = [
            str(self.report),
            f"validation loss {self.loss_before:.4f} before, {self.loss_after:.4f} after",
        ]
        if self.out is not None:
            lines += [
                f"run folder: {self.out}",
                f"fine-tune it: longspan train --resume {self.out} train.steps=200",
            ]
        return "\n".join(lines)


def convert(
    trained: TrainedRun,
    out: Path | None,
    *,
    keep: float = 0.5,
    method: Method = "svd",
    layers: str = "*",
    terms: int = 1,
    ranks: Mapping[str, int] | None = None,
    calibrate: int = 0,
) -> Conversion:
    """Convert the linear layers of the blocks in place, and write the run to `out` if given.

    `ranks` maps layers to the rank of all terms together. `calibrate` is the number of training
    samples to fit the layers to.
    """
    if out is not None:
        check_run_folder(out, resume=False)
    before = trained.loss()
    try:
        report = sketch(
            trained.model,
            keep,
            method,
            matching_layers(trained.model, layers),
            num_terms=terms,
            rank=ranks,
            calibration=trained.batches(calibrate) if calibrate else None,
        )
    except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise UserError(str(error)) from error
    if report.after == report.before:
        notes = "; ".join(sorted({row.note for row in report.rows}))
        raise UserError(f"no layer would become smaller ({notes}): change --keep or --layers")
    after = trained.loss()
    if out is not None:
        _write(trained, out, "low_rank" if method == "svd" else "sketched", terms)
    return Conversion(report, before, after, out)


def search(
    trained: TrainedRun,
    *,
    keep: float,
    swaps: int,
    method: Method = "svd",
    layers: str = "*",
    terms: int = 1,
    calibrate: int = 0,
) -> SearchResult:
    """Search the rank of each layer; trials are stored in the run folder and reused."""
    newest = latest(trained.run_dir / CHECKPOINTS)
    assert newest is not None
    settings = {
        "checkpoint": f"{newest.name}, SHA-256 {sha256_of(newest / MANIFEST)}",
        "method": method,
        "layers": layers,
        "terms": terms,
        "calibrate": calibrate,
        "validation_samples": len(trained.validation),
    }
    ranks = RankSearch(
        trained.model,
        matching_layers(trained.model, layers),
        trained.loss,
        trained.run_dir / f"sketch-{method}",
        settings=settings,
        method=method,
        terms=terms,
        calibration=trained.batches(calibrate),
        title=trained.run_dir.name,
    )
    return ranks.run(keep, swaps)


def matching_layers(model: Decoder, pattern: str) -> list[str]:
    """The names of the blocks' nn.Linear layers that match a glob."""
    names = [n for n, m in model.blocks.named_modules(prefix="blocks") if isinstance(m, nn.Linear)]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise UserError(f"{pattern!r} matches no linear layer: use a glob such as {names[0]!r}")
    return found


def _write(trained: TrainedRun, out: Path, linear: str, terms: int) -> None:
    """Write a run folder whose checkpoint of step 0 holds the converted model."""
    model, source = trained.model, trained.source
    run = load_run(saved_run_file(trained.run_dir), world=None)
    sketch = Sketch(ranks=_ranks(model, run), terms=terms)
    # Factored layers shard the residual stream by features, not by tokens.
    layout = {"megatron_sequence_parallel": False}
    converted = {"linear": linear, "sketch": sketch}
    converted["from"] = run.model.folder or run.train.init_from
    run = run.model_copy(
        update={
            "model": run.model.model_copy(update=converted),
            "layout": run.layout.model_copy(update=layout),
            "train": run.train.model_copy(update={"init_from": ""}),
        }
    )
    run = parse_run(run.model_dump(mode="json", exclude_none=True), world=None)  # validate it
    newest = latest(trained.run_dir / CHECKPOINTS)
    assert newest is not None
    old = read_saved_state(open_checkpoint(newest))
    open_run_folder(run, out, torch.device("cpu"), source)
    copy_known_files(trained.run_dir / SIDE_FOLDER, out)
    weights = {f"model/{name}": p.detach().cpu() for name, p in model.named_parameters()}
    weights |= {f"rng/{name}": x for name, x in rng_states().items()}
    shards = {name: TensorShard.full(x) for name, x in weights.items()}
    key = resume_key(run, source)
    state = SavedState(samples=old.samples, skips=old.skips, scaler={}, resume_key=key)
    signing_key = read_key(run.checkpoint.key_file)
    try:
        save(out / CHECKPOINTS, 0, shards, state.model_dump(mode="json"), signing_key)
    except OSError as error:
        raise UserError(f"cannot write the run folder {out}: {error.strerror or error}") from error


def _ranks(model: Decoder, run: Run) -> dict[str, int]:
    """The rank of each layer's terms; one entry for all blocks if they agree."""
    ranks: dict[str, int] = {}
    blocks = run.model.layers
    for layer in linear_sizes(run.model):
        found = [_rank(model.get_submodule(f"blocks.{i}.{layer}")) for i in range(blocks)]
        names = ["*"] if len(set(found)) == 1 else [str(i) for i in range(blocks)]
        ranks |= {f"blocks.{i}.{layer}": r for i, r in zip(names, found, strict=False)}
    return ranks


def _rank(layer: nn.Module) -> int:
    if isinstance(layer, SKLinear):
        return layer.low_rank
    return layer.rank if isinstance(layer, LowRankLinear) else 0
