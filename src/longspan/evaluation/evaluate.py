"""Evaluate a trained model: its ranks share samples and trials, and all have the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from longspan.config import Layout, Run
from longspan.data import Source, open_source
from longspan.data.tokenizer import Tokenizer
from longspan.device import autocast, choose_device
from longspan.errors import UserError
from longspan.evaluation.losses import Losses, in_order, sample_loss
from longspan.evaluation.recall import Outcome, accuracies, cells, run_cell
from longspan.export.side_files import is_tokenizer_of
from longspan.hf_config import read_folder_config
from longspan.nn import eval_mode
from longspan.parallel.mesh import ParallelMesh, open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.runfile.reading import parse_override
from longspan.tracking.metrics import finite
from longspan.trained import HERE, is_huggingface_folder, load_huggingface, load_trained

T = TypeVar("T")
Report = Callable[[str, float], None]
TOKENS = 1 << 20
"""Of validation samples, unless their number is given."""
WAIT_S = 86400.0
"""How long a rank waits for the others at the end: they may have more or longer questions."""
ANSWERS = "10234 56789 a1b2"
"""Digits and letters as questions have them, in pieces that no tokenizer knows as words."""
FILLER = 16
"""Validation samples of which the text around a needle is taken."""


@dataclass(frozen=True)
class Wanted:
    """What to evaluate. `samples`: None for as many as have 1,048,576 tokens; 0 for no loss."""

    samples: int | None
    tasks: tuple[str, ...]
    trials: int


@dataclass(frozen=True)
class Evaluation:
    run: Run
    model: str
    step: int | None
    """Of the checkpoint."""
    data: str
    changes: list[str]
    """What is computed otherwise than the config.json of a Hugging Face folder says, or than with
    the weights of a checkpoint."""
    losses: Losses | None
    recall: list[dict[str, float | str]]

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON: sums in nats, which can be added up; null where non-finite."""
        found: dict[str, Any] = {"model": self.model, "step": self.step, "data": self.data}
        found |= {"context": self.run.data.context, "changes": self.changes}
        if (losses := self.losses) is not None:
            found |= {"tokens": losses.tokens, "nats": losses.nats, "loss": losses.mean}
            found |= {"perplexity": perplexity(losses.mean), "bits_per_byte": losses.bits_per_byte}
            found["by_position"] = losses.by_position()
            found["documents"] = [
                {**asdict(x), "loss": x.nats / x.tokens} for x in losses.documents()
            ]
        as_json: dict[str, Any] = finite(found | {"recall": self.recall})
        return as_json


def perplexity(nats: float) -> float:
    """exp(nats), infinite where that is no float."""
    return float(torch.tensor(nats, dtype=torch.float64).exp())


def evaluate(
    folder: Path,
    overrides: Sequence[str],
    wanted: Wanted,
    world: World,
    *,
    key_file: str = "",
    ema: bool = False,
    report: Report = lambda _detail, _fraction: None,
) -> Evaluation:
    """Evaluate the model in a run folder or a Hugging Face folder, on its validation split.

    With `ema` the weights are the averages of `train.ema`. The override `layout.tensor` has so many
    ranks split the model. `report` is told what this rank has done, and which share of it.
    """
    layout, own = _layout(overrides, world)
    device = choose_device(load_run(None, [*HERE, *_device(overrides)]), world.local_rank)
    with open_mesh(layout, world, device, timeout_s=WAIT_S) as mesh:
        return _evaluate(folder, [*own, *overrides], wanted, mesh, key_file, ema, report)


def _layout(overrides: Sequence[str], world: World) -> tuple[Layout, list[str]]:
    """How ranks share the work: `layout.tensor` of them split a model. And overrides for it."""
    parsed = [parse_override(override) for override in overrides]
    found = [value for keys, value in parsed if keys == ("layout", "tensor")]
    tensor = found[-1] if found and isinstance(found[-1], int) and found[-1] > 0 else 1
    if world.size % tensor:
        raise UserError(
            f"layout.tensor = {tensor} needs a multiple of {tensor} processes, but there "
            f"{'is' if world.size == 1 else 'are'} {world.size}: give --nproc {tensor}"
        )
    replicas = world.size // tensor
    own = [f"layout.replicate={replicas}", "train.micro_batch=1", f"train.global_batch={replicas}"]
    return Layout(replicate=replicas, tensor=tensor), own if world.size > 1 else []


def _device(overrides: Sequence[str]) -> list[str]:
    return [x for x in overrides if parse_override(x)[0] == ("train", "device")]


def _evaluate(
    folder: Path,
    overrides: Sequence[str],
    wanted: Wanted,
    mesh: ParallelMesh,
    key_file: str,
    ema: bool,
    report: Report,
) -> Evaluation:
    step, changes = None, list[str]()
    if is_huggingface_folder(folder):
        if ema:
            raise UserError(f"--ema needs the folder of a run, but {folder} is of Hugging Face")
        run, model = load_huggingface(folder, overrides, mesh)
        changes = read_folder_config(folder).changes(run)
    else:
        run, model, step = load_trained(folder, key_file, overrides, mesh, ema=ema)
        changes += ["the weights are averages (train.ema)"] if ema else []
    source = _open(folder, run)
    device = model.embedding.weight.device
    samples = []
    if wanted.samples != 0:
        count = max(1, TOKENS // run.data.context) if wanted.samples is None else wanted.samples
        samples = source.validation_samples(count)
        if not samples:
            raise UserError(
                "the validation split holds less than one sample: reduce data.context, or build "
                "the data with a larger validation split"
            )
    text = _tokenizer_of_tasks(source, run, wanted)
    trials = cells(wanted.tasks, run.data.context, wanted.trials) if wanted.tasks else []
    filler = _filler(source) if "needle" in wanted.tasks else []
    tensor, replicas = mesh.ranks["tensor"], mesh.ranks["replicate"]
    rank = mesh.world.rank // tensor  # ranks that split a model are neighbours
    with eval_mode(model), autocast(run.train):
        found = []
        for index in range(rank, len(samples), replicas):
            report(f"sample {index + 1:,} of {len(samples):,}", index / len(samples))
            found.append(sample_loss(model, samples[index], index, source.tokenizer, device))
        outcomes = list[Outcome | None]()
        for index in range(rank, len(trials), replicas):
            assert text is not None
            report(f"trial {index + 1:,} of {len(trials):,}", index / len(trials))
            outcomes.append(run_cell(model, text, filler, trials[index], device))
        every = in_order(_gathered(found, mesh.world)[::tensor])
        answered = [x for x in in_order(_gathered(outcomes, mesh.world)[::tensor]) if x is not None]
    losses = Losses(every) if samples else None
    if losses is not None and not losses.tokens:
        raise UserError("no token of the validation samples has a loss")
    if trials and not answered:
        raise UserError(
            f"data.context = {run.data.context:,} has no room for {' or '.join(wanted.tasks)}"
        )
    data, recalled = source.describe(), accuracies(answered)
    return Evaluation(run, str(folder), step, data, changes, losses, recalled)


def _open(folder: Path, run: Run) -> Source:
    source = open_source(run.data, run.model)
    tokenizer = source.tokenizer
    if is_huggingface_folder(folder) and not is_tokenizer_of(folder, tokenizer):
        name = tokenizer.name if tokenizer else "none"
        raise UserError(
            f"the data {run.data.source!r} has the tokenizer {name}, not that of {folder}: build "
            f"it with longspan data build --tokenizer {folder}/tokenizer.json -o FOLDER TEXT, and "
            "give data.source=FOLDER"
        )
    return source


def _tokenizer_of_tasks(source: Source, run: Run, wanted: Wanted) -> Tokenizer | None:
    tokenizer = source.tokenizer
    if not wanted.tasks:
        return tokenizer
    if tokenizer is None:
        raise UserError(
            f"{' and '.join(wanted.tasks)} need text, and data.source = {run.data.source!r} has "
            "none: its loss tells how well values are recalled"
        )
    decoded = tokenizer.decode(tokenizer.encode(ANSWERS))
    if "".join(decoded.split()) != "".join(ANSWERS.split()):  # where all are one unknown token
        raise UserError(
            f"{' and '.join(wanted.tasks)} ask for numbers, which the tokenizer {tokenizer.name} "
            "does not distinguish"
        )
    return tokenizer


def _filler(source: Source) -> list[int]:
    """Tokens of text of the validation split, without padding and where documents meet."""
    assert source.tokenizer is not None
    special = [*source.tokenizer.bos, source.tokenizer.eos]
    found: list[int] = []
    for sample in source.validation_samples(FILLER):
        is_text = ~np.isin(sample.tokens, [token for token in special if token is not None])
        if sample.documents is not None:
            is_text &= sample.documents >= 0
        found += sample.tokens[is_text].tolist()
    if not found:
        raise UserError("the validation split has no text to hide a fact in: use data that has one")
    return found


def _gathered(mine: list[T], world: World) -> list[list[T]]:
    """The lists of all ranks."""
    if world.size == 1:
        return [mine]
    every: list[list[T]] = [[] for _ in range(world.size)]
    dist.all_gather_object(every, mine)
    return every
