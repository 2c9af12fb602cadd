"""A trained run of dense layers into one of sketched or low-rank layers.

The new run's folder is like any other, with one checkpoint, of step 0: it can be trained on,
sampled from and exported. Its data goes on where that of the old run ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longspan.checkpoint import CHECKPOINTS, Part, latest, open_checkpoint, save
from longspan.config import Run, Sketch
from longspan.data import Sample, Source, batch_of, open_source
from longspan.errors import UserError
from longspan.models import Decoder
from longspan.parallel.placement import Placement
from longspan.parallel.world import World
from longspan.runfile import load_run, parse_run, saved_run_file
from longspan.sketching import LowRankLinear, Report, SKLinear, sketch
from longspan.sketching.conversion import Method
from longspan.trained import load_trained
from longspan.training.folder import check_run_folder, open_run_folder
from longspan.training.loop import evaluate
from longspan.training.state import Scalars, resume_key, rng_states
from longspan.training.stopping import Requests


@dataclass(frozen=True)
class Trained:
    """A run of dense layers, at its newest checkpoint, and what to judge it by."""

    run_dir: Path
    run: Run
    model: Decoder
    step: int
    source: Source
    validation: list[Sample]

    def loss(self) -> float:
        """Nats per token over the validation samples."""
        alone, device = Placement(self.run.layout, World(), None), self.model.norm.weight.device
        with torch.no_grad():
            loss = evaluate(self.model, self.validation, self.run, device, Requests(None), alone)
        assert loss is not None
        return loss

    def batches(self, samples: int) -> list[tuple[Any, ...]]:
        """The first `samples` of the training data, as the model's arguments."""
        device, seed = self.model.norm.weight.device, self.run.train.seed
        batches = [batch_of([self.source.sample(seed, i)], device) for i in range(samples)]
        return [(batch.tokens, batch.targets) for batch in batches]


def open_trained(run_dir: Path) -> Trained:
    run, model, step = load_trained(run_dir)
    if run.model.linear != "dense":
        raise UserError(
            f'{run_dir} has model.linear = "{run.model.linear}" already: convert a run of dense '
            "layers, or train this one on"
        )
    source = open_source(run.data, run.model)
    validation = source.validation_samples(run.train.eval_samples)
    if not validation:
        raise UserError(f"{run_dir} has no validation samples to judge by: set train.eval_samples")
    return Trained(run_dir, run, model, step, source, validation)


@dataclass(frozen=True)
class Converted:
    """What a conversion costs and loses."""

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
                f"train it on: longspan train --resume {self.out} train.steps=200",
            ]
        return "\n".join(lines)


def convert(
    trained: Trained,
    out: Path | None,
    *,
    keep: float = 0.5,
    method: Method = "svd",
    layers: str = "*",
    terms: int = 1,
    ranks: Mapping[str, int] | None = None,
    calibrate: int = 0,
) -> Converted:
    """Convert the blocks' linear layers, in place, and write the run to `out` where it is given.

    `ranks`: of all terms together, by layer. `calibrate`: training samples to fit the layers to.
    """
    if out is not None:
        check_run_folder(out, resume=False)
    before = trained.loss()
    try:
        report = sketch(
            trained.model,
            keep,
            method,
            layers_of(trained.model, layers),
            num_terms=terms,
            rank=ranks,
            calibration=trained.batches(calibrate) if calibrate else None,
        )
    except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise UserError(str(error)) from error
    if report.after == report.before:
        remarks = "; ".join(sorted({row.remark for row in report.rows}))
        raise UserError(f"no layer would get smaller ({remarks}): change --keep or --layers")
    after = trained.loss()
    if out is not None:
        _write(trained, out, "low_rank" if method == "svd" else "sketched", terms)
    return Converted(report, before, after, out)


def layers_of(model: Decoder, pattern: str) -> list[str]:
    """The names of the blocks' dense layers that match."""
    names = [n for n, m in model.blocks.named_modules(prefix="blocks") if isinstance(m, nn.Linear)]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise UserError(f"{pattern!r} matches no linear layer; they have names such as {names[0]}")
    return found


def _write(trained: Trained, out: Path, linear: str, terms: int) -> None:
    """A run folder with the converted model as its checkpoint of step 0."""
    model, source = trained.model, trained.source
    run = load_run(saved_run_file(trained.run_dir), world=None)
    form = {"linear": linear, "sketch": Sketch(ranks=_ranks(model, run), terms=terms)}
    run = run.model_copy(
        update={
            "model": run.model.model_copy(update=form),
            "layout": run.layout.model_copy(
                update={"megatron_sequence_parallel": False}
            ),  # but by features
            "train": run.train.model_copy(update={"init_from": ""}),
        }
    )
    run = parse_run(run.model_dump(mode="json", exclude_none=True), world=None)  # by all rules
    newest = latest(trained.run_dir / CHECKPOINTS)
    assert newest is not None
    was = Scalars.model_validate(open_checkpoint(newest).state)
    open_run_folder(run, out, torch.device("cpu"), source)
    parts = {f"model/{name}": Part.whole(p.detach().cpu()) for name, p in model.named_parameters()}
    parts |= {f"rng/{name}": Part.whole(x) for name, x in rng_states().items()}
    trained_with = resume_key(run, source)
    state = Scalars(samples=was.samples, skips=was.skips, scaler={}, trained_with=trained_with)
    save(out / CHECKPOINTS, 0, parts, state.model_dump(mode="json"))


def _ranks(model: Decoder, run: Run) -> dict[str, int]:
    """The rank of each layer's terms, one line for all blocks where they are alike."""
    ranks: dict[str, int] = {}
    blocks = run.model.layers
    for layer in run.model.linear_sizes:
        found = [_rank(model.get_submodule(f"blocks.{i}.{layer}")) for i in range(blocks)]
        alike = len(set(found)) == 1
        names = ["*"] if alike else [str(i) for i in range(blocks)]
        ranks |= {f"blocks.{i}.{layer}": r for i, r in zip(names, found, strict=False)}
    return ranks


def _rank(layer: nn.Module) -> int:
    if isinstance(layer, SKLinear):
        return layer.low_rank
    return layer.rank if isinstance(layer, LowRankLinear) else 0
