"""`longspan generate`: continue a prompt with a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from longspan.data.tokenizer import load_tokenizer
from longspan.device import autocast
from longspan.errors import UserError
from longspan.models.generation import Piece, Sampling, complete
from longspan.trained import is_huggingface_folder, load_huggingface, load_trained


def complete_from_run(
    run_dir: Path,
    prompt: str,
    *,
    count: int,
    temperature: float,
    top_p: float,
    seed: int,
    key_file: str = "",
) -> Iterator[Piece]:
    """Run `complete` with the model of a run folder or a Hugging Face folder."""
    if count < 0 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise UserError(
            "expected --tokens >= 0, --temperature >= 0 and --top-p in (0, 1], got "
            f"{count}, {temperature} and {top_p}"
        )
    if not 0 <= seed < 1 << 63:
        raise UserError(f"expected 0 <= --seed < 2^63, got {seed}")
    if is_huggingface_folder(run_dir):
        run, model = load_huggingface(run_dir)
    else:
        run, model, _ = load_trained(run_dir, key_file)
    if run.data.source == "recall":
        raise UserError(
            f"{run_dir} was trained with data.source = {run.data.source!r}, not on text"
        )
    tokenizer = load_tokenizer(run_dir)
    yield from complete(
        model,
        tokenizer,
        prompt,
        Sampling(count, temperature, top_p, seed=seed),
        device=model.embedding.weight.device,
        context=run.data.context,
        forward_context=partial(autocast, run.train),
    )
